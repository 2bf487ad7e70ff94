"""The records that ship with the package: one reviewed file per GPU in ``tuning_db/``."""

import importlib.resources
import logging
from pathlib import Path

from autoflash.errors import StoreError
from autoflash.problem import Bucket
from autoflash.store.answer import Answer, answer_of
from autoflash.store.evidence import Kernels, best_of, nearest
from autoflash.store.exchange import load_records
from autoflash.store.record import TuningRecord
from autoflash.target import Target

logger = logging.getLogger(__name__)

SHIPPED_PACKAGE = "autoflash_tuning_db"


def shipped_folder() -> Path:
    """Where the files lie."""
    return Path(str(importlib.resources.files(SHIPPED_PACKAGE)))


class ShippedRecords:
    """Answers as a Store does, from ``<slug>.json`` files, each read once and when first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, list[TuningRecord]] = {}

    def answer(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Answer:
        """As ``Store.answer``."""
        return answer_of(self, bucket, target, kernels)

    def best(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> TuningRecord | None:
        """As ``Store.best``."""
        records = [r for r in self._of(target, kernels) if r.bucket == bucket]
        return best_of(records)

    def neighbours(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """As ``Store.neighbours``."""
        found = self._of(target, kernels)
        return nearest((r for r in found if r.kind == "measured" and r.bucket != bucket), bucket)

    def siblings(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """As ``Store.siblings``."""

        def is_sibling(record: TuningRecord) -> bool:
            return (
                record.kind == "measured"
                and record.target.arch == target.arch
                and record.target.identity != target.identity
                and (kernels is None or record.kernel in kernels)
            )

        return nearest(filter(is_sibling, self._of_all()), bucket)

    def losses(self, record: TuningRecord) -> list[float]:
        """None: trials don't ship."""
        del record
        return []

    def _of(self, target: Target, kernels: Kernels) -> list[TuningRecord]:
        # The name of the file is a hint; whose record it is stands in the record.
        return [
            record
            for record in self._read(self._folder / f"{target.slug}.json")
            if record.target.identity == target.identity
            and (kernels is None or record.kernel in kernels)
        ]

    def _of_all(self) -> list[TuningRecord]:
        paths = sorted(self._folder.glob("*.json"))
        return [record for path in paths for record in self._read(path)]

    def _read(self, path: Path) -> list[TuningRecord]:
        if path not in self._files:
            try:
                self._files[path] = _load(path)
            except StoreError as error:
                # Told of once, and not read again for every bucket.
                self._files[path] = []
                logger.warning("skipped shipped records: %s", error)
        return self._files[path]


def _load(path: Path) -> list[TuningRecord]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: can't be read: {error}") from error
    try:
        records, refusals = load_records(text)
    except StoreError as error:
        raise StoreError(f"{path}: {error}") from error
    if refusals:
        logger.warning("%s: refused %d records, such as %s", path, len(refusals), refusals[0])
    return records


def all_shipped_records() -> list[TuningRecord]:
    """Every record that ships, in the files' order. Raises StoreError for a broken file."""
    return [record for path in sorted(shipped_folder().glob("*.json")) for record in _load(path)]
