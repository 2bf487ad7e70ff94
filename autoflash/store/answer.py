"""All that a lookup may want of one layer, asked for at once."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from autoflash.problem import Bucket
from autoflash.store.evidence import Kernels
from autoflash.store.record import TuningRecord
from autoflash.target import Target

# Six octaves: beyond that a config says less than the kernel's default for the shape.
MAX_DISTANCE = 6.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of exactly the bucket and target, of the nearest other bucket of the target, and of the
    bucket on another target of the arch; the latter two are measured."""

    best: TuningRecord | None = None
    neighbour: TuningRecord | None = None
    sibling: TuningRecord | None = None


class Asked(Protocol):
    """What answers the three questions; see ``AnyStore``."""

    def best(self, bucket: Bucket, target: Target, kernels: Kernels) -> TuningRecord | None:
        """Of exactly this bucket and target."""

    def neighbours(
        self, bucket: Bucket, target: Target, kernels: Kernels
    ) -> Iterable[TuningRecord]:
        """Measured ones of other buckets, nearest first."""

    def siblings(self, bucket: Bucket, target: Target, kernels: Kernels) -> Iterable[TuningRecord]:
        """Measured ones of other targets of the arch, nearest first."""


def answer_of(asked: Asked, bucket: Bucket, target: Target, kernels: Kernels) -> Answer:
    """Asks no further than a lookup goes: not past an exact measured record, nor past a neighbour
    that carries over."""
    best = asked.best(bucket, target, kernels)
    if best is not None and best.kind == "measured":
        return Answer(best=best)
    near = next(iter(asked.neighbours(bucket, target, kernels)), None)
    distance = None if near is None else bucket.distance(near.bucket)
    if distance is not None and distance <= MAX_DISTANCE:
        return Answer(best=best, neighbour=near)
    sibling = next(iter(asked.siblings(bucket, target, kernels)), None)
    is_of_bucket = sibling is not None and bucket.distance(sibling.bucket) == 0
    return Answer(best=best, sibling=sibling if is_of_bucket else None)
