"""PostgresStore: the database of records and trials on a PostgreSQL server."""

import importlib
import os
import urllib.parse
from typing import Any

from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session

from autoflash.errors import StoreError
from autoflash.settings import DatabaseUrl
from autoflash.store import schema
from autoflash.store.base import AnyStore, logger
from autoflash.store.upgrade import one_migration, run_migrations

# What a statement may take: listing a whole database is the longest that is asked.
TIMEOUT_S = 30.0
# The server ends connections that are kept for a next question which doesn't come.
_IDLE_S = 60
# Any numbers, as long as every version of autoflash has the same.
_UPGRADE_LOCK = 0x6175746F666C61
_EXCHANGE_LOCK = _UPGRADE_LOCK + 1
_LOCK = text("SELECT pg_advisory_xact_lock(:key)")
_LOOK = text(
    "SELECT relname, relkind FROM pg_catalog.pg_class WHERE oid IN "
    f"(to_regclass('records'), to_regclass('trials'), to_regclass('{schema.VERSION_TABLE}'))"
)
_NEXT_STEPS = {
    "permission denied": "grant this user the schema and the tables",
    "password": "check the user and the password in AUTOFLASH_DB, or ~/.pgpass",
    "pg_hba": "the server's pg_hba.conf must let this user in from this host",
    'database "': "create the database, or correct AUTOFLASH_DB",
    "timeout": "the server is busy, or another process holds a lock: try again",
    "read-only": "open it with read_only=True, or ask the primary server",
    "does not exist": "its schema isn't this version's: upgrade autoflash",
    "onnection": "check that the server runs and can be reached",
    "disk": "make room on the server's disk",
}


def load_driver() -> None:
    """Raises StoreError where psycopg isn't installed, or finds no libpq."""
    try:
        importlib.import_module("psycopg")
        importlib.import_module("sqlalchemy.dialects.postgresql.psycopg")
    except ImportError as error:
        raise StoreError(
            f"PostgreSQL needs psycopg: pip install 'autoflash[postgres]' ({error})"
        ) from error


class PostgresStore(AnyStore):
    """A store in one PostgreSQL database, in the first schema of the user's search path.

    A process keeps one connection open for a minute after its last question, and opens more while
    several threads ask; a forked child opens its own.
    """

    _failures = (*AnyStore._failures, UnicodeError)

    def __init__(
        self, url: DatabaseUrl, *, read_only: bool = False, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Look at the database; unless ``read_only``, create or upgrade our tables first.

        Raises StoreError where the server can't be reached, psycopg isn't installed, or the tables
        are missing (read-only), something else, or (for writing) of a newer autoflash.
        """
        super().__init__(str(url), read_only=read_only)
        self.url = url
        self._timeout_s = timeout_s
        self._engines: dict[int, Engine] = {}
        with self._session("look at it") as session:
            version = self._readable(session) if read_only else self._writable(session)
        if version is None or (not read_only and version != schema.SCHEMA_VERSIONS[-1]):
            self._upgrade()
            version = schema.SCHEMA_VERSIONS[-1]
        self.schema_version = version

    @property
    def _engine(self) -> Engine:
        # A child must neither speak on its parent's connections nor wait for a lock that one of
        # the parent's threads held. The parent's engine is kept, so that it closes nothing either.
        pid = os.getpid()
        engine = self._engines.get(pid)
        return engine or self._engines.setdefault(pid, self._create_engine())

    def _create_engine(self) -> Engine:
        load_driver()
        try:
            url = make_url(self.url.with_password)
            arguments = {k: v for k, v in self._arguments().items() if k not in url.query}
            engine = create_engine(
                url,
                connect_args=arguments,
                isolation_level="READ COMMITTED",
                pool_size=1,
                max_overflow=-1,
                pool_pre_ping=True,
                # Its type would be looked up in every new process, and is in no table of ours.
                use_native_hstore=False,
            )
        except (SQLAlchemyError, ValueError):
            # Their words may show a part of the URL.
            raise StoreError(f"{self.name}: the URL is not understood") from None
        event.listen(engine, "do_connect", self._connect)
        event.listen(engine, "connect", self._configure)
        return engine

    def _connect(self, _dialect: Any, _record: Any, words: Any, arguments: dict[str, Any]) -> Any:
        from autoflash.store.impatient import connection_class

        return connection_class(self._timeout_s).connect(*words, **arguments)

    def _arguments(self) -> dict[str, Any]:
        """libpq's, but for what the URL says itself: a server that went silent is given up."""
        seconds = max(2, round(min(self._timeout_s, 10.0)))
        return {
            "application_name": "autoflash",
            "client_encoding": "utf8",
            "connect_timeout": seconds,
            "tcp_user_timeout": seconds * 1000,
            "keepalives_idle": seconds,
            "keepalives_interval": seconds,
            "keepalives_count": 2,
            # A pooler between us may give each transaction another server process.
            "prepare_threshold": None,
        }

    def _configure(self, connection: Any, _: object) -> None:
        limit_ms = round(self._timeout_s * 1000)
        limits: dict[str, object] = {
            "statement_timeout": limit_ms,
            "lock_timeout": limit_ms,
            "idle_in_transaction_session_timeout": 2 * limit_ms,
            "default_transaction_read_only": "on" if self.read_only else "off",
        }
        if connection.info.server_version >= 140000:
            limits["idle_session_timeout"] = _IDLE_S * 1000
        # What is set in a transaction ends with it, if that is undone.
        connection.autocommit = True
        connection.execute("; ".join(f"SET {k} = {v}" for k, v in limits.items())).close()
        connection.autocommit = False

    def _readable(self, session: Session) -> str:
        version = self._version(session)
        if version is None:
            raise StoreError(f"{self.name}: holds no tables of ours; tuning something makes them")
        if version not in schema.SCHEMA_VERSIONS:
            logger.warning(
                "%s has schema %s, newer than %s: reading what can be read; upgrade autoflash",
                *(self.name, version, schema.SCHEMA_VERSIONS[-1]),
            )
        return version

    def _writable(self, session: Session) -> str | None:
        version = self._version(session)
        if version is not None and version not in schema.SCHEMA_VERSIONS:
            raise StoreError(
                f"{self.name}: has schema {version}, newer than our {schema.SCHEMA_VERSIONS[-1]}: "
                "upgrade autoflash, or open it with read_only=True"
            )
        return version

    def _version(self, session: Session) -> str | None:
        """The schema version; None for a database without any table of ours."""
        found = {row.relname: row.relkind for row in session.execute(_LOOK)}
        # psycopg gives the type "char" as bytes.
        kinds = {kind.decode() if isinstance(kind, bytes) else kind for kind in found.values()}
        if kinds - {"r", "p"}:
            # A view runs what its owner wrote, as us, whenever it is read.
            raise StoreError(f"{self.name}: has a view in place of a table: it can't be trusted")
        if not found:
            return None
        if schema.VERSION_TABLE not in found:
            raise StoreError(
                f"{self.name}: has tables of something else (none is {schema.VERSION_TABLE}); "
                "give another database, or a user with a schema of its own"
            )
        query = text(f"SELECT version_num FROM {schema.VERSION_TABLE}")
        return str(session.execute(query).scalar() or "unknown")[:40]

    def _upgrade(self) -> None:
        """One process at a time, all of it or nothing."""
        import alembic.util

        try:
            with one_migration, self._session("upgrade it") as session:
                session.execute(_LOCK, {"key": _UPGRADE_LOCK})
                # Another process may have done it while we waited.
                if self._writable(session) != schema.SCHEMA_VERSIONS[-1]:
                    run_migrations(session.connection())
        except alembic.util.CommandError as error:
            raise StoreError(f"{self.name}: could not upgrade it: {error}") from error

    def _exclude_others(self, session: Session) -> None:
        session.execute(_LOCK, {"key": _EXCHANGE_LOCK})

    def _explain(self, error: Exception) -> str:
        # libpq's first line says it; the others repeat it for each address of the host.
        said = " ".join(str(error).split())[:500]
        for secret in self._secrets():
            said = said.replace(secret, "***")
        step = next((s for words, s in _NEXT_STEPS.items() if words in said), None)
        return f"{said}; {step or 'look at the log of the server'}"

    def _secrets(self) -> set[str]:
        """What libpq might repeat of the URL, and nobody shall read."""
        parts = urllib.parse.urlsplit(self.url.with_password)
        password = parts.password or ""
        query = urllib.parse.parse_qsl(parts.query)
        hidden = {password, urllib.parse.unquote(password)}
        return (hidden | {value for name, value in query if "password" in name}) - {""}
