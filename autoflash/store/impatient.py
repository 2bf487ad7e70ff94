"""A connection to PostgreSQL that gives up a server which says nothing."""

import time
from collections.abc import Generator
from typing import Any, ClassVar, TypeVar

import psycopg

T = TypeVar("T")

# How much longer than the server's own limit: its words say more.
_GRACE_S = 2.0


class ImpatientConnection(psycopg.Connection[Any]):
    """Ends an operation that takes much longer than the server may, and the connection with it.

    A server that is cut off or stopped enforces no statement_timeout, and as long as its host
    acknowledges packets, or none is sent, no limit of TCP helps either.
    """

    limit_s: ClassVar[float] = 30.0

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **kwargs: Any) -> T:
        """As psycopg's, but not for ever. (That of psycopg 3.3 has a timeout that nobody sets.)"""
        return super().wait(self._limited(gen), *args, **kwargs)

    def _limited(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        end = time.monotonic() + self.limit_s + _GRACE_S
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                # psycopg comes by at each interval, with nothing if nothing came.
                if not ready and time.monotonic() > end:
                    self.close()
                    raise psycopg.OperationalError(
                        f"connection given up: no answer for {self.limit_s + _GRACE_S:.0f} s"
                    )
                wanted = gen.send(ready)
        except StopIteration as done:
            value: T = done.value
            return value


def connection_class(limit_s: float) -> type[ImpatientConnection]:
    """One whose operations take ``limit_s`` at most, and a little more."""
    return type("ImpatientConnection", (ImpatientConnection,), {"limit_s": limit_s})
