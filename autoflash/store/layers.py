"""What serving looks records up in: the user's store, then the records that ship."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autoflash.errors import StoreError
from autoflash.problem import Bucket
from autoflash.settings import DatabaseUrl, Settings, settings
from autoflash.store.evidence import Kernels, evidence_order
from autoflash.store.record import TuningRecord
from autoflash.store.shipped import ShippedRecords, shipped_folder
from autoflash.target import Target

if TYPE_CHECKING:
    from autoflash.store.remote import RemoteRecords
    from autoflash.store.store import Store

logger = logging.getLogger(__name__)

# Six octaves: beyond that a config says less than the kernel's default for the shape.
MAX_DISTANCE = 6.0
_ORDER = ("user", "shipped")


class Source(Protocol):
    """What a layer must answer, by records of ``kernels`` alone if given; see Store. May raise
    StoreError."""

    def best(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> TuningRecord | None:
        """The best record of exactly this bucket and target."""

    def neighbours(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """Measured records of other buckets, nearest first."""

    def siblings(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """Measured records of other targets of the arch, nearest first."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record, and how it was found.

    ``layer`` is 'user' or 'shipped'. ``how`` is 'exact'; 'neighbour' (of another bucket, or of this
    bucket on another target of the arch: compare ``record.target``); or 'predicted'. ``distance``
    is ``Bucket.distance``, in octaves of size.
    """

    record: TuningRecord
    layer: str
    how: str
    distance: float


class Layers:
    """Looks a bucket up in every layer; never raises, never writes, never loads Alembic.

    Owns no connection to a file, may be shared by threads and used after a fork. A layer that can't
    be read is skipped, with one warning; of a server that can't, the last answers stand. The user's
    file may appear while the process runs.
    """

    def __init__(self, snapshot: Settings | None = None, *, shipped: Path | None = None) -> None:
        """By default of the settings as they are now (which may raise InvalidInputError).

        ``shipped`` is another folder than the package's. Keep a Layers: it reads a file only once.
        """
        snapshot = snapshot or settings()
        self._db = snapshot.db
        self._user: Store | RemoteRecords | None = None
        self._shipped: Source | None = None
        if snapshot.use_shipped_records:
            self._shipped = ShippedRecords(shipped or shipped_folder())
        self._warned: set[str] = set()

    def lookup(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Found | None:
        """The best known record for ``bucket`` on ``target``, or None; of ``kernels``, if given.

        An exact measured one, else the nearest measured one of the target, else a measured one of
        this bucket on another target of the arch, else an exact predicted one. A clean record goes
        before a noisy one, then the user's before a shipped one, then the newest, then the fastest.
        """
        exact = self._ask(lambda s: [s.best(bucket, target, kernels)], bucket, "exact")
        measured = [found for found in exact if found.record.kind == "measured"]
        return (
            _first(measured)
            or _first(
                self._ask(lambda s: s.neighbours(bucket, target, kernels), bucket, "neighbour")
            )
            or _first(
                found
                for found in self._ask(
                    lambda s: s.siblings(bucket, target, kernels), bucket, "neighbour"
                )
                if found.distance == 0
            )
            or _first(exact)
        )

    def losses(self, record: TuningRecord) -> list[float]:
        """``Store.losses`` by the trials of the user's store; none if it can't be read."""
        try:
            user = self._open_user()
            return user.losses(record) if user else []
        except StoreError as error:
            self._warn("user", error)
            return []

    def _ask(
        self,
        question: Callable[[Source], Iterable[TuningRecord | None]],
        bucket: Bucket,
        how: str,
    ) -> list[Found]:
        found = []
        for layer in _ORDER:
            try:
                source = self._open_user() if layer == "user" else self._shipped
                records = [] if source is None else list(question(source))
            except StoreError as error:
                self._warn(layer, error)
                continue
            for record in filter(None, records):
                distance = bucket.distance(record.bucket)
                if distance is not None and distance <= MAX_DISTANCE:
                    predicted = record.kind == "predicted"
                    found.append(
                        Found(
                            record=record,
                            layer=layer,
                            how="predicted" if predicted else how,
                            distance=distance,
                        )
                    )
        return found

    def _open_user(self) -> "Store | RemoteRecords | None":
        if self._user is None:
            if isinstance(self._db, DatabaseUrl):
                from autoflash.store.remote import RemoteRecords

                self._user = RemoteRecords(self._db, partial(self._warn, "user"))
            elif _is_there(self._db):
                from autoflash.store.store import Store

                self._user = Store(self._db, read_only=True)
        return self._user

    def _warn(self, layer: str, error: StoreError) -> None:
        if layer not in self._warned:
            self._warned.add(layer)
            logger.warning("going on without the %s records: %s", layer, error)


def _is_there(path: Path) -> bool:
    """A file that isn't there is no reason to load SQLAlchemy."""
    try:
        return path.exists()
    except OSError as error:
        raise StoreError(f"{path}: can't be looked at: {error}") from error


def _first(found: Iterable[Found]) -> Found | None:
    def rank(one: Found) -> tuple[object, ...]:
        predicted, noisy, *rest = evidence_order(one.record)
        return (one.distance, predicted, noisy, _ORDER.index(one.layer), *rest)

    return min(found, key=rank, default=None)
