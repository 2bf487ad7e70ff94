"""AnyStore: what a store answers and takes, whichever database it lies in."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from sqlalchemy import ColumnElement, Engine, Select, func, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from autoflash.errors import AutoFlashError, StoreError
from autoflash.problem import Bucket
from autoflash.store import schema
from autoflash.store.evidence import Kernels, best_of, listing_order, nearest
from autoflash.store.models import RecordRow, TrialRow
from autoflash.store.record import Trial, TrialStatus, TuningRecord
from autoflash.store.rows import (
    PROBLEM_FIELDS,
    record_from_row,
    record_to_row,
    same_bucket,
    same_code,
    same_target,
    trial_from_row,
    trial_to_row,
)
from autoflash.target import Target

logger = logging.getLogger(__name__)

T = TypeVar("T")
# Hears of each row that was skipped: its id, and why.
Refused = Callable[[object, AutoFlashError], None]


class AnyStore(ABC):
    """Records and trials, append only: nothing that was stored is changed or deleted.

    It may be shared by threads, used after a fork and dropped without being closed, and any number
    of processes may use one database at a time. All reads return nouns; a row that can't be trusted
    is skipped, with one warning per store. Every failure of the database is a StoreError.
    """

    # What a failing database raises.
    _failures: ClassVar[tuple[type[Exception], ...]] = (SQLAlchemyError,)
    schema_version: str

    def __init__(self, name: str, *, read_only: bool) -> None:
        """``name`` is what messages call the database by."""
        self.name = name
        self.read_only = read_only
        self._warned = False

    @property
    @abstractmethod
    def _engine(self) -> Engine:
        """Where a connection comes from, in this process."""

    @abstractmethod
    def _explain(self, error: Exception) -> str:
        """What went wrong, and what to do about it; shows no password."""

    def add_record(self, record: TuningRecord) -> None:
        """Append ``record``. Raises StoreError, or ConfigError for a config not of its kernel."""
        self.add_records([record])

    def add_records(self, records: Iterable[TuningRecord]) -> None:
        """Append all of ``records`` or, if that raises, none."""
        self._add([record_to_row(record) for record in records], "store records")

    def add_trial(self, trial: Trial) -> None:
        """Append ``trial``. Raises StoreError, or ConfigError for a config not of its kernel."""
        self.add_trials([trial])

    def add_trials(self, trials: Iterable[Trial]) -> None:
        """Append all of ``trials`` or, if that raises, none."""
        self._add([trial_to_row(trial) for trial in trials], "store trials")

    def best(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> TuningRecord | None:
        """The record to serve exactly this bucket and target by, or None; of ``kernels``, if given.

        ``evidence.best_of`` decides, as it does when databases are merged.
        """
        query = _by_evidence(*same_bucket(RecordRow, bucket), *same_target(RecordRow, target))
        query = _of_kernels(query, kernels)
        return best_of(self._records(query, "look up a record"))

    def neighbours(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """The best measured record of each other bucket whose config may carry over, nearest first.

        All of ``target``'s identity; of ``kernels``, if given.
        """
        query = _by_evidence(*same_code(RecordRow, bucket), *same_target(RecordRow, target))
        query = _of_kernels(query, kernels)
        records = self._records(query.where(RecordRow.kind == "measured"), "look up neighbours")
        return [record for record in nearest(records, bucket) if record.bucket != bucket]

    def siblings(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """The best measured record of each bucket and other target of the arch, nearest first.

        ``bucket`` itself comes first (distance 0), if one of them has it. Of ``kernels``, if given.
        """
        query = _by_evidence(
            *same_code(RecordRow, bucket),
            RecordRow.target_arch == target.arch,
            RecordRow.kind == "measured",
        )
        records = self._records(_of_kernels(query, kernels), "look up siblings")
        others = (record for record in records if record.target.identity != target.identity)
        return nearest(others, bucket)

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Bring home what could not be stored when it was added."""

    def trials(self, bucket: Bucket, target: Target, kernel: str | None = None) -> list[Trial]:
        """The trials of a study (of one kernel, if named), in the order they were added in."""
        query = self._trial_columns().where(
            *same_bucket(TrialRow, bucket), *same_target(TrialRow, target)
        )
        if kernel is not None:
            query = query.where(TrialRow.kernel == kernel)
        query = query.order_by(TrialRow.id)
        return self._read(query, trial_from_row, "list trials")

    def losses(self, record: TuningRecord) -> list[float]:
        """What ``record``'s config lost on other problems where it was tried: its time over the
        best one there, less one, problem by problem; clean trials of the record's target alone.

        Problems are those that the config could carry over to.
        """
        row = record_to_row(record)
        problem = [getattr(TrialRow, name) for name in PROBLEM_FIELDS]
        clean = (
            *same_code(TrialRow, record.bucket),
            *same_target(TrialRow, record.target),
            TrialRow.status == TrialStatus.ok.value,
            TrialRow.median_ms > 0,
        )
        fastest = func.min(TrialRow.median_ms).label("ms")
        best = select(*problem, fastest).where(*clean).group_by(*problem).subquery()
        same = (TrialRow.kernel == row.kernel, TrialRow.config == row.config)
        own = select(*problem, fastest).where(*clean, *same).group_by(*problem).subquery()
        matches = [own.c[name] == best.c[name] for name in PROBLEM_FIELDS]
        elsewhere = or_(*(own.c[name] != getattr(row, name) for name in PROBLEM_FIELDS))
        query = select(own.c.ms.label("own_ms"), best.c.ms.label("best_ms")).where(
            *matches, elsewhere
        )
        found = self._fetch(query, "look up trials")
        return sorted(row["own_ms"] / row["best_ms"] - 1 for row in found)

    def records(
        self, target: Target | None = None, *, refused: Refused | None = None
    ) -> list[TuningRecord]:
        """All records (of one target's identity, if given), by target, bucket, then best first.

        ``refused`` hears of each row that was skipped; without it the first one is warned of.
        """
        query = _by_evidence(*([] if target is None else same_target(RecordRow, target)))
        found = self._read(query, record_from_row, "list records", refused)
        return sorted(found, key=listing_order)

    def numbered_records(self) -> list[tuple[int, TuningRecord]]:
        """All records with their row ids, in the order they were added in."""
        query = select(*RecordRow.__table__.columns).order_by(RecordRow.id)
        return self._read(query, lambda row: (row["id"], record_from_row(row)), "list records")

    def _trial_columns(self) -> Select[Any]:
        """Those that the file has: one that is only read may be older."""
        added = schema.ADDED_TO_TRIALS
        columns = TrialRow.__table__.columns
        return select(*(c for c in columns if added.get(c.name, "") <= self.schema_version))

    def _records(self, query: Select[Any], action: str) -> list[TuningRecord]:
        return self._read(query, record_from_row, action)

    def _read(
        self,
        query: Select[Any],
        convert: Callable[[Mapping[str, Any]], T],
        action: str,
        refused: Refused | None = None,
    ) -> list[T]:
        found = []
        for row in self._fetch(query, action):
            try:
                found.append(convert(row))
            except AutoFlashError as error:
                (refused or self._warn_of_bad_row)(row["id"], error)
        return found

    def _fetch(self, query: Select[Any], action: str) -> list[dict[str, Any]]:
        with self._session(action) as session:
            return [dict(row) for row in session.execute(query).mappings()]

    def _add(self, rows: Iterable[RecordRow | TrialRow], action: str) -> None:
        if self.read_only:
            raise StoreError(f"{self.name}: could not {action}: it was opened with read_only=True")
        with self._session(action) as session:
            session.add_all(rows)

    @contextmanager
    def _session(self, action: str) -> Iterator[Session]:
        """One transaction on one connection: committed at the end, undone by any exception."""
        try:
            with Session(self._engine) as session, session.begin():
                yield session
        except self._failures as error:
            raise StoreError(
                f"{self.name}: could not {action}: {self._explain(schema.cause_of(error))}"
            ) from error

    def _warn_of_bad_row(self, row_id: object, error: AutoFlashError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: skipped row %s: %s (further rows are skipped silently)",
                *(self.name, row_id, str(error)[:300]),
            )


def _by_evidence(*conditions: ColumnElement[bool]) -> Select[Any]:
    """The records that meet ``conditions``, best first: ``evidence_order`` in SQL."""
    # Plain columns, not objects: a stranger's table may lack the key that objects go by.
    return (
        select(*RecordRow.__table__.columns)
        .where(*conditions)
        .order_by(
            RecordRow.kind == "predicted",
            RecordRow.noisy,
            RecordRow.created_at.desc(),
            RecordRow.median_ms,
            RecordRow.id.desc(),
        )
    )


def _of_kernels(query: Select[Any], kernels: Kernels) -> Select[Any]:
    return query if kernels is None else query.where(RecordRow.kernel.in_(sorted(kernels)))
