"""RemoteRecords: what serving knows of a database on a server, without ever waiting long for it."""

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from autoflash.errors import StoreError
from autoflash.problem import Bucket
from autoflash.settings import DatabaseUrl
from autoflash.store.answer import Answer
from autoflash.store.evidence import Kernels
from autoflash.store.forks import gate
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
        self._known: dict[object, Answer] = {}
        self._rest_until = 0.0

    def answer(self, bucket: Bucket, target: Target, kernels: Kernels = None) -> Answer:
        """The server's, or else its last one."""
        key = (bucket, target.identity, kernels)

        def ask(store: "PostgresStore") -> Answer:
            # A late answer is remembered too.
            self._known[key] = answer = store.answer(bucket, target, kernels)
            return answer

        return self._ask(ask) or self._known.get(key, Answer())

    def losses(self, record: TuningRecord) -> list[float]:
        """As ``Store.losses``; none if the server doesn't say so in time."""
        return self._ask(lambda store: store.losses(record)) or []

    def _ask(self, question: "Callable[[PostgresStore], T]") -> T | None:
        """The answer; None if there is none in time, or if none can be expected."""
        if time.monotonic() < self._rest_until:
            return None
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(question(self._opened(postgres.PostgresStore)))
                self._rest_until = 0.0
            except Exception as error:  # noqa: BLE001 - handed to who waits
                future.set_exception(error)

        try:
            # What must be loaded takes longer than a server may, and must not be cut by a fork.
            with gate.question():
                from autoflash.store import postgres

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
