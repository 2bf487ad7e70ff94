"""What serving looks records up in: the user's store, the site's, then the records that ship."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from autoflash.errors import StoreError
from autoflash.problem import Bucket
from autoflash.settings import DatabaseUrl, Place, Settings, settings
from autoflash.store.answer import Answer
from autoflash.store.evidence import Kernels, evidence_order
from autoflash.store.forks import gate
from autoflash.store.mounts import network_filesystem
from autoflash.store.record import TuningRecord
from autoflash.store.shipped import ShippedRecords, shipped_folder
from autoflash.store.untrusted import exposure
from autoflash.target import Target

logger = logging.getLogger(__name__)

# Of records that are equally good the first layer's serves.
LAYERS = ("user", "site", "shipped")


class Source(Protocol):
    """A layer."""

    def answer(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Answer:
        """What it has, by records of ``kernels`` alone if given. May raise StoreError."""

    def losses(self, record: TuningRecord) -> list[float]:
        """See ``AnyStore.losses``. May raise StoreError."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A record, and how it was found.

    ``layer`` is one of LAYERS. ``how`` is 'exact'; 'neighbour' (of another bucket, or of this
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
    be read is skipped, with one warning; of one across a network the last answers stand. A file may
    appear while the process runs.
    """

    def __init__(self, snapshot: Settings | None = None, *, shipped: Path | None = None) -> None:
        """By default of the settings as they are now (which may raise InvalidInputError).

        ``shipped`` is another folder than the package's. Keep a Layers: it reads a file only once.
        """
        snapshot = snapshot or settings()
        self._places = snapshot.stores()
        self._sources: dict[str, Source] = {}
        if snapshot.use_shipped_records:
            self._sources["shipped"] = ShippedRecords(shipped or shipped_folder())
        self._warned: set[str] = set()

    def lookup(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Found | None:
        """The best known record for ``bucket`` on ``target``, or None; of ``kernels``, if given.

        An exact measured one, else the nearest measured one of the target, else a measured one of
        this bucket on another target of the arch, else an exact predicted one. A clean record goes
        before a noisy one, then a layer before the next, then the newest, then the fastest.
        """
        exact, neighbours, siblings = [], [], []
        for layer, answer in self._answers(bucket, target, kernels):
            exact += _found(answer.best, layer, "exact", bucket)
            neighbours += _found(answer.neighbour, layer, "neighbour", bucket)
            siblings += _found(answer.sibling, layer, "neighbour", bucket)
        measured = (found for found in exact if found.record.kind == "measured")
        return _first(measured) or _first(neighbours) or _first(siblings) or _first(exact)

    def losses(self, record: TuningRecord) -> list[float]:
        """``AnyStore.losses`` by the trials of every layer; none of what can't be read."""
        found: list[float] = []
        for layer in LAYERS:
            try:
                source = self._source(layer)
                found += source.losses(record) if source else []
            except StoreError as error:
                self._warn(layer, error)
        return sorted(found)

    def _answers(
        self, bucket: Bucket, target: Target, kernels: Kernels
    ) -> Iterator[tuple[str, Answer]]:
        for layer in LAYERS:
            try:
                source = self._source(layer)
                if source is not None:
                    yield layer, source.answer(bucket, target, kernels)
            except StoreError as error:
                self._warn(layer, error)

    def _source(self, layer: str) -> Source | None:
        """What answers for ``layer``; None if there is nothing."""
        place = self._places.get(layer)
        if layer not in self._sources and place is not None:
            # A child that is forked while this imports would wait for the import for ever.
            with gate.question():
                opened = self._open(layer, place)
            if opened is None:
                return None
            self._sources[layer] = opened
        return self._sources.get(layer)

    def _open(self, layer: str, place: Place) -> Source | None:
        if isinstance(place, DatabaseUrl) or network_filesystem(place):
            from autoflash.store.remote import RemoteRecords

            return RemoteRecords(place, partial(self._warn, layer))
        if not is_there(layer, place):
            return None
        from autoflash.store.store import Store

        opened = Store(place, read_only=True)
        for warning in exposure(place):
            logger.warning("%s", warning)
        return opened

    def _warn(self, layer: str, error: StoreError) -> None:
        if layer not in self._warned:
            self._warned.add(layer)
            logger.warning("going on without the %s records: %s", layer, error)


class SureLayers(Layers):
    """Layers for what must not be decided without one of them: they wait for a server, and what
    can't be read is a StoreError."""

    def _open(self, layer: str, place: Place) -> Source | None:
        if not isinstance(place, DatabaseUrl) and not is_there(layer, place):
            return None
        from autoflash.store.opening import open_store

        return open_store(place, read_only=True)

    def _warn(self, layer: str, error: StoreError) -> None:
        raise StoreError(f"the {layer} records: {error}") from error


def is_there(layer: str, path: Path) -> bool:
    """A file that isn't there is no reason to load SQLAlchemy; a site's that isn't is told of."""
    try:
        there = path.exists()
    except OSError as error:
        raise StoreError(f"{path}: can't be looked at: {error}") from error
    if not there and layer == "site":
        raise StoreError(f"{path}: is not there; AUTOFLASH_SITE_DB names it")
    return there


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
        return (one.distance, predicted, noisy, LAYERS.index(one.layer), *rest)

    return min(found, key=rank, default=None)
