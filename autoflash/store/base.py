"""AnyStore: what a store answers and takes, whichever database it lies in."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar, TypeVar

from sqlalchemy import Column, Connection, Engine, Select, func, insert, or_, select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from autoflash.errors import AutoFlashError, StoreError
from autoflash.problem import Bucket
from autoflash.store import schema
from autoflash.store.answer import Answer
from autoflash.store.evidence import Kernels, listing_order
from autoflash.store.lookups import Lookups, Refused
from autoflash.store.models import RecordRow, TrialRow, columns_of
from autoflash.store.parts import PROBLEM_FIELDS
from autoflash.store.record import Trial, TrialStatus, TuningRecord
from autoflash.store.rows import (
    Columns,
    record_from_row,
    record_to_row,
    rows_of,
    same_bucket,
    same_code,
    same_target,
    trial_from_row,
    trial_to_row,
)
from autoflash.target import Target

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
    def _exclude_others(self, session: Session) -> None:
        """Until the transaction ends nobody else who calls this goes on: what is compared with the
        rows is still lacking when it is added."""

    @abstractmethod
    def _explain(self, error: Exception) -> str:
        """What went wrong, and what to do about it; shows no password."""

    def add_record(self, record: TuningRecord) -> None:
        """Append ``record``. Raises StoreError, or ConfigError for a config not of its kernel."""
        self.add_records([record])

    def add_records(self, records: Iterable[TuningRecord]) -> None:
        """Append all of ``records`` or, if that raises, none."""
        self._add(RecordRow, [record_to_row(record) for record in records], "store records")

    def add_trial(self, trial: Trial) -> None:
        """Append ``trial``. Raises StoreError, or ConfigError for a config not of its kernel."""
        self.add_trials([trial])

    def add_trials(self, trials: Iterable[Trial]) -> None:
        """Append all of ``trials`` or, if that raises, none."""
        self._add(TrialRow, [trial_to_row(trial) for trial in trials], "store trials")

    def answer(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Answer:
        """All that a lookup may want, in one transaction; of ``kernels``, if given."""
        return self._look_up(lambda lookups: lookups.answer(bucket, target, kernels))

    def best(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> TuningRecord | None:
        """The record to serve exactly this bucket and target by, or None; of ``kernels``, if given.

        ``evidence.best_of`` decides, as it does when databases are merged.
        """
        return self._look_up(lambda lookups: lookups.best(bucket, target, kernels))

    def neighbours(
        self,
        bucket: Bucket,
        target: Target,
        kernels: Kernels = None,
        *,
        limit: int | None = None,
    ) -> list[TuningRecord]:
        """The best measured record of each other bucket whose config may carry over, nearest first;
        the first ``limit``, if given. All of ``target``'s identity; of ``kernels``, if given."""
        return self._look_up(
            lambda lookups: list(islice(lookups.neighbours(bucket, target, kernels), limit))
        )

    def siblings(
        self,
        bucket: Bucket,
        target: Target,
        kernels: Kernels = None,
        *,
        limit: int | None = None,
    ) -> list[TuningRecord]:
        """The best measured record of each bucket and other target of the arch, nearest first; the
        first ``limit``, if given. ``bucket`` itself comes first (distance 0), if one of them has
        it. Of ``kernels``, if given."""
        return self._look_up(
            lambda lookups: list(islice(lookups.siblings(bucket, target, kernels), limit))
        )

    def require_writable(self, action: str) -> None:
        """Raises StoreError if it was opened with read_only=True."""
        if self.read_only:
            raise StoreError(f"{self.name}: could not {action}: it was opened with read_only=True")

    def settle(self) -> None:  # noqa: B027 - most have nothing to do
        """Bring home what could not be stored when it was added."""

    def trials(self, bucket: Bucket, target: Target, kernel: str | None = None) -> list[Trial]:
        """The trials of a study (of one kernel, if named), in the order they were added in."""
        has = self.columns(TrialRow)
        query = self._whole(TrialRow).where(*same_bucket(has, bucket), *same_target(has, target))
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
        has = self.columns(TrialRow)
        # What an older database lacks is the same in all its rows.
        names = [name for name in PROBLEM_FIELDS if isinstance(has[name], Column)]
        problem = [has[name] for name in names]
        clean = (
            *same_code(has, record.bucket),
            *same_target(has, record.target),
            TrialRow.status == TrialStatus.ok.value,
            TrialRow.median_ms > 0,
        )
        fastest = func.min(TrialRow.median_ms).label("ms")
        best = select(*problem, fastest).where(*clean).group_by(*problem).subquery()
        same = (TrialRow.kernel == row["kernel"], TrialRow.config == row["config"])
        own = select(*problem, fastest).where(*clean, *same).group_by(*problem).subquery()
        matches = [own.c[name] == best.c[name] for name in names]
        elsewhere = or_(*(own.c[name] != row[name] for name in names))
        query = select(own.c.ms.label("own_ms"), best.c.ms.label("best_ms")).where(
            *matches, elsewhere
        )
        found = self._fetch(query, "look up trials")
        return sorted(row["own_ms"] / row["best_ms"] - 1 for row in found)

    def records(self, target: Target | None = None) -> list[TuningRecord]:
        """All records (of one target's identity, if given), by target, bucket, then best first."""
        # Plain columns, not objects: a stranger's table may lack the key that objects go by.
        # Of what is equal otherwise the last one that was added comes first.
        query = self._whole(RecordRow).order_by(RecordRow.id.desc())
        if target is not None:
            query = query.where(*same_target(self.columns(RecordRow), target))
        return sorted(self._read(query, record_from_row, "list records"), key=listing_order)

    def numbered_records(self, refused: Refused | None = None) -> list[tuple[int, TuningRecord]]:
        """All records with their row ids, in the order they were added in.

        ``refused`` hears of each row that was skipped; without it the first one is warned of.
        """
        query = self._whole(RecordRow).order_by(RecordRow.id)
        return self._read(
            query, lambda row: (row["id"], record_from_row(row)), "list records", refused
        )

    def columns(self, table: type[RecordRow | TrialRow]) -> Columns:
        """Those of ``table``, by name: a database that is only read may be older, and lack some."""
        return columns_of(table, self.schema_version)

    def _whole(self, table: type[RecordRow | TrialRow]) -> Select[Any]:
        """Whole rows of ``table``."""
        return select(*self.columns(table).values())

    def _read(
        self,
        query: Select[Any],
        convert: Callable[[Mapping[str, Any]], T],
        action: str,
        refused: Refused | None = None,
    ) -> list[T]:
        def read(connection: Connection) -> list[T]:
            found = []
            for row in rows_of(connection, query):
                try:
                    found.append(convert(row))
                except AutoFlashError as error:
                    (refused or self._warn_of_bad_row)(row["id"], error)
            return found

        return self._ask(read, action)

    def _fetch(self, query: Select[Any], action: str) -> list[dict[str, Any]]:
        return self._ask(lambda connection: list(rows_of(connection, query)), action)

    def _look_up(self, question: Callable[[Lookups], T]) -> T:
        return self._ask(
            lambda connection: question(
                Lookups(connection, self.schema_version, self._warn_of_bad_row)
            ),
            "look up records",
        )

    def _ask(self, question: Callable[[Connection], T], action: str) -> T:
        """The answer to ``question``, which only reads."""
        with self._session(action) as session:
            return question(session.connection())

    def _add(
        self, table: type[RecordRow | TrialRow], rows: list[dict[str, Any]], action: str
    ) -> None:
        self.require_writable(action)
        if rows:
            with self._session(action) as session:
                session.connection().execute(insert(table), rows)

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
