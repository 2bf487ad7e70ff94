"""tune(): from problems to stored records, on the GPU that is here or for one that isn't."""

from collections.abc import Iterable

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.kernels import kernels_for
from autoflash.problem import Problem
from autoflash.settings import settings
from autoflash.store.store import Store
from autoflash.target import Target, gpu_is_present, named_target
from autoflash.tuning.offline import tune_offline
from autoflash.tuning.progress import Budget, Listener, TuneResult
from autoflash.tuning.runner import LiveRunner
from autoflash.tuning.study import tune_one

DEFAULT_BUDGET_S = 60.0


def tune(
    problems: Problem | Iterable[Problem],
    *,
    target: Target | str | None = None,
    budget_s: float | None = None,
    trials: int | None = None,
    store: Store | None = None,
    listener: Listener | None = None,
) -> list[TuneResult]:
    """Find, check, time and store the best config of each problem.

    Args:
        problems: what to tune for.
        target: the GPU; by default the one that is present. One that isn't ('h100') is served by
            compiling offline and ranking; its records are stored as predicted.
        budget_s: wall-clock seconds per problem, 60 by default, compiling included.
        trials: at most so many candidates per problem.
        store: where records and trials go; by default the user's store.
        listener: hears of progress.

    Raises:
        UnsupportedError: no GPU and no target named, or a problem that no kernel serves there.
        StoreError: the store can't be opened or written; before any trial is run.
    On KeyboardInterrupt the best so far is stored, then it is raised again. Running again resumes.
    """
    from autoflash.runtime.dispatch import forget

    todo = [problems] if isinstance(problems, Problem) else list(problems)
    for problem in todo:
        if 0 in (problem.batch, problem.seqlen_q, problem.seqlen_k):
            raise InvalidInputError(f"{problem.label()}: there is nothing to compute, nor to tune")
    budget = Budget(seconds=DEFAULT_BUDGET_S if budget_s is None else budget_s, trials=trials)
    wanted = named_target(target) if isinstance(target, str) else target
    store = store or Store(settings().db_path)
    listener = listener or Listener()
    absent = wanted if wanted is not None and not _is_present(wanted) else None
    if wanted is None and not gpu_is_present():
        raise UnsupportedError("no GPU is visible to torch: name a target, such as --target h100")
    results = []
    with LiveRunner(settings().workers, absent) as runner:
        for problem in todo:
            kernels_for(problem, runner.target)
        study = tune_offline if absent else tune_one
        for problem in todo:
            result = study(problem, runner, store, budget, listener)
            forget()
            results.append(result)
            if result.interrupted:
                raise KeyboardInterrupt
    return results


def _is_present(target: Target) -> bool:
    if not gpu_is_present():
        return False
    import torch

    # Asks no more than the name: the parent makes no CUDA context.
    return torch.cuda.get_device_name() == target.name
