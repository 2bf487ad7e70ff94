"""Bringing to a database what another one has and it lacks: records and trials, by digest."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import select

from autoflash.errors import AutoFlashError, StoreError
from autoflash.store.base import AnyStore
from autoflash.store.lacking import (
    RECORDS,
    TRIALS,
    Kind,
    add_lacking_records,
    add_lacking_trials,
    complete_digests,
    known_digests,
)
from autoflash.store.record import latest_stamp
from autoflash.store.rows import AT_ONCE
from autoflash.store.untrusted import MAX_REFUSALS, refuse_stamp

_ADD: dict[str, Callable[[AnyStore, list[Any]], int]] = {
    RECORDS.name: add_lacking_records,
    TRIALS.name: add_lacking_trials,
}


@dataclass(kw_only=True)
class Brought:
    """How many rows were ``added``, were ``known`` already and were ``refused``; ``refusals`` name
    the first thousand of these."""

    added: int = 0
    known: int = 0
    refused: int = 0
    refusals: list[str] = field(default_factory=list)


def bring(source: AnyStore, destination: AnyStore) -> dict[str, Brought]:
    """Add to ``destination`` what it lacks of ``source``, batch by batch, in the order of the
    latter; by 'records' and 'trials'.

    Only what is lacking is read and sent; it is trusted as little as a file: bad rows are refused
    one by one. What is interrupted is done again without doubling anything. Raises StoreError.
    """
    destination.require_writable("bring rows")
    return {kind.name: _bring(source, destination, kind) for kind in (RECORDS, TRIALS)}


def _bring(source: AnyStore, destination: AnyStore, kind: Kind) -> Brought:
    found = Brought()
    complete_digests(destination, kind)
    latest = latest_stamp()
    for batch in _batches(source, kind):
        claimed = [digest for digest in batch.values() if digest]
        known = destination._ask(
            lambda connection: known_digests(connection, kind, claimed),  # noqa: B023
            f"compare {kind.name}",
        )
        ids = [row for row, digest in batch.items() if digest not in known]
        found.known += len(batch) - len(ids)
        if not ids:
            continue
        query = source._whole(kind.table).where(kind.table.id.in_(ids)).order_by(kind.table.id)
        nouns = []
        for row in source._fetch(query, f"read {kind.name}"):
            try:
                noun = kind.from_row(row)
                if row.get("digest") and row["digest"] != kind.digest(noun):
                    raise StoreError("its digest isn't that of the row: it was changed since")
                refuse_stamp(noun.provenance.created_at, latest)
                nouns.append(noun)
            except AutoFlashError as error:
                found.refused += 1
                if len(found.refusals) < MAX_REFUSALS:
                    place = f"{kind.name}, row {str(row['id'])[:40]}"
                    found.refusals.append(f"{place}: {str(error)[:300]}")
        added = _ADD[kind.name](destination, nouns)
        found.added += added
        found.known += len(nouns) - added
    return found


def _batches(store: AnyStore, kind: Kind) -> Iterator[dict[int, str]]:
    """The digest of each row by its id, some at a time, oldest first; "" if it has none."""
    table = kind.table
    digest = store.columns(table)["digest"]
    last = None
    while True:
        query: Any = select(table.id, digest).order_by(table.id).limit(AT_ONCE)
        if last is not None:
            query = query.where(table.id > last)
        rows = store._fetch(query, f"list {kind.name}")
        if not rows:
            return
        last = rows[-1]["id"]
        yield {row["id"]: row["digest"] for row in rows}
