"""Deleting what is superseded: the one thing that ever leaves a database, and never a word."""

from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import delete, select

from autoflash.errors import AutoFlashError, StoreError
from autoflash.store.digest import record_digest
from autoflash.store.jsonl import dump
from autoflash.store.merge import words
from autoflash.store.models import RecordRow
from autoflash.store.record import TuningRecord
from autoflash.store.rows import record_from_row
from autoflash.store.store import Store
from autoflash.store.untrusted import write_new

# Well below what SQLite takes as parameters of a statement.
_CHUNK = 500


class PrunableStore(Store):
    """A Store that can also forget. Rows that can't be trusted are left as they are: nobody can say
    what they would supersede."""

    def superseded(self) -> dict[int, TuningRecord]:
        """By row: what its own origin has superseded, and all but one of equal records.

        Any merge, now or later, has the same winners without these.
        """
        rows = self._rows()
        standing = {record_digest(record) for record in words(rows.values())}
        found = {}
        for row, record in rows.items():
            digest = record_digest(record)
            if digest in standing:
                standing.remove(digest)
            else:
                found[row] = record
        return found

    def forget(self, rows: Iterable[int]) -> None:
        """Delete these rows, all or none. Raises StoreError."""
        if self.read_only:
            raise StoreError(f"{self.path}: could not prune: it was opened with read_only=True")
        ids = sorted(rows)
        with self._session("prune records") as session:
            for start in range(0, len(ids), _CHUNK):
                chunk = ids[start : start + _CHUNK]
                session.execute(delete(RecordRow).where(RecordRow.id.in_(chunk)))

    def _rows(self) -> dict[int, TuningRecord]:
        found = {}
        query = select(*RecordRow.__table__.columns).order_by(RecordRow.id)
        with self._session("list records") as session:
            for row in session.execute(query).mappings():
                try:
                    found[row["id"]] = record_from_row(dict(row))
                except AutoFlashError as error:
                    self._warn_of_bad_row(row["id"], error)
        return found


def prune(store: PrunableStore, backup: Path) -> int:
    """Delete what is superseded, once it stands in the exchange file ``backup``, from which an
    import brings it back. Returns how many rows went. Raises StoreError, also if the file is there.

    What is added meanwhile stays: no new record makes a superseded one stand again.
    """
    rows = store.superseded()
    if not rows:
        return 0
    try:
        write_new(backup, dump(rows.values()), mode=0o644)
    except (OSError, ValueError) as error:
        raise StoreError(f"{backup}: can't be written, nothing was pruned: {error}") from error
    store.forget(rows)
    return len(rows)
