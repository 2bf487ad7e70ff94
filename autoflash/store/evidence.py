"""Which record serves when several could: the rule of ``merge``, for a database and for a list."""

import dataclasses
import operator
from collections.abc import Iterable

from autoflash.problem import Bucket
from autoflash.store.merge import serving_order, winners
from autoflash.store.record import TuningRecord

_BUCKET_ORDER = operator.attrgetter(*(field.name for field in dataclasses.fields(Bucket)))
# Names of the kernels that a record may be of; None for any.
Kernels = frozenset[str] | None


def evidence_order(record: TuningRecord) -> tuple[bool, bool, int, float]:
    """Sort key, best first, of what one origin said: measured before predicted, clean before noisy,
    the newest, the fastest. Between origins ``best_of`` decides.

    Time comes last: a re-tune times the old winner again, so its newest clean word stands. One
    study stores its best of each kernel, all of one date: of these the fastest comes first.
    """
    stamp = int("".join(c for c in record.provenance.created_at[:19] if c.isdigit()))
    noisy = record.measurement.noisy
    return (record.kind == "predicted", noisy, -stamp, record.measurement.median_ms)


def listing_order(record: TuningRecord) -> tuple[object, ...]:
    """Sort key for people: by target, then bucket, then by ``evidence_order``."""
    return (record.target.identity, _BUCKET_ORDER(record.bucket), evidence_order(record))


def best_of(records: Iterable[TuningRecord]) -> TuningRecord | None:
    """The record that serves, of those of one bucket and target: of what stands of each kernel, as
    merging decides it, the fastest of the newest versions."""
    return max(winners(records).values(), key=serving_order, default=None)


def nearest(records: Iterable[TuningRecord], bucket: Bucket) -> list[TuningRecord]:
    """The best record of each (target, bucket) that carries over, by distance from ``bucket``."""
    groups: dict[tuple[object, Bucket], list[TuningRecord]] = {}
    for record in records:
        groups.setdefault((record.target.identity, record.bucket), []).append(record)
    found: list[tuple[float, TuningRecord]] = []
    for (_, other), group in groups.items():
        distance = bucket.distance(other)
        best = best_of(group)
        if distance is not None and best is not None:
            found.append((distance, best))
    # Of those equally far the one with the better evidence comes first.
    return [record for _, record in sorted(found, key=lambda f: (f[0], evidence_order(f[1])))]
