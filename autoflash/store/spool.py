"""SpooledStore: a store on a server that may go away while a tune runs."""

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Select, delete, func, insert, literal, select, text
from sqlalchemy.orm import Session

from autoflash.errors import StoreError
from autoflash.settings import DatabaseUrl
from autoflash.store.base import logger
from autoflash.store.models import RecordRow, TrialRow
from autoflash.store.postgres import PostgresStore
from autoflash.store.record import Trial, TuningRecord
from autoflash.store.store import Store

T = TypeVar("T")

# How long a server that failed isn't asked again: each question may cost its whole timeout.
REST_S = 30.0
_BATCH = 200
_TABLES = (RecordRow, TrialRow)
# "spool" in ASCII, cut to 31 bits, keeps our locks apart from those of other programs.
_LOCKS = 0x73706F6F
_WRITING = text(f"SELECT pg_advisory_xact_lock_shared({_LOCKS}, :place)")
_PUSHING = text(f"SELECT pg_advisory_xact_lock({_LOCKS}, :place)")


class SpooledStore(PostgresStore):
    """Writes to a server; what it does not take waits in a file of this host, the spool.

    The spool is emptied, oldest first, as soon as the server answers again: before a later question
    of this process, at ``settle``, or when any process of this host opens the database for writing.
    A row that the server has already, to the last bit, isn't added again: so an answer to a commit
    that was lost on the way, or a push that was killed, doubles nothing. Such a commit may still be
    under way when the server answers again; a push waits for it, by a lock that writers share.
    While the server is away reads see the spool alone.
    """

    def __init__(self, url: DatabaseUrl, spool: Path) -> None:
        """Raises StoreError if the server can't be reached now: nothing has been lost yet."""
        self._spool_path = spool
        self._spool: Store | None = None
        # The same for the writers and the pushers of one spool; others hardly meet it.
        self._place = zlib.crc32(spool.name.encode()) - 2**31
        self._rest_until = 0.0
        super().__init__(url)
        self.settle()

    def add_records(self, records: Iterable[TuningRecord]) -> None:
        """Append all of ``records``, here or in the spool, or, if that raises, none."""
        records = list(records)
        if self._is_there():
            try:
                return super().add_records(records)
            except StoreError as error:
                self._rest(error)
        return self._opened_spool().add_records(records)

    def add_trials(self, trials: Iterable[Trial]) -> None:
        """Append all of ``trials``, here or in the spool, or, if that raises, none."""
        trials = list(trials)
        if self._is_there():
            try:
                return super().add_trials(trials)
            except StoreError as error:
                self._rest(error)
        return self._opened_spool().add_trials(trials)

    def settle(self) -> None:
        """Push what waits in the spool; says how much still does. Raises nothing."""
        try:
            if self.waiting():
                self._push()
                self._rest_until = 0.0
        except StoreError as error:
            self._rest(error)
            with contextlib.suppress(StoreError):
                logger.warning(
                    "%s: %d rows wait in %s; the next tune that reaches the server brings them",
                    *(self.name, self.waiting(), self._spool_path),
                )

    def waiting(self) -> int:
        """How many rows are in the spool. Raises StoreError if it can't be read."""
        return waiting(self._spool_path)

    def _ask(self, question: Callable[[Connection], T], action: str) -> T:
        if self._is_there():
            try:
                return super()._ask(question, action)
            except StoreError as error:
                self._rest(error)
        return self._opened_spool()._ask(question, action)

    def _add(
        self, table: type[RecordRow | TrialRow], rows: list[dict[str, Any]], action: str
    ) -> None:
        if rows:
            with self._session(action) as session:
                session.execute(_WRITING, {"place": self._place})
                session.connection().execute(insert(table), rows)

    def _is_there(self) -> bool:
        """Whether to ask the server: not soon after it failed, and not before it has the spool."""
        if self._rest_until == 0.0:
            return True
        if time.monotonic() < self._rest_until:
            return False
        try:
            self._push()
        except StoreError as error:
            self._rest(error)
            return False
        self._rest_until = 0.0
        logger.warning("%s: the server is back, and has what waited", self.name)
        return True

    def _rest(self, error: StoreError) -> None:
        if self._rest_until == 0.0:
            logger.warning(
                "%s; results are kept in %s until the server is back", error, self._spool_path
            )
        self._rest_until = time.monotonic() + REST_S

    def _opened_spool(self) -> Store:
        if self._spool is None:
            self._spool = Store(self._spool_path)
        return self._spool

    def _push(self) -> None:
        """All of the spool, a batch at a time: only what the server has committed is let go of."""
        if not self._spool_path.exists():
            return
        spool = self._opened_spool()
        with _alone(self._spool_path):
            for table in _TABLES:
                while rows := spool._fetch(_oldest(table), "read the spool"):
                    with self._session("bring what waited") as session:
                        session.execute(_PUSHING, {"place": self._place})
                        for row in rows:
                            _insert_if_new(session, table, row)
                    with spool._session("empty the spool") as session:
                        done = [row["id"] for row in rows]
                        session.execute(delete(table).where(table.id.in_(done)))


def waiting(spool: Path) -> int:
    """How many rows wait in the file at ``spool``. Raises StoreError if it can't be read."""
    if not spool.exists():
        return 0
    store = Store(spool, read_only=True)
    counts = [select(func.count(table.id).label("rows")) for table in _TABLES]
    return sum(int(store._fetch(count, "count")[0]["rows"]) for count in counts)


@contextlib.contextmanager
def _alone(spool: Path) -> Iterator[None]:
    """Two processes that push at once would each find the other's rows missing."""
    import filelock

    try:
        with filelock.FileLock(spool.with_name(spool.name + ".push"), timeout=60):
            yield
    except filelock.Timeout as error:
        raise StoreError(f"{spool}: another process has been pushing it for a minute") from error
    except OSError as error:
        raise StoreError(f"{spool}: can't be locked: {error}") from error


def _oldest(table: type[RecordRow | TrialRow]) -> Select[Any]:
    return select(*table.__table__.columns).order_by(table.id).limit(_BATCH)


def _insert_if_new(
    session: Session, table: type[RecordRow | TrialRow], row: dict[str, Any]
) -> None:
    values = {name: value for name, value in row.items() if name != "id"}
    columns = table.__table__.columns
    # With None this asks for NULL. What was written by an older version has no digest.
    same = [columns[name] == value for name, value in values.items() if name != "digest"]
    if session.execute(select(literal(1)).where(*same).limit(1)).first() is None:
        session.execute(insert(table).values(values))
