"""What a store knows that a study can use: trials that still count, configs worth trying first."""

import itertools
from collections.abc import Sequence

from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Bucket, Problem
from autoflash.store.base import AnyStore
from autoflash.store.evidence import Kernels
from autoflash.store.record import Trial, TrialStatus
from autoflash.target import Target
from autoflash.tuning.job import Candidate
from autoflash.tuning.offline import dropped_for_spills
from autoflash.tuning.progress import is_of_same_code
from autoflash.tuning.runner import Runner

# Configs of each kernel, by the written model, that are tried before TPE has a say.
_FIRST_OF_KERNEL = 2
_RETRIED = (TrialStatus.timeout, TrialStatus.crashed)
# They say nothing against an earlier trial either.
_PASSED_OVER = (TrialStatus.noisy, TrialStatus.predicted)


def past_trials(
    store: AnyStore, problem: Problem, runner: Runner, kernels: Sequence[Kernel]
) -> list[Trial]:
    """Trials of an earlier run that still count: same problem, source and compiler, of a config
    that may still run.

    A trial that timed out or crashed may have been unlucky and is tried again, even if it went
    well before (it failed in the finals); one that an offline tune dropped was never timed.
    """
    found: dict[tuple[str, str], Trial] = {}
    for trial in store.trials(Bucket.of(problem), runner.target):
        passed_over = trial.status in _PASSED_OVER or dropped_for_spills(trial)
        if passed_over or not _may_run(trial, problem, runner.target, kernels):
            continue
        if is_of_same_code(trial, problem, runner):
            found[(trial.kernel, trial.config.to_json())] = trial
    return [trial for trial in found.values() if trial.status not in _RETRIED]


def _may_run(trial: Trial, problem: Problem, target: Target, kernels: Sequence[Kernel]) -> bool:
    """Serving passes over a record that a constraint forbids: its trial must not win."""
    kernel = KERNELS[trial.kernel]
    if kernel not in kernels:
        return False
    return kernel.space.why_not(trial.config, problem, target, advice=False) is None


def defaults(problem: Problem, target: Target, kernels: Sequence[Kernel]) -> list[Candidate]:
    """Each kernel's default."""
    return [
        Candidate(kernel=kernel, config=config, came_from="default")
        for kernel in kernels
        for config in kernel.defaults(problem, target)[:1]
    ]


def advice(
    store: AnyStore,
    problem: Problem,
    target: Target,
    kernels: Sequence[Kernel],
    ranking: Sequence[Candidate],
) -> list[Candidate]:
    """Configs worth trying first: what the store knows nearby, the kernels' defaults, and of each
    kernel what ``ranking`` has first."""
    bucket = Bucket.of(problem)
    found = _records(store, bucket, target, None)
    for kernel in kernels:
        found += _records(store, bucket, target, frozenset({kernel.name}))
    found += defaults(problem, target, kernels)
    for kernel in kernels:
        # Each kernel's best is kept: none is judged by its default alone.
        own = (candidate for candidate in ranking if candidate.kernel is kernel)
        found += itertools.islice(own, _FIRST_OF_KERNEL)
    return found


def _records(store: AnyStore, bucket: Bucket, target: Target, kernels: Kernels) -> list[Candidate]:
    """The configs of the store's records of the bucket, its neighbours and its siblings."""
    own = store.best(bucket, target, kernels)
    near = store.neighbours(bucket, target, kernels, limit=3)
    siblings = store.siblings(bucket, target, kernels, limit=2)
    known = [(own, "record")] if own else []
    known += [(record, f"neighbour {record.bucket.label()}") for record in near]
    known += [(record, f"sibling {record.target.name}") for record in siblings]
    return [Candidate.of(record, came_from) for record, came_from in known]
