"""One study: ask, compile ahead, check, time, tell, store; then finalists in turns, the record.

The GPU is kept busy: while one candidate is measured by a thread of its own, the one before is told
and stored and the next ones are asked for; where none has been compiled, one whose binary is there
already takes its turn.
"""

import dataclasses
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from autoflash.kernels import kernels_for
from autoflash.problem import Problem
from autoflash.store.base import AnyStore
from autoflash.store.evidence import evidence_order
from autoflash.store.record import Trial, TrialStatus, TuningRecord, time_stamp
from autoflash.tuning import known
from autoflash.tuning.finals import Finals, finalists, winners
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.measuring import Measuring
from autoflash.tuning.progress import (
    Budget,
    Listener,
    StudyPlan,
    TuneResult,
    emitted_path,
    make_record,
    make_trial,
)
from autoflash.tuning.retries import Retries
from autoflash.tuning.runner import Runner
from autoflash.tuning.search import Search, ranked
from autoflash.tuning.versions import provenance

logger = logging.getLogger(__name__)

_FINALS_S = 4.0
_GRACE_S = 30.0
# A candidate whose first samples are this much slower than the best is not timed further.
_GIVE_UP = 1.3
# Seconds of one core that a candidate takes to compile, for guessing what a budget can hold.
_COMPILE_S = 4.0


def tune_one(
    problem: Problem, runner: Runner, store: AnyStore, budget: Budget, listener: Listener
) -> TuneResult:
    """One study on a GPU that is present (or recorded)."""
    study = Study(problem, runner, store, budget, listener, threading.Event())
    return study.tune(before_finals=lambda: None)


def tune_each(
    problems: Iterator[Problem],
    runner: Runner,
    store: AnyStore,
    budget: Budget,
    listener: Listener,
    stop: threading.Event,
) -> Iterator[TuneResult]:
    """A study of each problem in turn; the next one's first candidates compile during the finals,
    so that the GPU doesn't wait for them. Ends early when ``stop`` is set."""
    following: list[Study] = []

    def prepare() -> None:
        problem = None if stop.is_set() else next(problems, None)
        if problem is not None:
            following.append(Study(problem, runner, store, budget, listener, stop))
            following[-1].compile_ahead()

    prepare()
    while following:
        result = following.pop().tune(prepare)
        yield result
        if result.interrupted:
            break
    for study in following:
        study.abandon()


class Study:
    """A study under way: what has been tried, and what is being compiled."""

    def __init__(
        self,
        problem: Problem,
        runner: Runner,
        store: AnyStore,
        budget: Budget,
        listener: Listener,
        stop: threading.Event,
        only: Sequence[Candidate] | None = None,
    ) -> None:
        """``only`` these are tried, if given, whatever was tried before."""
        self._only = only
        self.problem = problem
        self.runner = runner
        self.store = store
        self.budget = budget
        self.listener = listener
        self.stop = stop
        self.trials: list[Trial] = []
        self.resumed = 0
        self.kernels = kernels_for(problem, runner.target)
        ranking = ranked(self.kernels, problem, runner.target) if only is None else only
        self.candidates = list(ranking)
        self._defaults = known.defaults(problem, runner.target, self.kernels)
        self._search: Search | None = None
        self._asked = 0
        self._waiting: dict[Future[Outcome], Candidate] = {}
        self._ready: deque[tuple[Candidate, Outcome]] = deque()
        self._noisy = Retries(hopeless=_GIVE_UP)
        self._gpu_seconds = 0.0

    def tune(self, before_finals: Callable[[], None]) -> TuneResult:
        """Search, re-time the finalists, store the records; Ctrl-C ends it with the best so far."""
        begin = time.monotonic()
        finals_s = min(_FINALS_S, 0.15 * self.budget.seconds)
        interrupted = False
        try:
            self.run(begin + self.budget.seconds - finals_s)
            interrupted = self.stop.is_set()
            if not interrupted:
                before_finals()
            record = self.conclude(interleaved=not interrupted)
        except KeyboardInterrupt:
            interrupted = True
            self.abandon()
            record = self.conclude(interleaved=False)
        seconds = time.monotonic() - begin
        result = TuneResult(
            problem=self.problem,
            target=self.runner.target,
            record=record,
            trials=self.trials,
            resumed=self.resumed,
            space=len(self.candidates),
            seconds=seconds,
            gpu_seconds=min(self._gpu_seconds, seconds),
            path=emitted_path(record),
            interrupted=interrupted,
        )
        self.listener.finished(result)
        return result

    def compile_ahead(self) -> None:
        """Start to compile the first candidates; may be called before ``tune``."""
        self._fill(self._open_search())

    def abandon(self) -> None:
        """Take what waits to be compiled off the queue."""
        for future in self._waiting:
            future.cancel()
        self._waiting.clear()
        self._ready.clear()

    def run(self, deadline: float) -> None:
        """Try candidates until the budget or the space ends."""
        search = self._open_search()
        # Records that were stored since the first ones were asked for.
        search.advise(self._known_first())
        # Resumed trials may be of configs that advice has cut since.
        unseen = max(0, len(self.candidates) - self.resumed)
        limit = self.budget.trials
        plan = StudyPlan(
            space=len(self.candidates),
            resumed=self.resumed,
            most=unseen if limit is None else min(unseen, limit),
            seconds=self.budget.seconds,
        )
        self.listener.started(self.problem, self.runner.target, plan)
        # However short the budget: the defaults are among these.
        self._fill(search)
        with Measuring(self.runner, self.problem) as gpu:
            while True:
                measured = gpu.take()
                self._start_next(gpu, search, deadline, measured and measured[1])
                if measured is not None:
                    self._measured(gpu, *measured)
                left = self._seconds_left(deadline, self._under_way(gpu))
                if left <= 0:
                    break
                # One at a time, for asking takes a while, in which the GPU may come to its end.
                more = self._in_time(deadline) and self._fill(search, most=1)
                self._start_next(gpu, search, deadline)
                if gpu.idle and not self._waiting:
                    break
                futures: list[Future[Any]] = [*self._waiting, *gpu.futures]
                done = wait(futures, 0.0 if more else left, FIRST_COMPLETED).done
                self._take_compiled(done)
            measured = gpu.take(waiting=True)
            if measured is not None:
                self._measured(gpu, *measured)
        self.abandon()

    def _under_way(self, gpu: Measuring) -> list[Candidate]:
        return [
            *self._waiting.values(),
            *(candidate for candidate, _ in self._ready),
            *gpu.candidates,
        ]

    def _start_next(
        self, gpu: Measuring, search: Search, deadline: float, last: Outcome | None = None
    ) -> None:
        """Give the GPU something to do, if it has nothing and something can be done. ``last`` is
        what it has measured and nobody was told of yet."""
        if not gpu.idle:
            return
        best = self._best_ms()
        if last is not None and last.status is TrialStatus.ok and last.measurement is not None:
            best = min(best or math.inf, last.measurement.median_ms)
        job = None
        if self._in_time(deadline):
            nothing_else = not self._waiting and not self._ready
            job = self._noisy.due(best, nothing_else=nothing_else)
        while job is None and self._ready:
            job = self._ready.popleft()
            if self._seconds_left(deadline, [job[0]]) <= 0:
                job = None
        # A limit on trials says that each is worth having: those aren't chosen.
        if job is None and self.budget.trials is None and self._in_time(deadline):
            job = search.ask_compiled()
        if job is not None:
            give_up = best * _GIVE_UP if best is not None else None
            gpu.start(*job, give_up)

    def _take_compiled(self, done: Iterable[Future[Any]]) -> None:
        for future in done:
            candidate = self._waiting.pop(future, None)
            if candidate is None:
                continue  # what the GPU has measured
            compiled = future.result()
            if compiled.status is TrialStatus.ok:
                self._ready.append((candidate, compiled))
            else:
                self._keep(candidate, compiled)

    def _measured(self, gpu: Measuring, candidate: Candidate, outcome: Outcome) -> None:
        """Learn of it; one that was timed on a busy GPU has its turn again later."""
        self._gpu_seconds += gpu.seconds
        gpu.seconds = 0.0
        self._noisy.note(candidate, outcome)
        self._keep(candidate, outcome)

    def _open_search(self) -> Search:
        """The search, told of what an earlier run has tried."""
        if self._search is None:
            limit = self.budget.trials
            capacity = self.runner.workers * self.budget.seconds / _COMPILE_S
            brute_force = self._only is not None or len(self.candidates) <= (limit or capacity)
            first = self._known_first()
            self._search = Search(self.candidates, brute_force=brute_force, first=first)
            kernels = self.kernels if self._only is None else ()
            for trial in known.past_trials(self.store, self.problem, self.runner, kernels):
                self.resumed += 1
                self._learn(Candidate.of(trial), trial)
        return self._search

    def _known_first(self) -> list[Candidate]:
        if self._only is not None:
            return list(self._only)
        target, kernels = self.runner.target, self.kernels
        return known.advice(self.store, self.problem, target, kernels, self.candidates)

    def _fill(self, search: Search, most: int | None = None) -> bool:
        """Keep every compiler busy, with ``most`` candidates more; whether there may be others."""
        limit = self.budget.trials
        while len(self._waiting) + len(self._ready) < 2 * self.runner.workers:
            if most == 0:
                return True
            candidate = None if limit is not None and self._asked >= limit else search.ask()
            if candidate is None:
                break
            self._asked += 1
            most = None if most is None else most - 1
            self._waiting[self.runner.compile(self.problem, candidate)] = candidate
        return False

    def _in_time(self, deadline: float) -> bool:
        return not self.stop.is_set() and time.monotonic() < deadline

    def _seconds_left(self, deadline: float, waiting: Iterable[Candidate]) -> float:
        """Until the end, with ``waiting`` under way."""
        if self.stop.is_set():
            return 0.0
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
        if interleaved:
            timed = functools.partial(_timed, self.trials)
            begin = time.monotonic()
            final, measured = Finals(self.runner, self.problem, timed, self._fall).hold()
            self._gpu_seconds += time.monotonic() - begin
        else:
            final = finalists(_timed(self.trials))
            measured = {i: t.measurement for i, t in enumerate(final) if t.measurement}
        if not measured:
            logger.warning("%s: no candidate survived; nothing is stored", self.problem.label())
            return None
        now = time_stamp()
        places = winners(final, measured)
        records = [make_record(final[i], measured[i], "measured", now) for i in places]
        records.sort(key=evidence_order)
        self.store.add_records(records)
        return records[0]

    def _fall(self, trial: Trial, outcome: Outcome) -> None:
        """A finalist failed: that is now the last word on it, here and in the store."""
        reason = f"in the finals: {outcome.reason}"
        logger.warning("%s, %s: %s", trial.kernel, trial.config.label(), reason)
        fallen = dataclasses.replace(
            trial,
            status=outcome.status,
            reason=reason,
            measurement=None,
            provenance=provenance(self.runner.versions, trial.provenance.source_hash),
        )
        self.store.add_trial(fallen)
        self.trials[:] = [fallen if one is trial else one for one in self.trials]

    def _keep(self, candidate: Candidate, outcome: Outcome) -> None:
        trial = make_trial(self.problem, self.runner, candidate, outcome)
        self.store.add_trial(trial)
        self._learn(candidate, trial, outcome)
        self.listener.tried(trial, self._best_ms())

    def _learn(self, candidate: Candidate, trial: Trial, outcome: Outcome | None = None) -> None:
        self._open_search().tell(candidate, trial.timed_ms, outcome)
        self.trials.append(trial)

    def _best_ms(self) -> float | None:
        return min(filter(None, (t.timed_ms for t in _timed(self.trials))), default=None)


def _timed(trials: Sequence[Trial]) -> list[Trial]:
    """Trials with a time; the clean ones alone, unless all are noisy."""
    # The last word on each candidate: a noisy one may have been timed again.
    last = {(trial.kernel, trial.config): trial for trial in trials}.values()
    timed = [t for t in last if t.timed_ms is not None]
    return [t for t in timed if t.status is TrialStatus.ok] or timed
