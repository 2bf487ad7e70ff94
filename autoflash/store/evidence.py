"""Which record stands when several could: the same rule for a database and for a list."""

import dataclasses
from collections.abc import Iterable

from autoflash.problem import Bucket
from autoflash.store.record import TuningRecord

# Names of the kernels that a record may be of; None for any.
Kernels = frozenset[str] | None


def evidence_order(record: TuningRecord) -> tuple[bool, bool, int, float]:
    """Sort key, best first: measured before predicted, clean before noisy, the newest, the fastest.

    Time comes last: a re-tune times the old winner again, so its newest clean word stands. One
    study stores its best of each kernel, all of one date: of these the fastest comes first.
    """
    stamp = int("".join(c for c in record.provenance.created_at[:19] if c.isdigit()))
    noisy = record.measurement.noisy
    return (record.kind == "predicted", noisy, -stamp, record.measurement.median_ms)


def listing_order(record: TuningRecord) -> tuple[object, ...]:
    """Sort key for people: by target, then bucket, then best first."""
    bucket = dataclasses.astuple(record.bucket)
    return (record.target.identity, bucket, evidence_order(record))


def nearest(records: Iterable[TuningRecord], bucket: Bucket) -> list[TuningRecord]:
    """The best record of each (target, bucket) that carries over, by distance from ``bucket``."""
    found: dict[object, tuple[float, TuningRecord]] = {}
    for record in sorted(records, key=evidence_order):
        distance = bucket.distance(record.bucket)
        if distance is not None:
            found.setdefault((record.target.identity, record.bucket), (distance, record))
    return [record for _, record in sorted(found.values(), key=lambda pair: pair[0])]
