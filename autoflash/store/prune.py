"""Deleting what is superseded: the one thing that ever leaves a database, and never a word."""

from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import delete

from autoflash.errors import StoreError
from autoflash.store.base import AnyStore
from autoflash.store.digest import record_digest
from autoflash.store.jsonl import dump
from autoflash.store.merge import words
from autoflash.store.models import RecordRow
from autoflash.store.record import TuningRecord
from autoflash.store.rows import in_chunks
from autoflash.store.untrusted import write_new


def superseded(store: AnyStore) -> dict[int, TuningRecord]:
    """By row: what its own origin has superseded, and all but one of equal records.

    Any merge, now or later, has the same winners without these. Rows that can't be trusted are
    left out: nobody can say what they would supersede. Raises StoreError.
    """
    rows = store.numbered_records()
    standing = {record_digest(record) for record in words(record for _, record in rows)}
    found = {}
    for row, record in rows:
        digest = record_digest(record)
        if digest in standing:
            standing.remove(digest)
        else:
            found[row] = record
    return found


def prune(store: AnyStore, backup: Path) -> int:
    """Delete what is superseded, once it stands in the exchange file ``backup``, from which an
    import brings it back. Returns how many rows went. Raises StoreError, also if the file is there.

    What is added meanwhile stays: no new record makes a superseded one stand again.
    """
    store.require_writable("prune")
    rows = superseded(store)
    if not rows:
        return 0
    try:
        write_new(backup, dump(rows.values()), mode=0o644)
    except (OSError, ValueError) as error:
        raise StoreError(f"{backup}: can't be written, nothing was pruned: {error}") from error
    _forget(store, rows)
    return len(rows)


def _forget(store: AnyStore, rows: Iterable[int]) -> None:
    """All or none."""
    with store._session("prune records") as session:
        for chunk in in_chunks(sorted(rows)):
            session.execute(delete(RecordRow).where(RecordRow.id.in_(chunk)))
