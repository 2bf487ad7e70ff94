"""Looking at the database file: whether it is a store, of which schema, and how it can be read.

Every file is looked at read-only first, so one that isn't ours, is broken or is of a newer version
stays as it is, byte for byte.
"""

import contextlib
import logging
import os
import sqlite3
from pathlib import Path

from autoflash.errors import StoreError
from autoflash.store.mounts import network_filesystem

logger = logging.getLogger(__name__)

# Alembic's revisions, oldest first. The last one is what this version writes.
SCHEMA_VERSIONS = ("0001", "0002", "0003", "0004")
VERSION_TABLE = "autoflash_schema"
# What a revision added, by table and column, and what it holds in rows from before: a reader of an
# older file takes that (``models.columns_of``).
_FP8 = {
    "kv_dtype": ("0004", ""),
    "out_dtype": ("0004", ""),
    "scales": ("0004", ""),
    "v_layout": ("0004", "rows"),
}
ADDED: dict[str, dict[str, tuple[str, str]]] = {
    "records": {"digest": ("0003", ""), **_FP8},
    "trials": {"came_from": ("0002", ""), "digest": ("0003", ""), **_FP8},
}
# What sqlite3 raises. A damaged file can also spoil the very message of an error.
DATABASE_ERRORS = (sqlite3.Error, UnicodeDecodeError)
_OTHER_SCHEMA = "its schema isn't this version's: upgrade autoflash"
_DAMAGED = (
    "the file is damaged: move it away, with any -wal beside it, and restore a backup or start anew"
)
_NEXT_STEPS = {
    "locked": "another process is writing: try again",
    "readonly": "open it with read_only=True, or make the file and its folder writable",
    "unable to open": "check that the file is there and that you may read it",
    "full": "make room on the disk",
    "no such": _OTHER_SCHEMA,
    "no column": _OTHER_SCHEMA,
    "malformed": _DAMAGED,
    "codec": _DAMAGED,
    "not a database": "the file is something else: give another path, or move it away",
}
# Serving must not stand still because a tuner writes; a tuner can wait. A lookup that opens the
# file first waits twice, and once for a fork: 0.1 s in all.
READ_TIMEOUT_S = 0.025
WRITE_TIMEOUT_S = 5.0


# Across a network SQLite's locks may hang: who only reads takes none at all, and who writes takes
# ``network_lock`` instead.
_ACROSS_A_NETWORK = {
    "mode=ro": "immutable=1",
    "mode=rw": "mode=rw&nolock=1",
    "mode=rwc": "mode=rwc&nolock=1",
}


def uri(path: Path, mode: str) -> str:
    """``path`` as an SQLite URI; ``mode`` is 'mode=ro', 'mode=rw', 'mode=rwc' or 'immutable=1'."""
    if network_filesystem(path):
        mode = _ACROSS_A_NETWORK.get(mode, mode)
    return f"{path.as_uri()}?{mode}"


def journal_pragmas(path: Path) -> tuple[str, ...]:
    """What a connection that writes to ``path`` must say first. Processes of several hosts have no
    memory to share, which a WAL needs."""
    if network_filesystem(path):
        return ("journal_mode=DELETE", "synchronous=FULL")
    return ("journal_mode=WAL", "synchronous=NORMAL")


def connect(database_uri: str, timeout_s: float) -> sqlite3.Connection:
    """A connection that waits up to ``timeout_s`` for a lock."""
    connection = sqlite3.connect(database_uri, uri=True, timeout=timeout_s)
    # A stranger's text may not be UTF-8: that must spoil its row, not the whole read.
    connection.text_factory = _decode
    # Nor may functions that its schema names run.
    connection.execute("PRAGMA trusted_schema=OFF").close()
    return connection


def open_for_reading(path: Path) -> tuple[str, str]:
    """The URI to read ``path`` by, and its schema version. Raises StoreError."""
    if not exists(path):
        raise StoreError(f"{path}: no such store; it is created by tuning something")
    try:
        version, mode = read_version(path, "mode=ro", READ_TIMEOUT_S), "mode=ro"
    except sqlite3.OperationalError as error:
        # A WAL database wants a file beside it even to be read. Where none can be made nobody
        # writes either, at least not by this path.
        if "locked" in str(error) or os.access(path.parent, os.W_OK):
            raise unreadable(path, error) from error
        version, mode = _read_immutable(path), "immutable=1"
    except DATABASE_ERRORS as error:
        raise unreadable(path, error) from error
    if version is None:
        raise StoreError(f"{path}: holds no tables; open it for writing once to create them")
    if version not in SCHEMA_VERSIONS:
        logger.warning(
            "%s has schema %s, newer than %s: reading what can be read; upgrade autoflash",
            *(path, version, SCHEMA_VERSIONS[-1]),
        )
    return uri(path, mode), version


def exists(path: Path) -> bool:
    """Whether there is a file that may be a store. Raises StoreError if there is something else."""
    try:
        size = path.stat().st_size
        is_file = path.is_file()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreError(f"{path}: can't be looked at: {error.strerror}") from error
    if not is_file:
        raise StoreError(f"{path}: is not a file; give the path of the database file itself")
    if size == 0:
        # SQLite would take it for a new database; it is what a full disk or a failed copy leaves.
        raise StoreError(f"{path}: is empty (0 bytes), so not a store; move it away to start anew")
    return True


def read_version(path: Path, mode: str, timeout_s: float) -> str | None:
    """The schema version; None for a database without any table. Raises DATABASE_ERRORS."""
    with contextlib.closing(connect(uri(path, mode), timeout_s)) as connection:
        # One transaction, so that a lock is waited for once.
        connection.execute("BEGIN").close()
        found = dict(connection.execute("SELECT name, type FROM sqlite_master"))
        if not found:
            return None
        if odd := sorted(set(found.values()) - {"table", "index"}):
            # They run when a table is read or written, for as long as they like.
            raise StoreError(f"{path}: has a {odd[0]}, which no store has: it can't be trusted")
        if VERSION_TABLE not in found:
            raise StoreError(
                f"{path}: a database of something else (it has no table {VERSION_TABLE}); "
                "give another path"
            )
        rows = connection.execute(f"SELECT version_num FROM {VERSION_TABLE}").fetchall()
    return str(rows[0][0])[:40] if rows else "unknown"


def _read_immutable(path: Path) -> str | None:
    try:
        version = read_version(path, "immutable=1", READ_TIMEOUT_S)
    except DATABASE_ERRORS as error:
        raise unreadable(path, error) from error
    wal = path.with_name(path.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        logger.warning("%s: the newest rows are in %s, which can't be read here", path, wal.name)
    return version


def _decode(text: bytes) -> str:
    return text.decode("utf-8", "replace")


def unreadable(path: Path, error: Exception) -> StoreError:
    """What to raise when looking at ``path`` ended in ``error``."""
    return StoreError(f"{path}: can't be read as a store: {error}; {next_step(error)}")


def cause_of(error: Exception) -> Exception:
    """The database's own error, without SQLAlchemy's SQL and links."""
    cause = getattr(error, "orig", None)
    return cause if isinstance(cause, Exception) else error


def next_step(error: Exception) -> str:
    """What to do about an SQLite error, by its words: Python 3.10 gives no code."""
    text = str(error)
    for words, step in _NEXT_STEPS.items():
        if words in text:
            return step
    return "check the file and its folder"
