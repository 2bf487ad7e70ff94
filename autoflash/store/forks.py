"""Forks and questions to SQLite: neither happens during the other.

SQLite has locks of its own, for all of a process. A child that is forked while another thread holds
one inherits it locked, and no thread that would ever unlock it: its next question hangs for ever.
The same goes for the locks of modules that are being imported, and SQLAlchemy's.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

from autoflash.errors import StoreError

# The most that a fork waits for questions, or a question for a fork, before it goes on regardless.
PATIENCE_S = 0.05


class Gate:
    """Lets questions in while no thread forks, and a thread fork while no question is inside.

    A child that was forked all the same, since a question took long, is told so when it asks.
    """

    def __init__(self) -> None:
        self._renew(0)
        self._cut_short = False
        os.register_at_fork(
            before=self._before, after_in_parent=self._in_parent, after_in_child=self._in_child
        )

    @contextlib.contextmanager
    def question(self) -> Iterator[None]:
        """For as long as SQLite is asked. Questions may contain others. Raises StoreError in a
        child that was forked in the middle of one."""
        if self._cut_short:
            raise StoreError(
                f"process {os.getpid()} was forked while another thread was asking a store, which "
                "therefore can't be asked here: fork before that, or spawn"
            )
        with self._changed:
            # A fork that waits for the outer question would wait for the inner one for ever.
            if self._depth == 0:
                self._changed.wait_for(lambda: self._forks == 0, PATIENCE_S)
            self._inside += 1
            self._own.depth = self._depth + 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._own.depth = self._depth - 1
                self._changed.notify_all()

    @property
    def _depth(self) -> int:
        """Questions that this thread is inside of."""
        return int(getattr(self._own, "depth", 0))

    def _renew(self, depth: int) -> None:
        # Reentrant: a signal's handler may fork while its own thread holds it.
        self._changed = threading.Condition(threading.RLock())
        self._own = threading.local()
        self._own.depth = depth
        self._inside = depth
        self._forks = 0

    def _before(self) -> None:
        with self._changed:
            self._forks += 1
            # What this thread itself is inside of waits for the fork, not the fork for it.
            self._changed.wait_for(lambda: self._inside <= self._depth, PATIENCE_S)

    def _in_parent(self) -> None:
        with self._changed:
            self._forks -= 1
            self._changed.notify_all()

    def _in_child(self) -> None:
        # Another thread may have held the lock: it is not asked for, but replaced.
        depth = self._depth
        self._cut_short = self._cut_short or self._inside > depth
        self._renew(depth)


gate = Gate()
