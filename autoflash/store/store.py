"""Store: the database of records and trials, in one SQLite file."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeVar

from sqlalchemy import Connection, Engine, NullPool, create_engine, event
from sqlalchemy.orm import Session

from autoflash.errors import StoreError
from autoflash.store import schema
from autoflash.store.base import AnyStore
from autoflash.store.forks import gate
from autoflash.store.mounts import network_filesystem
from autoflash.store.network_lock import network_lock
from autoflash.store.upgrade import prepare_for_writing

T = TypeVar("T")


class Store(AnyStore):
    """A store in one SQLite file.

    It owns no open connection: each method opens one, and closes it before it returns. On a network
    file system there is no WAL and no lock that could hang: readers see what is there, and who
    writes (or reads what it may write to) does so alone.
    """

    _failures = (*AnyStore._failures, *schema.DATABASE_ERRORS)

    def __init__(self, path: Path | str, *, read_only: bool = False) -> None:
        """Open ``path``; unless ``read_only``, create it or upgrade its schema first.

        Raises StoreError for a file that is missing (read-only), broken, something else, or (for
        writing) of a newer autoflash; such a file is left as it is.
        """
        self.path = Path(path).expanduser().absolute()
        super().__init__(str(self.path), read_only=read_only)
        self._across_a_network = network_filesystem(self.path) is not None
        self._pragmas: tuple[str, ...] = ("foreign_keys=ON",)
        # Until a stranger's text turns out not to be.
        self._all_is_utf8 = True
        if read_only:
            with gate.question():
                self._uri, self.schema_version = schema.open_for_reading(self.path)
        else:
            with gate.question():
                prepare_for_writing(self.path)
            self._pragmas += schema.journal_pragmas(self.path)
            # rw, not rwc: a file that goes away is an error, not an empty database.
            self._uri = schema.uri(self.path, "mode=rw")
            self.schema_version = schema.SCHEMA_VERSIONS[-1]
        self._connector = create_engine("sqlite://", creator=self._connect, poolclass=NullPool)
        event.listen(self._connector, "connect", self._configure)

    @property
    def _engine(self) -> Engine:
        return self._connector

    def _exclude_others(self, session: Session) -> None:
        # A transaction that reads first could not write once another has written.
        session.connection().exec_driver_sql("BEGIN IMMEDIATE")

    def _explain(self, error: Exception) -> str:
        return f"{error}; {schema.next_step(error)}"

    def _connect(self) -> sqlite3.Connection:
        # The timeout is SQLite's busy_timeout.
        timeout_s = schema.READ_TIMEOUT_S if self.read_only else schema.WRITE_TIMEOUT_S
        connection = schema.connect(self._uri, timeout_s)
        if self._all_is_utf8:
            connection.text_factory = str
        return connection

    @contextmanager
    def _session(self, action: str) -> Iterator[Session]:
        with gate.question(), self._alone(), super()._session(action) as session:
            yield session

    def _alone(self) -> AbstractContextManager[None]:
        """SQLite sees to it by itself, but not across a network."""
        if self.read_only or not self._across_a_network:
            return nullcontext()
        return network_lock(self.path, schema.WRITE_TIMEOUT_S)

    def _ask(self, question: Callable[[Connection], T], action: str) -> T:
        try:
            return super()._ask(question, action)
        except StoreError as error:
            if not self._all_is_utf8 or "decode" not in str(error):
                raise
        # That spoils its row alone; decoding each text in Python takes a fifth of a read.
        self._all_is_utf8 = False
        return super()._ask(question, action)

    def _configure(self, connection: sqlite3.Connection, _: object) -> None:
        for pragma in self._pragmas:
            connection.execute(f"PRAGMA {pragma}").close()
