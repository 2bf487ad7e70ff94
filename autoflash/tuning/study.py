"""One study: ask, compile ahead, check, time, tell, store; then finalists in turns, the record."""

import itertools
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field

from autoflash.codegen.render import render
from autoflash.kernels import KERNELS, kernels_for
from autoflash.problem import Bucket, Problem
from autoflash.store.evidence import Kernels, evidence_order
from autoflash.store.record import Measurement, Trial, TrialStatus, TuningRecord
from autoflash.store.store import Store
from autoflash.target import Target
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.progress import (
    Budget,
    Listener,
    StudyPlan,
    TuneResult,
    emitted_path,
    make_record,
    make_trial,
)
from autoflash.tuning.runner import Runner
from autoflash.tuning.search import Search, ranked
from autoflash.tuning.versions import time_stamp

logger = logging.getLogger(__name__)

_FINALISTS = 5
_ROUNDS = 7
_FINALS_S = 4.0
_GRACE_S = 30.0
# Finalists within this of the best are ties: the one that needs less of the GPU wins, so that the
# choice is stable from run to run.
_TIE = 1.005
# A candidate whose first samples are this much slower than the best is not timed further.
_GIVE_UP = 1.3
# Configs of each kernel, by the written model, that are tried before TPE has a say.
_FIRST_OF_KERNEL = 2
# Seconds of one core that a candidate takes to compile, for guessing what a budget can hold.
_COMPILE_S = 4.0


def tune_one(
    problem: Problem, runner: Runner, store: Store, budget: Budget, listener: Listener
) -> TuneResult:
    """One study on a GPU that is present (or recorded)."""
    study = _Study(problem, runner, store, listener)
    begin = time.monotonic()
    finals_s = min(_FINALS_S, 0.15 * budget.seconds)
    interrupted = False
    try:
        study.run(begin + budget.seconds - finals_s, budget)
        record = study.conclude(interleaved=True)
    except KeyboardInterrupt:
        interrupted = True
        record = study.conclude(interleaved=False)
    result = TuneResult(
        problem=problem,
        target=runner.target,
        record=record,
        trials=study.trials,
        resumed=study.resumed,
        space=len(study.candidates),
        seconds=time.monotonic() - begin,
        path=emitted_path(record),
        interrupted=interrupted,
    )
    listener.finished(result)
    return result


@dataclass
class _Study:
    problem: Problem
    runner: Runner
    store: Store
    listener: Listener
    trials: list[Trial] = field(default_factory=list)
    resumed: int = 0

    def __post_init__(self) -> None:
        self.kernels = kernels_for(self.problem, self.runner.target)
        self.candidates = ranked(self.kernels, self.problem, self.runner.target)
        self._defaults = [
            Candidate(kernel=kernel, config=config, came_from="default")
            for kernel in self.kernels
            for config in kernel.defaults(self.problem, self.runner.target)[:1]
        ]

    def run(self, deadline: float, budget: Budget) -> None:
        """Try candidates until the budget or the space ends."""
        limit = budget.trials
        capacity = self.runner.workers * budget.seconds / _COMPILE_S
        brute_force = len(self.candidates) <= (limit or capacity)
        self.search = Search(self.candidates, brute_force=brute_force, first=self._advice())
        for trial in self._past():
            self.resumed += 1
            self._learn(Candidate(kernel=KERNELS[trial.kernel], config=trial.config), trial)
        unseen = len(self.candidates) - self.resumed
        plan = StudyPlan(
            space=len(self.candidates),
            resumed=self.resumed,
            most=unseen if limit is None else min(unseen, limit),
            seconds=budget.seconds,
        )
        self.listener.started(self.problem, self.runner.target, plan)
        waiting: dict[Future[Outcome], Candidate] = {}
        depth = 2 * self.runner.workers
        asked = 0
        while (left := self._seconds_left(deadline, waiting.values())) > 0:
            may_ask = time.monotonic() < deadline
            while may_ask and len(waiting) < depth and (limit is None or asked < limit):
                candidate = self.search.ask()
                if candidate is None:
                    break
                asked += 1
                waiting[self.runner.compile(self.problem, candidate)] = candidate
            if not waiting:
                break
            for future in wait(waiting, left, FIRST_COMPLETED).done:
                left = self._seconds_left(deadline, [waiting[future]])
                candidate = waiting.pop(future)
                if left > 0:
                    self._finish(candidate, future.result())
        for future in waiting:
            future.cancel()

    def _seconds_left(self, deadline: float, waiting: Iterable[Candidate]) -> float:
        """Until the end, with ``waiting`` under way."""
        # A small budget may end while the first ones still compile. A record must not be worse than
        # what is served without one: a default is waited for, and at least one candidate.
        owed = any(candidate in self._defaults for candidate in waiting)
        grace = 0.0 if _timed(self.trials) and not owed else _GRACE_S
        return deadline + grace - time.monotonic()

    def conclude(self, *, interleaved: bool) -> TuningRecord | None:
        """Re-time the finalists in turns, store the best of each kernel, return the winner's
        record.

        A call that the winner's kernel can't run (other strides, deterministic, a gradient alone)
        is then served by the next kernel's own best.
        """
        finalists = _finalists(self.trials)
        if not finalists:
            logger.warning("%s: no candidate survived; nothing is stored", self.problem.label())
            return None
        measured = {i: t.measurement for i, t in enumerate(finalists) if t.measurement}
        if interleaved:
            candidates = [Candidate(kernel=KERNELS[t.kernel], config=t.config) for t in finalists]
            outcomes = self.runner.interleave(self.problem, candidates, _ROUNDS)
            again = {i: o.measurement for i, o in enumerate(outcomes) if o.measurement}
            measured = again or measured
        winners = [
            _winner(finalists, {i: measured[i] for i in own})
            for own in _by_kernel(finalists, measured)
        ]
        now = time_stamp()
        records = [make_record(finalists[i], measured[i], "measured", now) for i in winners]
        records.sort(key=evidence_order)
        self.store.add_records(records)
        return records[0]

    def _finish(self, candidate: Candidate, compiled: Outcome) -> None:
        outcome = compiled
        if compiled.status is TrialStatus.ok:
            best = self._best_ms()
            give_up = best * _GIVE_UP if best is not None else None
            measured = self.runner.measure(self.problem, candidate, give_up)
            outcome = Outcome(
                status=measured.status,
                reason=measured.reason,
                measurement=measured.measurement,
                resources=compiled.resources,
            )
        trial = make_trial(self.problem, self.runner, candidate, outcome)
        self.store.add_trial(trial)
        self._learn(candidate, trial)
        self.listener.tried(trial, self._best_ms())

    def _learn(self, candidate: Candidate, trial: Trial) -> None:
        self.search.tell(candidate, _ms(trial))
        self.trials.append(trial)

    def _best_ms(self) -> float | None:
        return min((_median(t) for t in _timed(self.trials)), default=None)

    def _past(self) -> list[Trial]:
        """Trials of an earlier run that still count: same problem, source and compiler.

        A trial that timed out or crashed may have been unlucky and is tried again.
        """
        target = self.runner.target
        found: dict[tuple[str, str], Trial] = {}
        for trial in self.store.trials(Bucket.of(self.problem), target):
            if trial.problem != self.problem or trial.status in _RETRIED:
                continue
            if trial.provenance.triton != self.runner.versions["triton"]:
                continue
            source = render(KERNELS[trial.kernel], self.problem, trial.config)
            if source.kernel_hash == trial.provenance.source_hash:
                found[(trial.kernel, trial.config.to_json())] = trial
        return list(found.values())

    def _advice(self) -> list[Candidate]:
        """Configs worth trying first: what the store knows nearby, and the kernels' defaults."""
        bucket, target = Bucket.of(self.problem), self.runner.target
        advice = self._known(bucket, target, None)
        for kernel in self.kernels:
            advice += self._known(bucket, target, frozenset({kernel.name}))
        advice += self._defaults
        for kernel in self.kernels:
            # Each kernel's best is kept: none is judged by its default alone.
            own = (c for c in self.candidates if c.kernel is kernel)
            advice += itertools.islice(own, _FIRST_OF_KERNEL)
        return advice

    def _known(self, bucket: Bucket, target: Target, kernels: Kernels) -> list[Candidate]:
        """The configs of the store's records of the bucket, its neighbours and its siblings."""
        own = self.store.best(bucket, target, kernels)
        near = self.store.neighbours(bucket, target, kernels)[:3]
        siblings = self.store.siblings(bucket, target, kernels)[:2]
        known = [(own, "record")] if own else []
        known += [(record, f"neighbour {record.bucket.label()}") for record in near]
        known += [(record, f"sibling {record.target.name}") for record in siblings]
        return [
            Candidate(kernel=KERNELS[record.kernel], config=record.config, came_from=came_from)
            for record, came_from in known
        ]


def _finalists(trials: Sequence[Trial]) -> list[Trial]:
    """The fastest trials, and the fastest of each kernel that isn't among them."""
    ordered = sorted(_timed(trials), key=_median)
    best = {trial.kernel: trial for trial in reversed(ordered)}
    head = ordered[:_FINALISTS]
    return head + [trial for trial in best.values() if all(trial is not t for t in head)]


def _by_kernel(finalists: Sequence[Trial], measured: Iterable[int]) -> list[list[int]]:
    """The places in ``finalists`` that were measured, kernel by kernel."""
    places: dict[str, list[int]] = {}
    for i in measured:
        places.setdefault(finalists[i].kernel, []).append(i)
    return list(places.values())


_RETRIED = (TrialStatus.timeout, TrialStatus.crashed, TrialStatus.noisy, TrialStatus.predicted)


def _ms(trial: Trial) -> float | None:
    """The time of a trial that ran right; None for any other, whatever was measured."""
    right = trial.status in (TrialStatus.ok, TrialStatus.noisy)
    return trial.measurement.median_ms if right and trial.measurement else None


def _timed(trials: Sequence[Trial]) -> list[Trial]:
    """Trials with a time; the clean ones alone, unless all are noisy."""
    timed = [t for t in trials if _ms(t) is not None]
    return [t for t in timed if t.status is TrialStatus.ok] or timed


def _median(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.median_ms


def _winner(finalists: Sequence[Trial], measured: dict[int, Measurement]) -> int:
    best = min(m.median_ms for m in measured.values())
    ties = [i for i, m in measured.items() if m.median_ms <= best * _TIE]
    return min(
        ties,
        key=lambda i: (
            finalists[i].shared_bytes or 0,
            finalists[i].registers or 0,
            measured[i].median_ms,
        ),
    )
