"""What serving asks of the records of a database, all on one connection."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sqlalchemy import Connection, Select, bindparam, select

from autoflash.errors import AutoFlashError
from autoflash.problem import Bucket
from autoflash.store.answer import Answer, answer_of
from autoflash.store.evidence import Kernels, best_of, evidence_order
from autoflash.store.models import RecordRow, columns_of
from autoflash.store.record import TuningRecord
from autoflash.store.rows import (
    BUCKET_COLUMNS,
    TARGET_COLUMNS,
    in_chunks,
    record_from_row,
    rows_of,
    same_code,
    same_target,
)
from autoflash.target import Target

# Hears of each row that was skipped: its id, and why.
Refused = Callable[[object, AutoFlashError], None]
# Where records compete: a bucket, and a target's identity.
Place = tuple[Bucket, tuple[object, ...]]

_PLACE = [*BUCKET_COLUMNS.values(), *TARGET_COLUMNS.values()]


class Lookups:
    """The questions of a lookup; see ``AnyStore``, whose methods of the same names say more."""

    def __init__(self, connection: Connection, version: str, refused: Refused) -> None:
        """``version`` is the schema's; ``refused`` hears of each row that was skipped."""
        self._connection = connection
        self._version = version
        self._columns = columns_of(RecordRow, version)
        self._refused = refused

    def answer(self, bucket: Bucket, target: Target, kernels: Kernels) -> Answer:
        """All that a lookup may want."""
        return answer_of(self, bucket, target, kernels)

    def best(self, bucket: Bucket, target: Target, kernels: Kernels) -> TuningRecord | None:
        """The record to serve exactly this bucket and target by."""
        return self._best((bucket, target.identity), kernels, measured=False)

    def neighbours(
        self, bucket: Bucket, target: Target, kernels: Kernels
    ) -> Iterator[TuningRecord]:
        """The best measured record of each other bucket of the target, nearest first."""
        query = self._places(bucket).where(*same_target(self._columns, target))
        return self._nearest(query, bucket, kernels, beside=bucket)

    def siblings(self, bucket: Bucket, target: Target, kernels: Kernels) -> Iterator[TuningRecord]:
        """The best measured record of each bucket and other target of the arch, nearest first."""
        query = self._places(bucket).where(self._columns["target_arch"] == target.arch)
        return self._nearest(query, bucket, kernels, beside=target.identity)

    def _nearest(
        self, places: Select[Any], bucket: Bucket, kernels: Kernels, beside: object
    ) -> Iterator[TuningRecord]:
        """Reads the records of a place only when it is asked for them."""
        if kernels is not None:
            places = places.where(self._columns["kernel"].in_(sorted(kernels)))
        found = [
            (distance, place)
            for place in map(_place, self._connection.execute(places).fetchall())
            if place is not None and beside not in place
            if (distance := bucket.distance(place[0])) is not None
        ]
        found.sort(key=lambda one: one[0])
        for _, equally_far in itertools.groupby(found, key=lambda one: one[0]):
            best = (self._best(place, kernels, measured=True) for _, place in equally_far)
            # Of those equally far the one with the better evidence comes first.
            yield from sorted(filter(None, best), key=evidence_order)

    def _best(self, place: Place, kernels: Kernels, *, measured: bool) -> TuningRecord | None:
        bucket, identity = place
        values = {column: getattr(bucket, name) for name, column in BUCKET_COLUMNS.items()}
        values |= dict(zip(TARGET_COLUMNS.values(), identity, strict=True))
        values |= {} if kernels is None else {"kernels": sorted(kernels)}
        query = _said(self._version, measured, kernels is None)
        rows = self._connection.execute(query, values).fetchall()
        wanted = _words(rows)
        found = self._read(wanted)
        if len(found) < len(wanted):
            # A word can't be trusted: then what it hides may stand.
            found = self._read([row.id for row in rows])
        return best_of(found.values())

    def _read(self, ids: Sequence[int]) -> dict[int, TuningRecord]:
        found = {}
        for chunk in in_chunks(ids):
            for row in rows_of(self._connection, _whole(self._version), {"ids": chunk}):
                try:
                    found[row["id"]] = record_from_row(row)
                except AutoFlashError as error:
                    self._refused(row["id"], error)
        return found

    def _places(self, bucket: Bucket) -> Select[Any]:
        """Where there are measured records whose config may carry over; the index answers it."""
        has = self._columns
        conditions = (*same_code(has, bucket), has["kind"] == "measured")
        return select(*(has[name] for name in _PLACE)).distinct().where(*conditions)


def _place(row: Sequence[Any]) -> Place | None:
    """None for one that a stranger made up."""
    sizes = len(BUCKET_COLUMNS)
    bucket = Bucket(**dict(zip(BUCKET_COLUMNS, row[:sizes], strict=True)))
    counts = (bucket.group, bucket.batch_heads, bucket.seqlen_q, bucket.seqlen_k)
    if any(type(count) is not int or count < 1 for count in counts):
        return None
    return bucket, tuple(row[sizes:])


def _words(rows: Iterable[Sequence[Any]]) -> list[int]:
    """The ids of those that are their origin's word for their kernel, or equal to it in all that
    was looked at. ``rows`` are in the order of ``_said``."""
    found: list[int] = []
    word: tuple[Any, ...] = ()
    for row_id, *said in rows:
        # Kernel and origin come first.
        if tuple(said[:2]) != word[:2]:
            word = tuple(said)
        if tuple(said) == word:
            found.append(row_id)
    return found


# Made once: putting a statement together takes longer than running it.
@functools.cache
def _said(version: str, measured: bool, any_kernel: bool) -> Select[Any]:
    """Of the records of a place what says which are words, by kernel and origin; of each of these
    by ``merge.word_order``, best first, but for its tie. A test holds the two together.

    The index alone answers it: to read a row takes ten times as long, and an origin that tunes
    again and again still has one word for each kernel.
    """
    has = columns_of(RecordRow, version)
    of_each = (has["kernel"], has["origin"])
    columns = (has["kind"], has["noisy"], has["created_at"], has["median_ms"])
    here = (has[name] == bindparam(name) for name in _PLACE)
    query = select(has["id"], *of_each, *columns).where(*here)
    if measured:
        query = query.where(has["kind"] == "measured")
    if not any_kernel:
        query = query.where(has["kernel"].in_(bindparam("kernels", expanding=True)))
    return query.order_by(
        *of_each,
        has["kind"] != "measured",
        has["noisy"],
        has["created_at"].desc(),
        has["median_ms"],
    )


@functools.cache
def _whole(version: str) -> Select[Any]:
    """What a record is read from, by its id."""
    has = columns_of(RecordRow, version)
    read = (column for name, column in has.items() if name != "digest")
    return select(*read).where(has["id"].in_(bindparam("ids", expanding=True)))
