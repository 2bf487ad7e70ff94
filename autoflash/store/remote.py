"""RemoteRecords: what serving knows of a database on a server, without ever waiting long for it."""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from autoflash.errors import StoreError
from autoflash.problem import Bucket
from autoflash.settings import DatabaseUrl
from autoflash.store.evidence import Kernels
from autoflash.store.layers import MAX_DISTANCE
from autoflash.store.record import TuningRecord
from autoflash.target import Target

if TYPE_CHECKING:
    from autoflash.store.postgres import PostgresStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The most that a lookup waits. What comes later is remembered, for the next lookup.
PATIENCE_S = 0.09
# How long a server that was late or failed isn't asked again.
REST_S = 30.0
# A thread that nobody waits for any more ends after about this.
_STATEMENT_S = 2.0


@dataclass(frozen=True)
class _Answers:
    """All that a lookup may want, so that it waits once."""

    best: TuningRecord | None = None
    neighbours: tuple[TuningRecord, ...] = ()
    siblings: tuple[TuningRecord, ...] = ()


class RemoteRecords:
    """A layer's records on a server (a ``layers.Source``), and a memory of its answers.

    Questions run in threads of their own: neither a name that isn't resolved nor a host that
    swallows packets holds a caller up. When the server is away the last answers stand; ``warn``
    hears why, each time that it is noticed.
    """

    def __init__(self, url: DatabaseUrl, warn: Callable[[StoreError], None]) -> None:
        """Connects to nothing yet."""
        self.url = url
        self._warn = warn
        self._store: PostgresStore | None = None
        self._known: dict[object, _Answers] = {}
        self._rest_until = 0.0

    def best(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> TuningRecord | None:
        """As ``Store.best``; asks the server, and for what else a lookup may want."""
        key = (bucket, target.identity, kernels)
        answers = self._ask(lambda store: self._answer(store, bucket, target, kernels))
        return (answers or self._known.get(key, _Answers())).best

    def neighbours(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """As ``Store.neighbours``, by what the last ``best`` has learned."""
        return list(self._recall(bucket, target, kernels).neighbours)

    def siblings(
        self, bucket: Bucket, target: Target, kernels: Kernels = None
    ) -> list[TuningRecord]:
        """As ``Store.siblings``, by what the last ``best`` has learned."""
        return list(self._recall(bucket, target, kernels).siblings)

    def losses(self, record: TuningRecord) -> list[float]:
        """As ``Store.losses``; none if the server doesn't say so in time."""
        return self._ask(lambda store: store.losses(record)) or []

    def _recall(self, bucket: Bucket, target: Target, kernels: Kernels) -> _Answers:
        key = (bucket, target.identity, kernels)
        if key not in self._known:
            self.best(bucket, target, kernels)
        return self._known.get(key, _Answers())

    def _answer(
        self, store: "PostgresStore", bucket: Bucket, target: Target, kernels: Kernels
    ) -> _Answers:
        best = store.best(bucket, target, kernels)
        near: list[TuningRecord] = []
        siblings: list[TuningRecord] = []
        # No lookup goes past an exact measured record, nor past a neighbour that carries over.
        if best is None or best.kind != "measured":
            near = store.neighbours(bucket, target, kernels)
            distance = bucket.distance(near[0].bucket) if near else None
            if distance is None or distance > MAX_DISTANCE:
                siblings = store.siblings(bucket, target, kernels)
        answers = _Answers(best, tuple(near), tuple(siblings))
        self._known[bucket, target.identity, kernels] = answers
        return answers

    def _ask(self, question: "Callable[[PostgresStore], T]") -> T | None:
        """The answer; None if there is none in time, or if none can be expected."""
        if time.monotonic() < self._rest_until:
            return None
        # What must be loaded takes longer than a server may.
        from autoflash.store import postgres

        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(question(self._opened(postgres.PostgresStore)))
                self._rest_until = 0.0
            except Exception as error:  # noqa: BLE001 - handed to who waits
                future.set_exception(error)

        try:
            postgres.load_driver()
            threading.Thread(target=work, name="autoflash-store", daemon=True).start()
            return future.result(PATIENCE_S)
        except StoreError as error:
            self._give_up(error)
        # Not only the builtin one in Python 3.10.
        except concurrent.futures.TimeoutError:
            late = f"{self.url}: no answer within {PATIENCE_S * 1000:.0f} ms"
            self._give_up(StoreError(late))
        except Exception as error:  # noqa: BLE001 - serving never raises for a database
            self._give_up(StoreError(f"{self.url}: can't be asked ({type(error).__name__})"))
        return None

    def _opened(self, opener: "type[PostgresStore]") -> "PostgresStore":
        # Two threads may both open it: that costs a connection, a lock could outlive a fork.
        if self._store is None:
            self._store = opener(self.url, read_only=True, timeout_s=_STATEMENT_S)
        return self._store

    def _give_up(self, error: StoreError) -> None:
        self._rest_until = time.monotonic() + REST_S
        self._warn(error)
