"""Tables, progress and JSON of the command line."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.store.record import Trial, TuningRecord
from autoflash.target import Target
from autoflash.tuning.progress import Listener, StudyPlan, TuneResult

if TYPE_CHECKING:
    from autoflash.diagnosis import Finding

_TOP_TRIALS = 8


@dataclasses.dataclass
class _Progress:
    """Of one study that is under way."""

    title: str
    plan: StudyPlan
    begin: float
    best_ms: float | None = None
    counts: dict[str, int] = dataclasses.field(default_factory=dict)

    def lines(self) -> str:
        plan, tried = self.plan, sum(self.counts.values())
        counts = ", ".join(f"{count} {status}" for status, count in self.counts.items())
        seconds = time.monotonic() - self.begin
        left = max(0.0, plan.seconds - seconds)
        if tried:
            left = min(left, seconds / tried * (plan.most - tried))
        best = f"best {self.best_ms:.4f} ms" if self.best_ms is not None else "no time yet"
        resumed = f", {plan.resumed} resumed" if plan.resumed else ""
        rest = f"{tried} of {plan.most} ({counts or 'starting'}{resumed}), ETA {left:.0f} s"
        return f"{self.title}\n  {best}; {rest}"


class ProgressListener(Listener):
    """Shows trials, the best so far and the time left, of each study that is under way; keeps the
    results. A context manager."""

    def __init__(self, console: Console, *, quiet: bool = False) -> None:
        self.results: list[TuneResult] = []
        self._live = None if quiet else Live(console=console, refresh_per_second=4, transient=True)
        self._studies: dict[Problem, _Progress] = {}

    def started(self, problem: Problem, target: Target, plan: StudyPlan) -> None:
        title = f"{problem.label()} on {target.name}"
        self._studies[problem] = _Progress(title=title, plan=plan, begin=time.monotonic())
        self._show()

    def tried(self, trial: Trial, best_ms: float | None) -> None:
        study = self._studies[trial.problem]
        status = trial.status.value
        study.counts[status] = study.counts.get(status, 0) + 1
        study.best_ms = best_ms
        self._show()

    def finished(self, result: TuneResult) -> None:
        self._studies.pop(result.problem, None)
        self.results.append(result)

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(Text("\n".join(s.lines() for s in self._studies.values())))

    def __enter__(self) -> "ProgressListener":
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*exception)


def trials_table(result: TuneResult) -> Table:
    """The best trials of a study, fastest first."""
    title = f"{result.problem.label()} on {result.target.name}"
    table = Table(title=title, title_justify="left", show_edge=False)
    for name in ("ms", "TFLOP/s", "smem", "regs", "how", "kernel", "config"):
        table.add_column(name, justify="left" if name in ("how", "kernel", "config") else "right")
    timed = sorted((t for t in result.trials if _ms(t) is not None), key=lambda t: _ms(t) or 0.0)
    top = timed[:_TOP_TRIALS]
    common = {name: _common([t for t in top if t.kernel == name]) for name in KERNELS}
    for trial in top:
        ms = _ms(trial) or 0.0
        table.add_row(
            f"{ms:.4f}",
            f"{result.problem.tflops(ms):.0f}",
            str(trial.shared_bytes or ""),
            str(trial.registers or ""),
            "predicted" if trial.measurement is None else "measured",
            trial.kernel,
            Config(
                **{k: v for k, v in trial.config.items() if k not in common[trial.kernel]}
            ).label(),
        )
    shared = [f"all {name}: {config.label()}" for name, config in common.items() if config]
    table.caption = "\n".join(shared) or None
    table.caption_justify = "left"
    return table


def _common(trials: list[Trial]) -> Config:
    """What all these configs say alike; nothing of a single one."""
    if len(trials) < 2:
        return Config()
    first, *others = (trial.config for trial in trials)
    alike = {k: v for k, v in first.items() if all(other[k] == v for other in others)}
    return Config(**alike)


def results_table(results: list[TuneResult]) -> Table:
    """One row per study: the winner and what the search did."""
    table = Table(show_edge=False)
    names = ("problem", "winner", "ms", "TFLOP/s", "trials", "resumed", "space", "s", "GPU")
    for name in names:
        table.add_column(name, justify="left" if name in ("problem", "winner") else "right")
    for result in results:
        record = result.record
        ms = record.measurement.median_ms if record else None
        table.add_row(
            result.problem.label(),
            f"{record.kernel} ({record.kind})" if record else "none survived",
            f"{ms:.4f}" if ms else "",
            f"{result.problem.tflops(ms):.0f}" if ms else "",
            str(len(result.trials)),
            str(result.resumed),
            str(result.space),
            f"{result.seconds:.0f}",
            f"{result.gpu_seconds / result.seconds:.0%}" if result.gpu_seconds else "",
        )
    lines = [f"emitted: {result.path}" for result in results if result.path]
    if any(result.gpu_seconds for result in results):
        share = sum(r.gpu_seconds for r in results) / sum(r.seconds for r in results)
        lines.append(f"the GPU was checking or timing for {share:.0%} of the time")
    table.caption = "\n".join(lines)
    table.caption_justify = "left"
    return table


def records_table(records: list[TuningRecord]) -> Table:
    """The records of a store, a line each."""
    table = Table(show_edge=False)
    for name in ("target", "problem", "kernel", "ms", "TFLOP/s", "kind", "date", "config"):
        table.add_column(name, justify="right" if name in ("ms", "TFLOP/s") else "left")
    for record in records:
        ms = record.measurement.median_ms
        table.add_row(
            record.target.name,
            record.problem.label(),
            record.kernel,
            f"{ms:.4f}",
            f"{record.problem.tflops(ms):.0f}",
            record.kind + (" noisy" if record.measurement.noisy else ""),
            record.provenance.created_at[:10],
            record.config.label(),
        )
    if not records:
        table.caption = "no records: `autoflash tune` makes some"
    return table


def record_panel(record: TuningRecord, path: Path | None) -> RenderableType:
    """Everything a record holds."""
    m, p = record.measurement, record.provenance
    pipeline = KERNELS[record.kernel].pipeline(record.problem, record.config)
    lines = [
        f"target    {record.target.name} ({record.target.arch}, {record.target.sm_count} SMs)",
        f"kernel    {record.kernel}",
        f"config    {record.config.label()}",
        "pipeline  " + ("\n" + 10 * " ").join(pipeline),
        f"time      {m.median_ms:.4f} ms (p20 {m.p20_ms:.4f}, p80 {m.p80_ms:.4f}), "
        f"{m.repeats} repeats by {m.method}{', noisy: ' + m.throttle if m.noisy else ''}",
        f"rate      {record.problem.tflops(m.median_ms):.0f} TFLOP/s ({record.kind})",
        f"versions  triton {p.triton}, torch {p.torch}, cuda {p.cuda}, driver {p.driver}",
        f"source    {p.source_hash}, tuned {p.created_at} by autoflash {p.autoflash} on {p.origin}",
        f"file      {path}",
    ]
    text = Text("\n".join(lines))
    return Panel(Group(text), title=record.problem.label(), title_align="left")


def bench_table(problem: Problem, result: dict[str, Any]) -> Table:
    """Times of one problem by implementation."""
    table = Table(title=f"{problem.label()} on {result['gpu']}", show_edge=False)
    for name in ("implementation", "ms", "TFLOP/s"):
        table.add_column(name, justify="left" if name == "implementation" else "right")
    for name, ms in result["ms"].items():
        table.add_row(name, f"{ms:.4f}", f"{problem.tflops(ms):.0f}")
    return table


def doctor_table(findings: list["Finding"]) -> Table:
    """What doctor found."""
    table = Table(show_edge=False, show_header=False)
    colour = {"ok": "green", "warning": "yellow", "error": "red"}
    for finding in findings:
        mark = Text(finding.state, style=colour[finding.state])
        table.add_row(mark, finding.subject, Text(finding.text, overflow="fold"))
    return table


def result_as_dict(result: TuneResult) -> dict[str, Any]:
    """A study's outcome for scripts."""
    statuses = [trial.status.value for trial in result.trials]
    return {
        "problem": result.problem.as_dict(),
        "target": result.target.name,
        "record": result.record and record_as_dict(result.record),
        "trials": {status: statuses.count(status) for status in sorted(set(statuses))},
        "resumed": result.resumed,
        "space": result.space,
        "seconds": round(result.seconds, 2),
        "gpu_seconds": round(result.gpu_seconds, 2),
        "path": str(result.path) if result.path else None,
        "interrupted": result.interrupted,
    }


def record_as_dict(record: TuningRecord) -> dict[str, Any]:
    """A record for scripts."""
    return {
        "problem": record.problem.as_dict(),
        "target": record.target.name,
        "kernel": record.kernel,
        "config": dict(record.config),
        "kind": record.kind,
        "measurement": dataclasses.asdict(record.measurement),
        "tflops": round(record.problem.tflops(record.measurement.median_ms), 1),
        "provenance": dataclasses.asdict(record.provenance),
    }


def _ms(trial: Trial) -> float | None:
    return trial.measurement.median_ms if trial.measurement else trial.predicted_ms
