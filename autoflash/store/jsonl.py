"""Records between hosts: JSON Lines, a header and then one record a line, sorted.

The header names the format and holds the count and the digest of all lines below it; each line
holds its record's own digest. The same records give the same text on any host, so that a file in
git changes by the lines of the records that changed. A file is read as a stranger's: bad lines are
refused one by one, with a reason.
"""

import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoflash.errors import AutoFlashError, StoreError
from autoflash.store import signing
from autoflash.store.digest import canonical, record_digest, record_text, sha256
from autoflash.store.exchange import place_of
from autoflash.store.header import MAX_HEADER, Form, is_whole
from autoflash.store.plain import record_from_plain
from autoflash.store.record import TuningRecord, latest_stamp
from autoflash.store.untrusted import MAX_REFUSALS, exposure, parse_object, read_bytes, refuse_stamp

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

FORM = Form(
    name="autoflash-exchange",
    version=1,
    again="export the records again",
    optional=frozenset({"signature"}),
)
# Twelve bytes for each of 200 characters of the ten texts, at worst, and the rest.
MAX_LINE = 32 << 10
_SIGNATURE_FIELDS = {"algorithm", "key", "value"}


@dataclass(frozen=True)
class Refusal:
    """A line that was refused."""

    line: int
    reason: str


@dataclass(kw_only=True)
class Contents:
    """What a file held: its good records, and all that was wrong with it.

    ``faults`` are of the file as a whole (it was cut or changed since it was written), ``warnings``
    of where it lies. ``refused`` counts the lines of which ``refusals`` names the first thousand.
    ``signed_by`` is the fingerprint that the file claims, ``verified`` whether that was proved.
    """

    digest: str
    records: list[TuningRecord] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    signed_by: str = ""
    verified: bool = False

    @property
    def clean(self) -> bool:
        """Whether the file is just as it was written, and each of its records good."""
        return not self.refused and not self.faults


def dump(records: Iterable[TuningRecord], key: "Ed25519PrivateKey | None" = None) -> str:
    """The file of ``records``, signed if there is a ``key``: the same whatever their order."""
    body = "".join(_lines(records))
    header = FORM.header(body)
    if key is not None:
        header["signature"] = {
            "algorithm": signing.ALGORITHM,
            "key": signing.fingerprint(key.public_key()),
            "value": signing.sign(canonical(header), key),
        }
    return canonical(header) + "\n" + body


def load(path: Path, key: "Ed25519PublicKey | None" = None) -> Contents:
    """The records of the file ``path``; see ``parse``. Raises StoreError that names it."""
    try:
        contents = parse(read_bytes(path), key)
    except StoreError as error:
        text = str(error)
        raise StoreError(text if text.startswith(str(path)) else f"{path}: {text}") from error
    contents.warnings += exposure(path)
    return contents


def parse(data: bytes, key: "Ed25519PublicKey | None" = None) -> Contents:
    """The records that a stranger's file holds, and what is wrong with it.

    Raises StoreError if it isn't such a file at all or, with a ``key``, if that didn't sign it just
    as it is.
    """
    lines = io.BytesIO(data)
    header = FORM.parse(lines.readline(MAX_HEADER + 1))
    contents = Contents(digest=header["digest"])
    body = data[lines.tell() :]
    if not is_whole(header, body):
        contents.faults.append("the digest in the header isn't that of the lines: it was changed")
    _check_signature(header, contents, key)
    _read_records(lines, contents)
    found = len(contents.records) + contents.refused
    if found != header["count"]:
        contents.faults.append(
            f"{found} different records where the header counts {header['count']}: "
            "it was cut or added to"
        )
    return contents


def _lines(records: Iterable[TuningRecord]) -> Iterator[str]:
    found = sorted((place_of(record), record_text(record)) for record in records)
    for text in dict.fromkeys(text for _, text in found):
        yield f'{{"digest":"{sha256(text)}",{text[1:]}\n'


def _check_signature(
    header: dict[str, Any], contents: Contents, key: "Ed25519PublicKey | None"
) -> None:
    """Raises StoreError unless ``key``, if given, signed the file just as it is."""
    signature = header.get("signature")
    if signature is not None:
        texts = isinstance(signature, dict) and set(signature) == _SIGNATURE_FIELDS
        if not texts or not all(isinstance(value, str) for value in signature.values()):
            raise StoreError(
                f"not an {FORM.name} file: its signature needs algorithm, key and value"
            )
        contents.signed_by = signature["key"] if signature["key"].isalnum() else "?"
    if key is None:
        return
    wanted = signing.fingerprint(key)
    if signature is None:
        raise StoreError(f"refused: not signed; {wanted} must have signed it")
    if contents.faults:
        raise StoreError(f"refused: changed since it was signed: {contents.faults[0]}")
    signed = canonical({name: header[name] for name in FORM.fields})
    if signature["algorithm"] != signing.ALGORITHM or not signing.is_signed(
        signed, signature["value"], key
    ):
        raise StoreError(f"refused: its signature isn't one by {wanted}")
    contents.signed_by = wanted
    contents.verified = True


def _read_records(lines: io.BytesIO, contents: Contents) -> None:
    """Each of the lines that are left, by itself."""
    latest = latest_stamp()
    seen: set[str] = set()
    for number, line in enumerate(lines, 2):
        if not line.strip():
            continue
        try:
            digest, record = _record(line.rstrip(b"\r\n"), latest)
        except AutoFlashError as error:
            contents.refused += 1
            if len(contents.refusals) < MAX_REFUSALS:
                contents.refusals.append(Refusal(number, str(error)[:300]))
            continue
        # Two files that were joined say some things twice.
        if digest not in seen:
            seen.add(digest)
            contents.records.append(record)


def _record(line: bytes, latest: str) -> tuple[str, TuningRecord]:
    plain = parse_object(line, limit=MAX_LINE)
    claimed = plain.pop("digest", None)
    record = record_from_plain(plain)
    digest = record_digest(record)
    if claimed != digest:
        raise StoreError("its digest isn't that of the record: it was changed")
    refuse_stamp(record.provenance.created_at, latest)
    return digest, record
