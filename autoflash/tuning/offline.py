"""Tuning for a GPU that is not there: compile with Triton's own assembler, drop, rank, predict."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait

from autoflash.kernels import KERNELS, kernels_for
from autoflash.problem import Bucket, Problem
from autoflash.store.base import AnyStore
from autoflash.store.record import Measurement, Trial, TrialStatus, TuningRecord, time_stamp
from autoflash.target import Target
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.progress import (
    Budget,
    Listener,
    StudyPlan,
    TuneResult,
    emitted_path,
    is_of_same_code,
    make_record,
    make_trial,
)
from autoflash.tuning.resources import Resources
from autoflash.tuning.runner import Runner
from autoflash.tuning.search import ranked

# The written model orders the space well enough that compiling more of it seldom changes the top.
DEFAULT_TRIALS = 24
# Of these at least so many should survive; else the search goes on.
_ENOUGH = 4
# What a spilled byte per thread costs, as fitted to the same trials as the written model.
_SPILL_COST = 3e-4


def tune_offline(
    problem: Problem, runner: Runner, store: AnyStore, budget: Budget, listener: Listener
) -> TuneResult:
    """Compile the best-ranked candidates, drop what overflows or spills, rank the rest again with
    the binaries' real resources, and store the first as predicted.

    Where everything spills (wide heads on older GPUs), those that spill least are ranked instead.
    What an earlier run compiled is ranked with the rest, not compiled again.
    """
    begin = time.monotonic()
    study = _OfflineStudy(problem, runner, store, listener)
    wanted = min(budget.trials or DEFAULT_TRIALS, len(study.candidates))
    plan = StudyPlan(
        space=len(study.candidates),
        resumed=study.resumed,
        most=max(0, wanted - study.resumed),
        seconds=budget.seconds,
    )
    listener.started(problem, runner.target, plan)
    interrupted = False
    try:
        study.resume()
        study.run(begin + budget.seconds, budget.trials)
    except KeyboardInterrupt:
        interrupted = True
    record = study.conclude()
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


class _OfflineStudy:
    def __init__(
        self, problem: Problem, runner: Runner, store: AnyStore, listener: Listener
    ) -> None:
        self.problem = problem
        self.candidates = ranked(kernels_for(problem, runner.target), problem, runner.target)
        self.trials: list[Trial] = []
        self._runner = runner
        self._store = store
        self._listener = listener
        self._compiled: list[tuple[Candidate, Outcome]] = []
        self._past = self._past_trials()
        self._known = [candidate for candidate in self.candidates if candidate in self._past]

    @property
    def resumed(self) -> int:
        """Candidates that an earlier run compiled."""
        return len(self._known)

    def resume(self) -> None:
        """Rank what an earlier run compiled."""
        for candidate in self._known:
            self._rank(candidate, _outcome_of(self._past[candidate][-1]))

    def run(self, deadline: float, limit: int | None) -> None:
        """Compile in the ranking's order until the limit, the deadline or the space ends."""
        queue = (c for c in self.candidates[:limit] if c not in self._past)
        waiting: dict[Future[Outcome], Candidate] = {}
        try:
            while (left := deadline - time.monotonic()) > 0:
                while len(waiting) < self._room(limit) and (c := next(queue, None)) is not None:
                    waiting[self._runner.compile(self.problem, c)] = c
                if not waiting:
                    break
                for future in wait(waiting, left, FIRST_COMPLETED).done:
                    candidate, outcome = waiting.pop(future), future.result()
                    self._rank(candidate, outcome)
        finally:
            for future in waiting:
                future.cancel()

    def conclude(self) -> TuningRecord | None:
        """Store and return the record of the first in the ranking; None if nothing is left."""
        if not _survivors(self.trials):
            spilled = [pair for pair in self._compiled if _spills_only(pair[1], self._runner)]
            least = sorted(spilled, key=lambda pair: _spills(pair[1]))[:_ENOUGH]
            for candidate, outcome in least:
                trial = predict(self.problem, self._runner, candidate, outcome, may_spill=True)
                self._keep(candidate, trial)
        best = min(_survivors(self.trials), key=_order, default=None)
        if best is None:
            return None
        record = make_record(best, _model_time(_time(best)), "predicted", time_stamp())
        self._store.add_record(record)
        return record

    def _room(self, limit: int | None) -> int:
        """How many compilations may be under way now."""
        depth = 2 * self._runner.workers
        if limit is not None or len(_survivors(self.trials)) < _ENOUGH:
            return depth
        return min(depth, DEFAULT_TRIALS - len(self.trials))

    def _rank(self, candidate: Candidate, outcome: Outcome) -> None:
        self._compiled.append((candidate, outcome))
        self._keep(candidate, predict(self.problem, self._runner, candidate, outcome))

    def _keep(self, candidate: Candidate, trial: Trial) -> None:
        past = self._past.get(candidate, [])
        # A newer model may predict another time.
        said = (trial.status, trial.predicted_ms)
        if all((t.status, t.predicted_ms) != said for t in past):
            self._store.add_trial(trial)
        self.trials.append(trial)
        if past:
            return
        best = min(map(_time, _survivors(self.trials)), default=None)
        self._listener.tried(trial, best)

    def _past_trials(self) -> dict[Candidate, list[Trial]]:
        """What is stored of candidates that an earlier run compiled, the newest last."""
        found: dict[Candidate, list[Trial]] = {}
        for trial in self._store.trials(Bucket.of(self.problem), self._runner.target):
            if _tells_of_binary(trial) and is_of_same_code(trial, self.problem, self._runner):
                candidate = Candidate.of(trial)
                found.setdefault(candidate, []).append(trial)
        return found


def predict(
    problem: Problem,
    runner: Runner,
    candidate: Candidate,
    outcome: Outcome,
    *,
    may_spill: bool = False,
) -> Trial:
    """The trial of a compiled candidate: the model's time, or why it is dropped."""
    resources = outcome.resources
    if outcome.status is not TrialStatus.ok or resources is None:
        return make_trial(problem, runner, candidate, outcome)
    kernel, target = candidate.kernel, runner.target
    reason = resources.why_spilled(kernel.tolerable_spills) or ""
    if reason and not may_spill:
        spilled = Outcome(status=TrialStatus.out_of_resources, reason=reason, resources=resources)
        return make_trial(problem, runner, candidate, spilled)
    predicted = model_ms(candidate, problem, target, resources)
    ranked_outcome = Outcome(status=TrialStatus.predicted, reason=reason, resources=resources)
    return make_trial(problem, runner, candidate, ranked_outcome, predicted)


def model_ms(candidate: Candidate, problem: Problem, target: Target, resources: Resources) -> float:
    """The written model's time, with what the candidate's binary really needs."""
    kernel, config = candidate.kernel, candidate.config
    warps = max(f.options["num_warps"] for f in kernel.functions(problem, config))
    blocks = resources.blocks_per_sm(warps * target.warp_size, target)
    predicted = kernel.estimate_ms(problem, config, target, blocks)
    return predicted * (1 + _SPILL_COST * resources.spills)


def dropped_for_spills(trial: Trial) -> bool:
    """Whether ``trial`` is one that ``predict`` dropped: with the GPU it would have been timed.

    Of a Gluon candidate the compiling worker says the same, and that stands.
    """
    kernel, resources = KERNELS[trial.kernel], Resources.of(trial)
    if trial.status is not TrialStatus.out_of_resources or resources is None:
        return False
    spilled = trial.reason == resources.why_spilled(kernel.tolerable_spills)
    return spilled and kernel.language != "gluon"


def _tells_of_binary(trial: Trial) -> bool:
    """Whether ``trial`` says what its compilation came to."""
    if trial.status is TrialStatus.predicted:
        return Resources.of(trial) is not None
    return trial.status in (TrialStatus.out_of_resources, TrialStatus.compile_error)


def _outcome_of(trial: Trial) -> Outcome:
    """What the compiler had said of a stored trial."""
    resources = Resources.of(trial)
    if trial.status is TrialStatus.predicted or dropped_for_spills(trial):
        return Outcome(status=TrialStatus.ok, resources=resources)
    return Outcome(status=trial.status, reason=trial.reason, resources=resources)


def _spills(outcome: Outcome) -> int:
    return outcome.resources.spills if outcome.resources else 0


def _spills_only(outcome: Outcome, runner: Runner) -> bool:
    """Whether spilling is all that is held against a compiled candidate."""
    resources = outcome.resources
    fits = resources is not None and resources.why_not(runner.target) is None
    return outcome.status is TrialStatus.ok and fits and _spills(outcome) > 0


def _survivors(trials: list[Trial]) -> list[Trial]:
    return [t for t in trials if t.predicted_ms is not None]


def _time(trial: Trial) -> float:
    assert trial.predicted_ms is not None
    return trial.predicted_ms


def _order(trial: Trial) -> tuple[float, str, str]:
    """Ties as in ``ranked``, whatever was compiled first: running again gives the same record."""
    return (_time(trial), trial.kernel, trial.config.to_json())


def _model_time(ms: float) -> Measurement:
    return Measurement(
        median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=1, method="model", noisy=False,
        sm_clock_mhz=None, throttle="",
    )  # fmt: skip
