"""A lock for files across a network that can't hang: a file beside them which only one can create.

The system's own locks wait for a lock service of the server, for ever if that is away. To create a
file exclusively is atomic on NFS too, since its version 3.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from autoflash.errors import StoreError


@contextlib.contextmanager
def network_lock(path: Path, timeout_s: float) -> Iterator[None]:
    """Held while the block runs: of those who take it one at a time uses the file ``path``.

    Raises StoreError if others hold it for ``timeout_s``, or if it can't be made.
    """
    import filelock

    lock = path.with_name(path.name + ".netlock")
    held = contextlib.ExitStack()
    try:
        held.enter_context(filelock.SoftFileLock(lock, timeout=timeout_s))
    except filelock.Timeout as error:
        raise StoreError(
            f"{path}: locked by {lock.name} for {timeout_s:.0f} s: another process is writing; if "
            f"none is (one was killed), remove {lock}"
        ) from error
    except OSError as error:
        raise StoreError(f"{path}: can't be locked: {error}") from error
    with held:
        yield
