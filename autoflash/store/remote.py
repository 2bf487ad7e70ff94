"""RemoteRecords: what serving knows of a database across a network, without ever waiting long."""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from autoflash.errors import StoreError
from autoflash.problem import Bucket
from autoflash.settings import DatabaseUrl, Place
from autoflash.store.answer import Answer
from autoflash.store.evidence import Kernels
from autoflash.store.forks import gate
from autoflash.store.record import TuningRecord
from autoflash.target import Target

if TYPE_CHECKING:
    from autoflash.store.base import AnyStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The most that a lookup waits. What comes later is remembered, for the next lookup.
PATIENCE_S = 0.09
# How long one that was late or failed isn't asked again.
REST_S = 30.0
# A thread that nobody waits for any more ends after about this.
_STATEMENT_S = 2.0


class RemoteRecords:
    """A layer's records on a server or in a file of a network (a ``layers.Source``), and a memory
    of its answers.

    Questions run in threads of their own: neither a name that isn't resolved nor a host that
    swallows packets holds a caller up. When it is away the last answers stand; ``warn`` hears why,
    each time that it is noticed.
    """

    def __init__(self, where: Place, warn: Callable[[StoreError], None]) -> None:
        """Connects to nothing yet, and looks at no file."""
        self.where = where
        self._warn = warn
        self._store: AnyStore | None = None
        self._known: dict[object, Answer] = {}
        self._rest_until = 0.0

    def answer(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Answer:
        """The database's, or else its last one; nothing if there is no such file."""
        key = (bucket, target.identity, kernels)

        def ask(store: "AnyStore") -> Answer:
            # A late answer is remembered too.
            self._known[key] = answer = store.answer(bucket, target, kernels)
            return answer

        return self._ask(ask) or self._known.get(key, Answer())

    def losses(self, record: TuningRecord) -> list[float]:
        """As ``AnyStore.losses``; none if the database doesn't say so in time."""
        return self._ask(lambda store: store.losses(record)) or []

    def _ask(self, question: "Callable[[AnyStore], T]") -> T | None:
        """The answer; None if there is none in time, or if none can be expected."""
        if time.monotonic() < self._rest_until:
            return None
        future: Future[T | None] = Future()

        def work() -> None:
            try:
                store = self._opened(opener)
                future.set_result(None if store is None else question(store))
                self._rest_until = 0.0
            except Exception as error:  # noqa: BLE001 - handed to who waits
                future.set_exception(error)

        try:
            # What must be loaded takes longer than an answer may, and must not be cut by a fork.
            with gate.question():
                opener = self._load()
            threading.Thread(target=work, name="autoflash-store", daemon=True).start()
            return future.result(PATIENCE_S)
        except StoreError as error:
            self._give_up(error)
        # Not only the builtin one in Python 3.10.
        except concurrent.futures.TimeoutError:
            late = f"{self.where}: no answer within {PATIENCE_S * 1000:.0f} ms"
            self._give_up(StoreError(late))
        except Exception as error:  # noqa: BLE001 - serving never raises for a database
            self._give_up(StoreError(f"{self.where}: can't be asked ({type(error).__name__})"))
        return None

    def _load(self) -> "Callable[[], AnyStore | None]":
        """What opens the database; it gives None if there is no such file."""
        where = self.where
        if isinstance(where, DatabaseUrl):
            from autoflash.store import postgres

            postgres.load_driver()
            url = where
            return lambda: postgres.PostgresStore(url, read_only=True, timeout_s=_STATEMENT_S)
        from autoflash.store import store

        path = where
        return lambda: store.Store(path, read_only=True) if path.exists() else None

    def _opened(self, opener: "Callable[[], AnyStore | None]") -> "AnyStore | None":
        # Two threads may both open it: that costs a connection, a lock could outlive a fork.
        if self._store is None:
            self._store = opener()
        return self._store

    def _give_up(self, error: StoreError) -> None:
        self._rest_until = time.monotonic() + REST_S
        self._warn(error)
