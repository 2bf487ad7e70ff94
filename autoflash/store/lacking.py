"""Adding what a store lacks, by digest: it may be done again, and by several at once."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, insert, select, update

from autoflash.errors import AutoFlashError
from autoflash.store.base import AnyStore
from autoflash.store.digest import record_digest, trial_digest
from autoflash.store.models import RecordRow, TrialRow
from autoflash.store.record import Trial, TuningRecord
from autoflash.store.rows import (
    AT_ONCE,
    in_chunks,
    record_from_row,
    record_to_row,
    trial_from_row,
    trial_to_row,
)


class Kind(NamedTuple):
    """What is stored of records, or of trials."""

    name: str
    table: type[RecordRow | TrialRow]
    to_row: Callable[[Any], dict[str, Any]]
    from_row: Callable[[Mapping[str, Any]], Any]
    digest: Callable[[Any], str]


RECORDS = Kind("records", RecordRow, record_to_row, record_from_row, record_digest)
TRIALS = Kind("trials", TrialRow, trial_to_row, trial_from_row, trial_digest)


def add_lacking_records(store: AnyStore, records: Iterable[TuningRecord]) -> int:
    """Append those that ``store`` doesn't hold yet, each once, in one transaction; how many these
    are. Raises StoreError, or ConfigError for a config not of its kernel."""
    return _add_lacking(store, RECORDS, [record_to_row(record) for record in records])


def add_lacking_trials(store: AnyStore, trials: Iterable[Trial]) -> int:
    """As ``add_lacking_records``, of trials."""
    return _add_lacking(store, TRIALS, [trial_to_row(trial) for trial in trials])


def known_digests(connection: Connection, kind: Kind, digests: Iterable[str]) -> set[str]:
    """Those of ``digests`` that a row has."""
    column = kind.table.digest
    found: set[str] = set()
    for chunk in in_chunks(sorted(set(digests))):
        query = select(column).where(column.in_(chunk))
        found.update(connection.execute(query).scalars())
    return found


def complete_digests(store: AnyStore, kind: Kind) -> None:
    """Fill in those of rows from before there were any. Rows that can't be trusted stay without:
    who can read them later will. Raises StoreError."""
    table, last = kind.table, 0
    undone = select(*table.__table__.columns).where(table.digest == "")
    row_id = table.__table__.columns["id"]
    fill = update(table).where(row_id == bindparam("row")).values(digest=bindparam("is"))
    while True:
        query = undone.where(table.id > last).order_by(table.id).limit(AT_ONCE)
        rows = store._fetch(query, f"look for {kind.name} without a digest")
        if not rows:
            return
        last = rows[-1]["id"]
        found = []
        for row in rows:
            try:
                found.append({"row": row["id"], "is": kind.digest(kind.from_row(row))})
            except AutoFlashError as error:
                store._warn_of_bad_row(row["id"], error)
        if found:
            with store._session(f"give digests to {kind.name}") as session:
                session.connection().execute(fill, found)


def _add_lacking(store: AnyStore, kind: Kind, rows: Sequence[dict[str, Any]]) -> int:
    store.require_writable(f"store {kind.name}")
    complete_digests(store, kind)
    offered = {row["digest"]: row for row in rows}
    with store._session(f"store {kind.name}") as session:
        store._exclude_others(session)
        connection = session.connection()
        known = known_digests(connection, kind, offered)
        lacking = [row for digest, row in offered.items() if digest not in known]
        if lacking:
            connection.execute(insert(kind.table), lacking)
    return len(lacking)
