"""Store: the database of records and trials, in one SQLite file."""

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, NullPool, Select, create_engine, event, func, or_, select
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
from autoflash.store.upgrade import prepare_for_writing
from autoflash.target import Target

logger = logging.getLogger(__name__)

Noun = TypeVar("Noun", TuningRecord, Trial)


class Store:
    """Records and trials, append only: nothing that was stored is changed or deleted.

    A Store owns no open connection: each method opens one, and closes it before it returns. So it
    may be shared by threads, used after a fork and dropped without being closed, and any number of
    processes may use one file at a time. All reads return nouns; a row that can't be trusted is
    skipped, with one warning per Store. Every failure of the database is a StoreError.
    """

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        """Open ``path``; unless ``read_only``, create it or upgrade its schema first.

        Raises StoreError for a file that is missing (read-only), broken, something else, or (for
        writing) of a newer autoflash; such a file is left as it is.
        """
        self.path = Path(path).expanduser().absolute()
        self.read_only = read_only
        self._warned = False
        if read_only:
            self._uri, self.schema_version = schema.open_for_reading(self.path)
        else:
            prepare_for_writing(self.path)
            # rw, not rwc: a file that goes away is an error, not an empty database.
            self._uri = schema.uri(self.path, "mode=rw")
            self.schema_version = schema.SCHEMA_VERSIONS[-1]
        self._engine = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        event.listen(self._engine, "connect", self._configure)

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
        query = select(own.c.ms, best.c.ms).where(*matches, elsewhere)
        with self._session("look up trials") as session:
            return sorted(ms / fastest - 1 for ms, fastest in session.execute(query))

    def records(self, target: Target | None = None) -> list[TuningRecord]:
        """All records (of one target's identity, if given), by target, bucket, then best first."""
        query = _by_evidence(*([] if target is None else same_target(RecordRow, target)))
        return sorted(self._records(query, "list records"), key=listing_order)

    def _trial_columns(self) -> Select[Any]:
        """Those that the file has: one that is only read may be older."""
        added = schema.ADDED_TO_TRIALS
        columns = TrialRow.__table__.columns
        return select(*(c for c in columns if added.get(c.name, "") <= self.schema_version))

    def _records(self, query: Select[Any], action: str) -> list[TuningRecord]:
        return self._read(query, record_from_row, action)

    def _read(
        self, query: Select[Any], convert: Callable[[Mapping[str, Any]], Noun], action: str
    ) -> list[Noun]:
        nouns = []
        with self._session(action) as session:
            for row in session.execute(query).mappings():
                try:
                    nouns.append(convert(dict(row)))
                except AutoFlashError as error:
                    self._warn_of_bad_row(row["id"], error)
        return nouns

    def _add(self, rows: Iterable[RecordRow | TrialRow], action: str) -> None:
        if self.read_only:
            raise StoreError(f"{self.path}: could not {action}: it was opened with read_only=True")
        with self._session(action) as session:
            session.add_all(rows)

    @contextmanager
    def _session(self, action: str) -> Iterator[Session]:
        """One transaction on one connection: committed at the end, undone by any exception."""
        try:
            with Session(self._engine) as session, session.begin():
                yield session
        except (SQLAlchemyError, *schema.DATABASE_ERRORS) as error:
            cause = schema.cause_of(error)
            raise StoreError(
                f"{self.path}: could not {action}: {cause}; {schema.next_step(cause)}"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        # The timeout is SQLite's busy_timeout.
        timeout_s = schema.READ_TIMEOUT_S if self.read_only else schema.WRITE_TIMEOUT_S
        return schema.connect(self._uri, timeout_s)

    def _configure(self, connection: sqlite3.Connection, _: object) -> None:
        pragmas = ["foreign_keys=ON"]
        if not self.read_only:
            pragmas += ["journal_mode=WAL", "synchronous=NORMAL"]
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    def _warn_of_bad_row(self, row_id: object, error: AutoFlashError) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: skipped row %s: %s (further rows are skipped silently)",
                *(self.path, row_id, str(error)[:300]),
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
