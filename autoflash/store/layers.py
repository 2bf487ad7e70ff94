"""What serving looks records up in: the user's store, then the records that ship."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from autoflash.errors import StoreError
from autoflash.problem import Bucket
from autoflash.settings import DatabaseUrl, Settings, settings
from autoflash.store.answer import Answer
from autoflash.store.evidence import Kernels, evidence_order
from autoflash.store.forks import gate
from autoflash.store.record import TuningRecord
from autoflash.store.shipped import ShippedRecords, shipped_folder
from autoflash.target import Target

if TYPE_CHECKING:
    from autoflash.store.base import AnyStore
    from autoflash.store.remote import RemoteRecords

logger = logging.getLogger(__name__)

_ORDER = ("user", "shipped")


class Source(Protocol):
    """A layer."""

    def answer(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Answer:
        """What it has, by records of ``kernels`` alone if given. May raise StoreError."""


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
        self._user: AnyStore | RemoteRecords | None = None
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
        exact, neighbours, siblings = [], [], []
        for layer, answer in self._answers(bucket, target, kernels):
            exact += _found(answer.best, layer, "exact", bucket)
            neighbours += _found(answer.neighbour, layer, "neighbour", bucket)
            siblings += _found(answer.sibling, layer, "neighbour", bucket)
        measured = (found for found in exact if found.record.kind == "measured")
        return _first(measured) or _first(neighbours) or _first(siblings) or _first(exact)

    def losses(self, record: TuningRecord) -> list[float]:
        """``Store.losses`` by the trials of the user's store; none if it can't be read."""
        try:
            user = self._open_user()
            return user.losses(record) if user else []
        except StoreError as error:
            self._warn("user", error)
            return []

    def _answers(
        self, bucket: Bucket, target: Target, kernels: Kernels
    ) -> Iterator[tuple[str, Answer]]:
        for layer in _ORDER:
            try:
                source = self._open_user() if layer == "user" else self._shipped
                if source is not None:
                    yield layer, source.answer(bucket, target, kernels)
            except StoreError as error:
                self._warn(layer, error)

    def _open_user(self) -> "AnyStore | RemoteRecords | None":
        if self._user is not None:
            return self._user
        # A child that is forked while this imports would wait for the import for ever.
        with gate.question():
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


class SureLayers(Layers):
    """Layers for what must not be decided without one of them: they wait for a server, and what
    can't be read is a StoreError."""

    def _open_user(self) -> "AnyStore | RemoteRecords | None":
        if self._user is None and (isinstance(self._db, DatabaseUrl) or _is_there(self._db)):
            from autoflash.store.opening import open_store

            self._user = open_store(self._db, read_only=True)
        return self._user

    def _warn(self, layer: str, error: StoreError) -> None:
        raise StoreError(f"the {layer} records: {error}") from error


def _is_there(path: Path) -> bool:
    """A file that isn't there is no reason to load SQLAlchemy."""
    try:
        return path.exists()
    except OSError as error:
        raise StoreError(f"{path}: can't be looked at: {error}") from error


def _found(record: TuningRecord | None, layer: str, how: str, bucket: Bucket) -> list[Found]:
    """One, or none."""
    distance = None if record is None else bucket.distance(record.bucket)
    if record is None or distance is None:
        return []
    how = "predicted" if record.kind == "predicted" else how
    return [Found(record=record, layer=layer, how=how, distance=distance)]


def _first(found: Iterable[Found]) -> Found | None:
    def rank(one: Found) -> tuple[object, ...]:
        predicted, noisy, *rest = evidence_order(one.record)
        return (one.distance, predicted, noisy, _ORDER.index(one.layer), *rest)

    return min(found, key=rank, default=None)
