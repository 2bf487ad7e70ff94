"""Tuning for a GPU that is not there: compile with Triton's own assembler, drop, rank, predict."""

import time
from concurrent.futures import FIRST_COMPLETED, Future, wait

from autoflash.kernels import kernels_for
from autoflash.problem import Problem
from autoflash.store.record import Measurement, Trial, TrialStatus
from autoflash.store.store import Store
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
from autoflash.tuning.search import ranked

# The written model orders the space well enough that compiling more of it seldom changes the top.
DEFAULT_TRIALS = 24


def tune_offline(
    problem: Problem, runner: Runner, store: Store, budget: Budget, listener: Listener
) -> TuneResult:
    """Compile the best-ranked candidates, drop what overflows or spills, rank the rest again with
    the binaries' real resources, and store the first as predicted."""
    begin = time.monotonic()
    target = runner.target
    candidates = ranked(kernels_for(problem, target), problem, target)
    chosen = candidates[: budget.trials or DEFAULT_TRIALS]
    plan = StudyPlan(space=len(candidates), resumed=0, most=len(chosen), seconds=budget.seconds)
    listener.started(problem, target, plan)
    queue = iter(chosen)
    waiting: dict[Future[Outcome], Candidate] = {}
    trials: list[Trial] = []
    interrupted = False
    try:
        while time.monotonic() - begin < budget.seconds:
            while len(waiting) < 2 * runner.workers and (c := next(queue, None)) is not None:
                waiting[runner.compile(problem, c)] = c
            if not waiting:
                break
            left = max(0.0, budget.seconds - (time.monotonic() - begin))
            for future in wait(waiting, timeout=left, return_when=FIRST_COMPLETED).done:
                trial = predict(problem, runner, waiting.pop(future), future.result())
                store.add_trial(trial)
                trials.append(trial)
                listener.tried(trial, min(map(_time, _survivors(trials)), default=None))
    except KeyboardInterrupt:
        interrupted = True
    for future in waiting:
        future.cancel()
    record = None
    if survivors := sorted(_survivors(trials), key=_time):
        record = make_record(survivors[0], _model_time(_time(survivors[0])), "predicted")
        store.add_record(record)
    result = TuneResult(
        problem=problem,
        target=target,
        record=record,
        trials=trials,
        resumed=0,
        space=len(candidates),
        seconds=time.monotonic() - begin,
        path=emitted_path(record),
        interrupted=interrupted,
    )
    listener.finished(result)
    return result


def predict(problem: Problem, runner: Runner, candidate: Candidate, outcome: Outcome) -> Trial:
    """The trial of a compiled candidate: the model's time, or why it is dropped."""
    resources = outcome.resources
    if outcome.status is not TrialStatus.ok or resources is None:
        return make_trial(problem, runner, candidate, outcome)
    kernel, config, target = candidate.kernel, candidate.config, runner.target
    if resources.spills:
        reason = f"spills {resources.spills} bytes of registers per thread"
        spilled = Outcome(status=TrialStatus.out_of_resources, reason=reason, resources=resources)
        return make_trial(problem, runner, candidate, spilled)
    threads = config.integer("num_warps") * target.warp_size
    blocks = resources.blocks_per_sm(threads, target)
    predicted = kernel.estimate_ms(problem, config, target, blocks)
    ranked_outcome = Outcome(status=TrialStatus.predicted, resources=resources)
    return make_trial(problem, runner, candidate, ranked_outcome, predicted)


def _survivors(trials: list[Trial]) -> list[Trial]:
    return [t for t in trials if t.predicted_ms is not None]


def _time(trial: Trial) -> float:
    assert trial.predicted_ms is not None
    return trial.predicted_ms


def _model_time(ms: float) -> Measurement:
    return Measurement(
        median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=1, method="model", noisy=False,
        sm_clock_mhz=None, throttle="",
    )  # fmt: skip
