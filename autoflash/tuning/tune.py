"""tune(): from problems to stored records, on the GPU that is here or for one that isn't."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from autoflash.errors import BusyGpuError, InvalidInputError, UnsupportedError
from autoflash.kernels import kernels_for
from autoflash.problem import Problem
from autoflash.settings import settings
from autoflash.store.base import AnyStore
from autoflash.store.opening import open_store
from autoflash.target import Target, gpu_is_present, named_target
from autoflash.tuning.gpus import gpu_names
from autoflash.tuning.offline import tune_offline
from autoflash.tuning.pool import Worker
from autoflash.tuning.progress import Budget, Listener, OneAtATime, TuneResult
from autoflash.tuning.runner import DESCRIBE_LIMIT_S, Runner, describe_message, live_runners
from autoflash.tuning.side_by_side import forget_plans, tune_on

DEFAULT_BUDGET_S = 60.0


def tune(
    problems: Problem | Iterable[Problem],
    *,
    target: Target | str | None = None,
    budget_s: float | None = None,
    trials: int | None = None,
    store: AnyStore | None = None,
    listener: Listener | None = None,
    gpus: str | Sequence[int] | None = None,
    require_idle: bool = False,
) -> list[TuneResult]:
    """Find, check, time and store the best config of each problem.

    Args:
        problems: what to tune for.
        target: the GPU; by default the one that is present. One that isn't ('h100') is served by
            compiling offline and ranking; its records are stored as predicted.
        budget_s: wall-clock seconds per problem, 60 by default, compiling included.
        trials: at most so many candidates per problem.
        store: where records and trials go; by default the user's store.
        listener: hears of progress; with several GPUs from several threads, one call at a time.
        gpus: 'all', or places among the GPUs that are visible, such as [0, 1]: they share the
            problems, each with a worker of its own. By default the first alone.
        require_idle: refuse to start while others use a GPU.

    Raises:
        UnsupportedError: no GPU and no target named, or a problem that no kernel serves there.
        BusyGpuError: others use a GPU, and ``require_idle``.
        StoreError: the store can't be opened or written; before any trial is run.
    On KeyboardInterrupt the best so far is stored, then it is raised again. Running again resumes.
    """
    todo = [problems] if isinstance(problems, Problem) else list(problems)
    for problem in todo:
        if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
            raise InvalidInputError(f"{problem.label()}: there is nothing to compute, nor to tune")
    budget = Budget(seconds=DEFAULT_BUDGET_S if budget_s is None else budget_s, trials=trials)
    absent = _absent(target)
    store = store or open_store(settings().db)
    require_a_gpu(target)
    if absent and gpus is not None:
        raise InvalidInputError(f"gpus={gpus!r}: {absent.name} is not here, nothing runs on a GPU")
    listener = OneAtATime(listener or Listener())
    with (
        settled(store),
        live_runners(settings().workers, absent, gpu_names(gpus)) as runners,
    ):
        for runner in runners:
            for problem in todo:
                kernels_for(problem, runner.target)
            if require_idle and runner.busy:
                raise BusyGpuError(f"{runner.target.name} is not idle: {runner.busy}")
        if absent:
            return _tune_offline(todo, runners[0], store, budget, listener)
        return tune_on(runners, todo, store, budget, listener)


@contextlib.contextmanager
def settled(store: AnyStore) -> Iterator[None]:
    """What a server that went away meanwhile has missed is brought to it, if it is back."""
    try:
        yield
    finally:
        store.settle()


def _tune_offline(
    todo: list[Problem], runner: Runner, store: AnyStore, budget: Budget, listener: Listener
) -> list[TuneResult]:
    results = []
    for problem in todo:
        results.append(tune_offline(problem, runner, store, budget, listener))
        forget_plans()
        if results[-1].interrupted:
            raise KeyboardInterrupt
    return results


def target_to_tune(target: Target | str | None) -> Target:
    """The GPU that ``tune`` would tune for. Raises UnsupportedError for none, InvalidInputError for
    an unknown name."""
    require_a_gpu(target)
    wanted = _named(target)
    # Asked once: it takes a process.
    here = _present() if gpu_is_present() else None
    if here is not None and (wanted is None or wanted.name == here.name):
        return here
    assert wanted is not None
    return wanted


def require_a_gpu(target: Target | str | None) -> None:
    """Raises UnsupportedError if none is named and none is here."""
    if target is None and not gpu_is_present():
        raise UnsupportedError("no GPU is visible to torch: name a target, such as --target h100")


def _absent(target: Target | str | None) -> Target | None:
    """The GPU that is meant, if it isn't the one that is here."""
    wanted = _named(target)
    is_here = wanted is not None and gpu_is_present() and _present().name == wanted.name
    return None if is_here else wanted


def _named(target: Target | str | None) -> Target | None:
    return named_target(target) if isinstance(target, str) else target


def _present() -> Target:
    """The GPU that is here. torch can't tell its name without initialising CUDA: not in the user's
    process, which may mean to fork."""
    with Worker() as worker:
        return Target(**worker.ask(describe_message(), DESCRIBE_LIMIT_S)["target"])
