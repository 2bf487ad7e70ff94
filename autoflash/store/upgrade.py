"""Making a file ready to be written: creating it, or bringing it to the newest schema."""

import contextlib
import logging
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from autoflash.errors import StoreError
from autoflash.store import schema
from autoflash.store.mounts import network_filesystem
from autoflash.store.network_lock import network_lock

if TYPE_CHECKING:
    from sqlalchemy import Connection

logger = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 30
_MIGRATIONS = Path(__file__).parent / "migrations"
# To be held around ``run_migrations``: Alembic's context is a global of the process.
one_migration = threading.Lock()


def prepare_for_writing(path: Path) -> None:
    """Make ``path`` a store of the newest schema. Raises StoreError.

    Alembic and the lock are only needed when there is something to do.
    """
    across = network_filesystem(path) is not None
    # Across a network nothing is looked at without the lock: another may be writing it.
    if not across and _is_ready(path):
        return
    with _locked(path, across=across):
        if not schema.exists(path):
            _create(path)
            return
        if across:
            _leave_wal(path)
        # Another process may have done it while we waited.
        version = _writable_version(path)
        if version != schema.SCHEMA_VERSIONS[-1]:
            _upgrade(path, version)


def _is_ready(path: Path) -> bool:
    return schema.exists(path) and _writable_version(path) == schema.SCHEMA_VERSIONS[-1]


def _writable_version(path: Path) -> str | None:
    try:
        version = schema.read_version(path, "mode=ro", schema.WRITE_TIMEOUT_S)
    except schema.DATABASE_ERRORS as error:
        raise schema.unreadable(path, error) from error
    if version is not None and version not in schema.SCHEMA_VERSIONS:
        raise StoreError(
            f"{path}: has schema {version}, newer than our {schema.SCHEMA_VERSIONS[-1]}: "
            "upgrade autoflash, or open it with read_only=True"
        )
    if not os.access(path, os.W_OK):
        raise StoreError(f"{path}: may not be written; open it with read_only=True")
    return version


@contextlib.contextmanager
def _locked(path: Path, *, across: bool) -> Iterator[None]:
    import filelock

    lock = path.with_name(path.name + ".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        held = (
            network_lock(path, LOCK_TIMEOUT_S)
            if across
            else filelock.FileLock(lock, timeout=LOCK_TIMEOUT_S)
        )
        with one_migration, held:
            yield
    except filelock.Timeout as error:
        raise StoreError(
            f"{path}: another process held {lock.name} for {LOCK_TIMEOUT_S} s; try again"
        ) from error
    except OSError as error:
        raise StoreError(f"{path}: can't be created or upgraded: {error}") from error


def _create(path: Path) -> None:
    """Under the lock: build the database beside its place, so that no one sees half of it."""
    draft = _fresh_draft(path)
    _migrate(draft)
    try:
        # The journal's mode lasts, so that no two processes have to race for the switch later.
        _connect(draft).close()
    except sqlite3.Error as error:
        raise StoreError(f"{path}: can't be created: {error}; {schema.next_step(error)}") from error
    # What belonged to a deleted store would be replayed into the new one.
    for suffix in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    draft.replace(path)


def _fresh_draft(path: Path) -> Path:
    """Where to build what shall appear at ``path`` at once; rid of what a killed process left."""
    draft = path.with_name(path.name + ".new")
    for suffix in ("", "-wal", "-shm", "-journal"):
        path.with_name(draft.name + suffix).unlink(missing_ok=True)
    return draft


def _leave_wal(path: Path) -> None:
    """Bring a database that was moved onto a network from the journal of a local one to the other,
    in a local folder: SQLite needs its own locks for it."""
    # File format versions: SQLite, "Database File Format", 1.3.3.
    with path.open("rb") as file:
        if file.read(20)[18:] != b"\2\2":
            return
    draft = _fresh_draft(path)
    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "copy"
            shutil.copyfile(path, copy)
            wal = path.with_name(path.name + "-wal")
            if wal.exists():
                shutil.copyfile(wal, copy.with_name("copy-wal"))
            with contextlib.closing(sqlite3.connect(copy)) as connection:
                connection.execute("PRAGMA journal_mode=DELETE").close()
            shutil.copyfile(copy, draft)
    except sqlite3.Error as error:
        raise schema.unreadable(path, error) from error
    draft.replace(path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def _upgrade(path: Path, version: str | None) -> None:
    if version is None:
        _migrate(path)
        return
    backup = path.with_name(f"{path.name}.backup-{version}")
    count = 1
    while backup.exists():
        count += 1
        backup = path.with_name(f"{path.name}.backup-{version}.{count}")
    draft = _fresh_draft(path)
    try:
        # Not a file copy: the newest rows may still be in the WAL.
        with (
            contextlib.closing(sqlite3.connect(schema.uri(path, "mode=ro"), uri=True)) as source,
            contextlib.closing(_connect(draft)) as destination,
        ):
            source.backup(destination)
    except sqlite3.Error as error:
        draft.unlink(missing_ok=True)
        raise StoreError(f"{path}: can't be backed up to {backup.name}: {error}") from error
    draft.replace(backup)
    logger.info("%s: upgrading from schema %s; a backup is in %s", path, version, backup.name)
    _migrate(path)


def _migrate(path: Path) -> None:
    """Bring the database at ``path`` to the newest schema, all of it or nothing."""
    import alembic.util
    import sqlalchemy

    engine = sqlalchemy.create_engine(
        "sqlite://",
        creator=lambda: _connect(path),
        poolclass=sqlalchemy.NullPool,
    )

    # By itself sqlite3 begins no transaction for DDL, and a half-done upgrade would stay.
    @sqlalchemy.event.listens_for(engine, "begin")
    def _begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    try:
        with engine.begin() as connection:
            run_migrations(connection)
    except (sqlalchemy.exc.SQLAlchemyError, alembic.util.CommandError) as error:
        raise StoreError(
            f"{path}: can't be brought to schema {schema.SCHEMA_VERSIONS[-1]} and was left as it "
            f"was: {schema.cause_of(error)}; {schema.next_step(error)}"
        ) from error


def _connect(path: Path) -> sqlite3.Connection:
    """For writing; creates the file. Begins no transaction by itself."""
    connection = sqlite3.connect(
        schema.uri(path, "mode=rwc"), uri=True, timeout=LOCK_TIMEOUT_S, isolation_level=None
    )
    for pragma in schema.journal_pragmas(path):
        connection.execute(f"PRAGMA {pragma}").close()
    return connection


def run_migrations(connection: "Connection") -> None:
    """Bring the database to the newest schema, in the transaction that ``connection`` is in.

    The caller sees to it that no other process, and no other thread of this one, does the same.
    """
    import alembic.command
    import alembic.config

    config = alembic.config.Config()
    config.set_main_option("script_location", str(_MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    alembic.command.upgrade(config, schema.SCHEMA_VERSIONS[-1])
