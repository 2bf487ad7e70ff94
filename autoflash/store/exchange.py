"""Records as JSON text: sorted, a line per part, so that a review sees what a tune changed."""

import json
import operator
from collections.abc import Iterable
from typing import Any

from autoflash.errors import AutoFlashError, StoreError
from autoflash.store.digest import record_text
from autoflash.store.plain import record_from_plain, record_to_plain
from autoflash.store.record import LockEntry, TuningRecord

_BY_PROBLEM = operator.attrgetter(
    *("op", "dtype", "head_dim", "head_dim_v", "causal", "seqlen_q", "seqlen_k", "batch"),
    *("heads", "kv_heads", "kv_dtype", "out_dtype", "scales", "v_layout"),
)
FORMAT = "autoflash-records"
VERSION = 1


def dump_records(records: Iterable[TuningRecord]) -> str:
    """The document of ``records``; the same text whatever their order."""
    ordered = sorted(records, key=lambda record: (place_of(record), record_text(record)))
    blocks = ",\n".join(_block(record_to_plain(record)) for record in ordered)
    body = f"[\n{blocks}\n ]" if blocks else "[]"
    return f'{{\n "format": "{FORMAT}",\n "records": {body},\n "version": {VERSION}\n}}\n'


def load_records(text: str) -> tuple[list[TuningRecord], list[str]]:
    """The records of a document from a stranger, and why each of the others was refused.

    Raises StoreError if ``text`` isn't such a document at all.
    """
    records = []
    refusals = []
    for index, plain in enumerate(_parse(text)):
        try:
            records.append(record_from_plain(plain))
        except AutoFlashError as error:
            refusals.append(f"record {index}: {str(error)[:300]}")
    return records, refusals


def _parse(text: str) -> list[Any]:
    try:
        document = json.loads(text)
    # Too deep, or a number of more digits than Python converts.
    except (ValueError, RecursionError) as error:
        raise StoreError(f"not an {FORMAT} document: not JSON: {str(error)[:200]}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise StoreError(f'not an {FORMAT} document: it has no "format": "{FORMAT}"')
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise StoreError(
            f"{FORMAT} version {str(version)[:80]}: this autoflash reads version {VERSION}; "
            "upgrade autoflash, or export the records again"
        )
    records = document.get("records")
    if not isinstance(records, list) or set(document) != {"format", "version", "records"}:
        raise StoreError(f'not an {FORMAT} document: it needs "records", a list, and no other key')
    return records


def place_of(record: TuningRecord) -> tuple[Any, ...]:
    """Sort key of a record in a file for people: by GPU, problem, kernel, date."""
    # The time comes before the rest, so that a re-tune adds below what it replaces.
    return (*place_of_choice(record), record.provenance.created_at)


def place_of_choice(noun: TuningRecord | LockEntry) -> tuple[Any, ...]:
    """The same of what kernel runs what problem where: by GPU, problem, kernel."""
    return (noun.target.identity, _BY_PROBLEM(noun.problem), noun.kernel)


def _block(plain: dict[str, Any]) -> str:
    lines = ",\n".join(f'   "{name}": {_line(plain[name])}' for name in sorted(plain))
    return f"  {{\n{lines}\n  }}"


def _line(value: Any) -> str:
    return json.dumps(value, sort_keys=True, allow_nan=False)
