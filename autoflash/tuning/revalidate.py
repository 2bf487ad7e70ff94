"""After an upgrade: stored winners and runners-up are checked and timed again, one by one.

A record of another driver, torch, Triton or template is still the best that is known, so it stays
and goes on serving. What is learned of it is added as a new record or trial, whose newer versions
and date put it before the old one (``store/merge.py``).
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoflash.codegen.render import render
from autoflash.errors import UnsupportedError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.problem import Bucket, Problem
from autoflash.settings import settings
from autoflash.store.base import AnyStore
from autoflash.store.evidence import best_of
from autoflash.store.merge import winners, words
from autoflash.store.opening import open_store
from autoflash.store.record import Trial, TrialStatus, TuningRecord
from autoflash.tuning.finals import finalists
from autoflash.tuning.job import Candidate
from autoflash.tuning.known import defaults
from autoflash.tuning.progress import Budget, Listener, TuneResult
from autoflash.tuning.runner import Runner, live_runners
from autoflash.tuning.side_by_side import forget_plans
from autoflash.tuning.study import Study
from autoflash.tuning.tune import DEFAULT_BUDGET_S, require_a_gpu, settled

logger = logging.getLogger(__name__)

# What makes a time another one, of a record's versions.
_VERSIONS = ("triton", "torch", "cuda", "driver")
WINNER, RUNNER_UP = "record", "runner-up"


@dataclass(frozen=True, kw_only=True)
class Revalidated:
    """What became of the records of one bucket: the one that ``served`` before and the study of the
    candidates. ``fallen`` are trials of stored winners that failed now."""

    served: TuningRecord
    result: TuneResult
    fallen: list[Trial]


def revalidate(
    *,
    store: AnyStore | None = None,
    budget_s: float | None = None,
    listener: Listener | None = None,
    everything: bool = False,
) -> list[Revalidated]:
    """Check and time again what stands in the store for the GPU that is here, and its runners-up,
    where no record has the present versions and template.

    Args:
        store: by default the user's.
        budget_s: wall-clock seconds per bucket, 60 by default.
        listener: hears of progress, as in a tune.
        everything: also where a record has the present versions.

    Raises:
        UnsupportedError: there is no GPU.
        StoreError: the store can't be opened or written.
    On KeyboardInterrupt the best so far is stored, then it is raised again. Running again goes on
    with those that are left.
    """
    require_a_gpu(None)
    store = store or open_store(settings().db)
    budget = Budget(seconds=DEFAULT_BUDGET_S if budget_s is None else budget_s, trials=None)
    with settled(store), live_runners(settings().workers) as runners:
        return revalidate_on(runners[0], store, budget, listener or Listener(), everything)


def revalidate_on(
    runner: Runner, store: AnyStore, budget: Budget, listener: Listener, everything: bool
) -> list[Revalidated]:
    """``revalidate`` on the GPU of ``runner``."""
    found = []
    for served, candidates in _due(store, runner, everything):
        study = Study(
            served.problem, runner, store, budget, listener, threading.Event(), only=candidates
        )
        result = study.tune(before_finals=lambda: None)
        forget_plans()
        if result.interrupted:
            raise KeyboardInterrupt
        found.append(Revalidated(served=served, result=result, fallen=_fallen(result)))
    return found


def _due(
    store: AnyStore, runner: Runner, everything: bool
) -> Iterator[tuple[TuningRecord, list[Candidate]]]:
    """Of each bucket that has to be looked at the record that serves, and what to try."""
    buckets: dict[object, list[TuningRecord]] = {}
    for record in store.records(runner.target):
        if record.kind == "measured":
            buckets.setdefault(record.bucket, []).append(record)
    for records in buckets.values():
        served = best_of(records)
        assert served is not None, "a bucket without records"
        # A noisy record doesn't replace a clean one, so it settles nothing.
        settled_kernels = {
            record.kernel
            for record in records
            if not record.measurement.noisy and _is_current(record, runner)
        }
        if not everything and {record.kernel for record in records} <= settled_kernels:
            continue
        try:
            candidates = _candidates(store, runner, served.problem, records)
        except UnsupportedError as error:
            logger.warning("%s: can't be revalidated: %s", served.problem.label(), error)
            continue
        yield served, candidates


def _candidates(
    store: AnyStore, runner: Runner, problem: Problem, records: Sequence[TuningRecord]
) -> list[Candidate]:
    """Winners, other origins' words, the fastest that were tried, and each kernel's default: so
    that something is left to serve where all of these fail. Raises UnsupportedError."""
    kernels = kernels_for(problem, runner.target)
    found = [Candidate.of(record, WINNER) for record in winners(records).values()]
    found += [Candidate.of(record, RUNNER_UP) for record in words(records)]
    found += [Candidate.of(trial, RUNNER_UP) for trial in finalists(_timed(store, runner, problem))]
    found += defaults(problem, runner.target, kernels)
    # Equal ones are one, by who is named first.
    return [
        candidate
        for candidate in dict.fromkeys(found)
        if candidate.kernel in kernels
        and candidate.kernel.space.why_not(candidate.config, problem, runner.target, advice=False)
        is None
    ]


def _timed(store: AnyStore, runner: Runner, problem: Problem) -> list[Trial]:
    """The trials of this very problem that went well, whatever the versions; the last of each."""
    tried = store.trials(Bucket.of(problem), runner.target)
    last = {(t.kernel, t.config): t for t in tried if t.problem == problem}
    return [t for t in last.values() if t.status is TrialStatus.ok and t.measurement is not None]


def _is_current(record: TuningRecord, runner: Runner) -> bool:
    """Whether it is of the present versions, and of the source that is rendered now."""
    versions = [getattr(record.provenance, name) == runner.versions[name] for name in _VERSIONS]
    if not all(versions):
        return False
    source = render(KERNELS[record.kernel], record.problem, record.config)
    return source.kernel_hash == record.provenance.source_hash


def _fallen(result: TuneResult) -> list[Trial]:
    return [t for t in result.trials if t.came_from == WINNER and not t.status.is_right]
