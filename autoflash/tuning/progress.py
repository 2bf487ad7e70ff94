"""What a study is given, what it tells while it runs, and what it leaves."""

import dataclasses
import threading
from dataclasses import dataclass
from pathlib import Path

from autoflash.codegen.render import render
from autoflash.codegen.source_cache import emit
from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.store.record import Measurement, Trial, TuningRecord
from autoflash.target import Target
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.runner import Runner
from autoflash.tuning.versions import provenance

_MAX_SECONDS = 10**7


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits of one study: wall-clock seconds, and trials (None: no limit)."""

    seconds: float
    trials: int | None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < _MAX_SECONDS:
            raise InvalidInputError(
                f"budget of {self.seconds} s: must be more than 0 and below {_MAX_SECONDS}"
            )
        if self.trials is not None and self.trials < 1:
            raise InvalidInputError(f"budget of {self.trials} trials: must be at least 1")


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """What a study sets out to do: feasible configs, trials taken over from an earlier run, the
    most that will be tried now, and the seconds that it may take."""

    space: int
    resumed: int
    most: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    """What a study found: the record it stored (None if nothing survived), its trials (those taken
    over from an earlier run first), how it went. ``gpu_seconds``: the GPU checked or timed."""

    problem: Problem
    target: Target
    record: TuningRecord | None
    trials: list[Trial]
    resumed: int
    space: int
    seconds: float
    path: Path | None
    gpu_seconds: float = 0.0
    interrupted: bool = False


class Listener:
    """Hears of progress; the base class ignores it."""

    def started(self, problem: Problem, target: Target, plan: StudyPlan) -> None:
        """A study begins."""

    def tried(self, trial: Trial, best_ms: float | None) -> None:
        """A trial ended."""

    def finished(self, result: TuneResult) -> None:
        """A study ended."""


class OneAtATime(Listener):
    """Hands on to ``listener`` what several threads tell, one call at a time."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._lock = threading.Lock()

    def started(self, problem: Problem, target: Target, plan: StudyPlan) -> None:
        with self._lock:
            self._listener.started(problem, target, plan)

    def tried(self, trial: Trial, best_ms: float | None) -> None:
        with self._lock:
            self._listener.tried(trial, best_ms)

    def finished(self, result: TuneResult) -> None:
        with self._lock:
            self._listener.finished(result)


def emitted_path(record: TuningRecord | None) -> Path | None:
    """The file of the record's kernel, written if it isn't there."""
    if record is None:
        return None
    return emit(render(KERNELS[record.kernel], record.problem, record.config))


def make_trial(
    problem: Problem, runner: Runner, candidate: Candidate, outcome: Outcome,
    predicted_ms: float | None = None,
) -> Trial:  # fmt: skip
    """The Trial that the store keeps of an outcome."""
    source = render(candidate.kernel, problem, candidate.config)
    resources = outcome.resources
    return Trial(
        problem=problem,
        target=runner.target,
        kernel=candidate.kernel.name,
        config=candidate.config,
        status=outcome.status,
        reason=outcome.reason,
        measurement=outcome.measurement,
        predicted_ms=predicted_ms,
        shared_bytes=resources.shared_bytes if resources else None,
        registers=resources.registers if resources else None,
        spills=resources.spills if resources else None,
        came_from=candidate.came_from,
        provenance=provenance(runner.versions, source.kernel_hash),
    )


def is_of_same_code(trial: Trial, problem: Problem, runner: Runner) -> bool:
    """Whether a stored trial is of this very problem, source and compiler."""
    if trial.problem != problem or trial.provenance.triton != runner.versions["triton"]:
        return False
    source = render(KERNELS[trial.kernel], problem, trial.config)
    return source.kernel_hash == trial.provenance.source_hash


def make_record(trial: Trial, measurement: Measurement, kind: str, created_at: str) -> TuningRecord:
    """The record of a winning trial. Those of one study share ``created_at``."""
    return TuningRecord(
        problem=trial.problem,
        target=trial.target,
        kernel=trial.kernel,
        config=trial.config,
        measurement=measurement,
        provenance=dataclasses.replace(trial.provenance, created_at=created_at),
        kind=kind,
    )
