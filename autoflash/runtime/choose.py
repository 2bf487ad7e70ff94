"""Which kernel and config answer a problem on a target, and why. No GPU is touched."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autoflash.errors import ConfigError, MissingRecordError, UnsupportedError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.kernel import ALIGNED, Access, Kernel
from autoflash.problem import Bucket, Problem
from autoflash.settings import Settings, settings
from autoflash.space import Config
from autoflash.target import Target

if TYPE_CHECKING:
    from autoflash.store.evidence import Kernels
    from autoflash.store.layers import Found, Layers
    from autoflash.store.record import TuningRecord

logger = logging.getLogger(__name__)

Lookup = Callable[[Bucket, Target, "Kernels"], "Found | None"]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel with its config. ``how`` is tuned, neighbour, predicted, default or locked;
    ``layer`` names where it came from; ``why`` says it in a sentence. ``passing``: it stands in for
    a better one for this call alone."""

    kernel: Kernel
    config: Config
    how: str
    layer: str
    why: str
    record: "TuningRecord | None" = None
    passing: bool = False

    @property
    def tunable(self) -> bool:
        """Whether tuning the problem could lead to another choice."""
        return self.how not in ("tuned", "locked")


def choose(problem: Problem, target: Target, access: Access) -> Choice:
    """The best known choice. A record that is missing or doesn't fit leads to the default.

    With a lock file it is what that locks, and nothing else is looked at. Raises UnsupportedError
    if no kernel serves the problem; in lock mode MissingRecordError if there is no exact, measured
    record that these tensors can use, or no entry of the lock file; and LockError for a lock file
    that can't be read, or whose entry can't be run as it was.
    """
    lock_path = settings().lock_path
    if lock_path is not None:
        return _locked(lock_path, problem, target, access)
    kernels_for(problem, target)
    locked = settings().mode == "lock"
    choice, obstacle = _from_records(problem, target, access, _layers(settings()).lookup)
    if locked and (choice is None or choice.how != "tuned"):
        raise MissingRecordError(
            f"AUTOFLASH_MODE=lock and no exact record for {Bucket.of(problem).label()} on "
            f"{target.name}{obstacle and f' that can be used ({obstacle})'}: "
            f"run `{tune_command(problem)}` there, or unset AUTOFLASH_MODE"
        )
    return choice or default_choices(problem, target, access)[0]


def serving(problem: Problem, target: Target, access: Access, lookup: Lookup) -> Choice:
    """What serves outside lock mode, by the records that ``lookup`` finds. Raises UnsupportedError
    if no kernel serves the problem."""
    choice, _ = _from_records(problem, target, access, lookup)
    return choice or default_choices(problem, target, access)[0]


def losses_elsewhere(choice: Choice) -> list[float]:
    """What the choice's config lost against the best on other problems where it was tried, each as
    a fraction, by the trials of the user's store. For a person: reads the store."""
    return _layers(settings()).losses(choice.record) if choice.record else []


def expected_loss(losses: list[float]) -> float | None:
    """What a neighbour's config is expected to lose: the median, or None where no trial says."""
    # It loads decimal, which importing autoflash shouldn't.
    import statistics

    return statistics.median(losses) if losses else None


def is_tuned(problem: Problem, target: Target, lookup: Lookup) -> bool:
    """Whether aligned tensors of ``problem`` are served by an exact, measured record that
    ``lookup`` finds. Raises UnsupportedError if no kernel serves it."""
    choice, _ = _from_records(problem, target, ALIGNED, lookup)
    return choice is not None and choice.how == "tuned"


def default_choices(
    problem: Problem,
    target: Target,
    access: Access,
    why: str = "no record fits",
    first: Kernel | None = None,
) -> list[Choice]:
    """The defaults of every kernel that can run such tensors on the target, never none.

    Kernel by kernel, each of its configs more modest than the one before: ``first`` if it is among
    them, then the one whose default the written model thinks faster. Raises UnsupportedError if no
    kernel serves the problem.
    """
    ordered: list[tuple[bool, float, Kernel, list[Config]]] = []
    for kernel in kernels_for(problem, target):
        adapted = (kernel.adapt(c, access) for c in kernel.defaults(problem, target))
        configs = list(dict.fromkeys(c for c in adapted if c is not None))
        if configs:
            blocks = kernel.estimate_blocks_per_sm(problem, configs[0], target)
            ms = kernel.estimate_ms(problem, configs[0], target, blocks)
            ordered.append((kernel is not first, ms, kernel, configs))
    if not ordered:
        raise UnsupportedError(
            f"{problem.label()} on {target.name}: its kernels load by tensor copies, and these "
            "tensors are not aligned for them: make them contiguous"
        )
    ordered.sort(key=lambda item: item[:2])
    return [
        Choice(kernel=kernel, config=config, how="default", layer="kernel", why=why)
        for _, _, kernel, configs in ordered
        for config in configs
    ]


def tune_command(problem: Problem) -> str:
    """The command that tunes ``problem``."""
    return f"autoflash tune {problem.flags()}"


def _from_records(
    problem: Problem, target: Target, access: Access, lookup: Lookup
) -> tuple[Choice | None, str]:
    """The choice by the best record of a kernel that can run such tensors; or None and what is
    against the best record, if there is one."""
    bucket = Bucket.of(problem)
    able = frozenset(
        kernel.name
        for kernel in kernels_for(problem, target)
        if any(kernel.adapt(c, access) is not None for c in kernel.defaults(problem, target))
    )
    found = lookup(bucket, target, able)
    if found is None:
        found = lookup(bucket, target, None)
        if found is None:
            return None, ""
        return None, _passed_over(problem, f"{found.record.kernel} {_why_unable(access)}")
    record = found.record
    kernel = KERNELS[record.kernel]
    try:
        recorded = kernel.space.parse(record.config)
    except ConfigError as error:
        logger.warning("record of %s skipped: %s", bucket.label(), error)
        return None, str(error)
    config = kernel.adapt(recorded, access)
    reason = (
        f"{kernel.name} {_why_unable(access)}"
        if config is None
        else kernel.space.why_not(config, problem, target, advice=False)
        or kernel.serves(problem, target)
    )
    if config is None or reason is not None:
        return None, _passed_over(problem, str(reason))
    how = {"exact": "tuned"}.get(found.how, found.how)
    why = {
        "tuned": f"tuned on this target, {record.measurement.median_ms:.4f} ms",
        "neighbour": f"tuned for {record.bucket.label()} on {record.target.name}",
        "predicted": "ranked offline by the written model, never timed",
    }[how]
    if config != record.config:
        why += "; its load path was changed, since these tensors are not aligned for TMA"
    choice = Choice(
        kernel=kernel, config=config, how=how, layer=found.layer, why=why, record=record
    )
    return choice, ""


def _locked(path: Path, problem: Problem, target: Target, access: Access) -> Choice:
    from autoflash.runtime.locked import locked_entry

    entry, digest = locked_entry(path, problem, target, access)
    return Choice(
        kernel=KERNELS[entry.kernel],
        config=entry.config,
        how="locked",
        layer="lock",
        why=f"locked as {entry.how} by {path} ({digest[:12]})",
    )


def _passed_over(problem: Problem, reason: str) -> str:
    logger.info(
        "record of %s doesn't fit %s: %s", Bucket.of(problem).label(), problem.label(), reason
    )
    return reason


def _why_unable(access: Access) -> str:
    if not access.tma:
        return "can't load tensors that are not aligned for TMA"
    wanted = "gradients that repeat bit for bit" if access.repeatable else "some gradients alone"
    return f"can't compute {wanted}"


@functools.lru_cache(maxsize=8)
def _layers(snapshot: Settings) -> "Layers":
    from autoflash.store.layers import Layers

    return Layers(snapshot)
