"""Which kernel and config answer a problem on a target, and why. No GPU is touched."""

import functools
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoflash.errors import ConfigError, MissingRecordError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.kernel import Access, Kernel
from autoflash.problem import Bucket, Problem
from autoflash.settings import Settings, settings
from autoflash.space import Config
from autoflash.target import Target

if TYPE_CHECKING:
    from autoflash.store.layers import Layers
    from autoflash.store.record import TuningRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A kernel with its config. ``how`` is tuned, neighbour, predicted or default; ``layer`` names
    where the record came from; ``why`` says it in a sentence."""

    kernel: Kernel
    config: Config
    how: str
    layer: str
    why: str
    record: "TuningRecord | None" = None


def choose(problem: Problem, target: Target, access: Access) -> Choice:
    """The best known choice. A record that is missing or doesn't fit leads to the default.

    Raises UnsupportedError if no kernel serves the problem, and in lock mode MissingRecordError
    if there is no exact, measured record.
    """
    kernels = kernels_for(problem, target)
    locked = settings().mode == "lock"
    choice = _from_records(problem, target, access)
    if locked and (choice is None or choice.how != "tuned"):
        raise MissingRecordError(
            f"AUTOFLASH_MODE=lock and no exact record for {Bucket.of(problem).label()} on "
            f"{target.name}: run `{tune_command(problem)}` there, or unset AUTOFLASH_MODE"
        )
    return choice or default_choices(kernels[0], problem, target, access)[0]


def default_choices(
    kernel: Kernel, problem: Problem, target: Target, access: Access, why: str = "no record fits"
) -> list[Choice]:
    """The kernel's own defaults for the target, each more modest than the one before."""
    configs = [kernel.adapt(config, access) for config in kernel.defaults(problem, target)]
    return [
        Choice(kernel=kernel, config=config, how="default", layer="kernel", why=why)
        for config in dict.fromkeys(configs)
    ]


def tune_command(problem: Problem) -> str:
    """The command that tunes ``problem``."""
    p = problem
    parts = [
        "autoflash tune",
        f"--batch {p.batch} --heads {p.heads} --kv-heads {p.kv_heads}",
        f"--seqlen-q {p.seqlen_q} --seqlen-k {p.seqlen_k}",
        f"--head-dim {p.head_dim} --head-dim-v {p.head_dim_v} --dtype {p.dtype}",
    ]
    return " ".join(parts + (["--causal"] if p.causal else []))


def _from_records(problem: Problem, target: Target, access: Access) -> Choice | None:
    bucket = Bucket.of(problem)
    found = _layers(settings()).lookup(bucket, target)
    if found is None:
        return None
    record = found.record
    kernel = KERNELS[record.kernel]
    try:
        config = kernel.adapt(kernel.space.parse(record.config), access)
    except ConfigError as error:
        logger.warning("record of %s skipped: %s", bucket.label(), error)
        return None
    reason = kernel.space.why_not(config, problem, target) or kernel.serves(problem, target)
    if reason is not None:
        logger.info("record of %s doesn't fit %s: %s", bucket.label(), problem.label(), reason)
        return None
    how = {"exact": "tuned"}.get(found.how, found.how)
    why = {
        "tuned": f"tuned on this target, {record.measurement.median_ms:.4f} ms",
        "neighbour": f"tuned for {record.bucket.label()} on {record.target.name}",
        "predicted": "ranked offline by the written model, never timed",
    }[how]
    if config != record.config:
        why += "; its load path was changed, since these tensors are not aligned for TMA"
    return Choice(kernel=kernel, config=config, how=how, layer=found.layer, why=why, record=record)


@functools.lru_cache(maxsize=8)
def _layers(snapshot: Settings) -> "Layers":
    from autoflash.store.layers import Layers

    return Layers(snapshot)
