"""Records by what they say: one canonical text each, and the SHA-256 of it."""

import hashlib
import json
from typing import Any

from autoflash.store.plain import record_to_plain
from autoflash.store.record import TuningRecord

# Kept, since json.dumps makes a new one for each record.
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(plain: object) -> str:
    """The one JSON text of ``plain``: sorted keys, no spaces, ASCII alone. No NaN, no infinity."""
    return _ENCODER.encode(plain)


def sha256(text: str) -> str:
    """In 64 hexadecimal digits."""
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def record_digest(record: TuningRecord) -> str:
    """Names ``record`` in any database or file: equal for equal records, and for no others."""
    return sha256(canonical(record_to_plain(record)))


class Tie:
    """Sorts records that all else leaves equal. A digest costs more than the rest of a comparison,
    so it is taken only when one is needed."""

    __slots__ = ("_record",)

    def __init__(self, record: TuningRecord) -> None:
        self._record = record

    def __lt__(self, other: "Tie") -> bool:
        return record_digest(self._record) < record_digest(other._record)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tie) and record_digest(self._record) == record_digest(
            other._record
        )

    def __hash__(self) -> int:
        return hash(self._record)

    def __repr__(self) -> str:
        return f"Tie({record_digest(self._record)[:12]})"


def unique(records: list[TuningRecord]) -> dict[str, TuningRecord]:
    """The records by their digests, in the order of these, so that no other order matters."""
    found: dict[str, Any] = {record_digest(record): record for record in records}
    return dict(sorted(found.items()))
