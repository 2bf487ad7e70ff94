"""Records of a database or of an exchange file, whichever is named, with all that is wrong."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from autoflash.errors import StoreError
from autoflash.kernels import KERNELS
from autoflash.settings import DatabaseUrl, Place
from autoflash.store import jsonl
from autoflash.store.opening import open_store
from autoflash.store.record import TuningRecord
from autoflash.store.untrusted import MAX_REFUSALS, exposure

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_SQLITE = b"SQLite format 3\0"


@dataclass(kw_only=True)
class Side:
    """What lies at ``where``. ``refusals`` name what was refused, ``refused`` counts it; ``faults``
    are of the whole, ``warnings`` of where it lies, as in ``jsonl.Contents``."""

    where: Place
    records: list[TuningRecord]
    refusals: list[str] = field(default_factory=list)
    refused: int = 0
    faults: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    digest: str = ""
    signed_by: str = ""
    verified: bool = False

    @property
    def clean(self) -> bool:
        """Whether nothing was refused or at fault."""
        return not self.refused and not self.faults


def read_side(where: Place, key: "Ed25519PublicKey | None" = None) -> Side:
    """The records that lie at ``where``. Raises StoreError for what is neither, and for what
    ``key``, if given, didn't sign: so for each database."""
    if not isinstance(where, DatabaseUrl) and not _is_database(where):
        return read_file(where, key)
    if key is not None:
        raise StoreError(f"{where}: refused: a database is not signed; export it with --sign")
    return _read_database(where)


def read_file(path: Path, key: "Ed25519PublicKey | None" = None) -> Side:
    """As ``read_side``, of an exchange file alone."""
    found = jsonl.load(path, key)
    return Side(
        where=path,
        records=found.records,
        refusals=[f"line {refusal.line}: {refusal.reason}" for refusal in found.refusals],
        refused=found.refused,
        faults=found.faults,
        warnings=found.warnings,
        digest=found.digest,
        signed_by=found.signed_by,
        verified=found.verified,
    )


def misfits(records: list[TuningRecord]) -> list[str]:
    """Records whose config can't run their own problem, with the constraint's reason. Serving
    passes them over, so they do no harm but to trust."""
    found = []
    for record in records:
        space = KERNELS[record.kernel].space
        reason = space.why_not(record.config, record.problem, record.target, advice=False)
        if reason is not None:
            found.append(f"{record.kernel}, {record.problem.label()}: {reason[:300]}")
    return found


def _read_database(where: Place) -> Side:
    refusals = []
    rows = open_store(where, read_only=True).numbered_records(
        lambda row, error: refusals.append(f"row {str(row)[:40]}: {str(error)[:300]}")
    )
    return Side(
        where=where,
        records=[record for _, record in rows],
        refusals=refusals[:MAX_REFUSALS],
        refused=len(refusals),
        warnings=[] if isinstance(where, DatabaseUrl) else exposure(where),
    )


def _is_database(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_SQLITE)) == _SQLITE
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: can't be read: {error}") from error
