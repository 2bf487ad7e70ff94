"""Python's collector of cycles, which bulk work has no use for."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collector() -> Iterator[None]:
    """Looks for no cycles meanwhile: records make none, and to look at all of them again and again
    takes a fifth of an export. For a command, not within a serving process."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
