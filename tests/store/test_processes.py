"""Many processes on one store, and one that is killed in the middle of writing."""

import multiprocessing
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import insert

from autoflash.store.models import RecordRow
from autoflash.store.opening import open_store
from autoflash.store.rows import record_to_row
from autoflash.store.store import Store
from tests.store.support import record_of

PROCESSES = 32
ROWS = 50
# Where the one that is killed stops.
KILLED_AT = 20


@pytest.fixture(scope="module")
def fresh():
    """Starts fresh processes that share nothing with this one, but import autoflash only once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["autoflash.store.spool", "alembic.command", "psycopg", "pytest"]
    )
    return context


def integrity(path):
    with closing(sqlite3.connect(path)) as raw:
        return raw.execute("PRAGMA integrity_check").fetchone()[0]


def fill(where, number, start, end, dying):
    start.wait()
    store = open_store(where)
    for row in range(ROWS):
        if number == 0 and row == KILLED_AT:
            with store._session("die") as session:
                rows = [record_to_row(record_of(ms=1 + r)) for r in range(row, ROWS)]
                session.execute(insert(RecordRow), rows)
                session.flush()
                dying.set()
                signal.pause()
        store.add_record(record_of(ms=1 + row, origin=f"host-{number}"))
    end.wait()


def test_processes_that_create_one_store_at_once_lose_nothing(bare_home, fresh):
    """32 of them, 50 records each; one is killed in a transaction."""
    where = bare_home.where
    start, end, dying = fresh.Barrier(PROCESSES), fresh.Barrier(PROCESSES), fresh.Event()
    workers = [
        fresh.Process(target=fill, args=(where, number, start, end, dying))
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    assert dying.wait(timeout=240)
    workers[0].kill()
    end.wait(timeout=240)
    for worker in workers:
        worker.join(timeout=240)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL] + [0] * (PROCESSES - 1)
    store = bare_home.open(read_only=True)
    found = sorted((r.provenance.origin, r.measurement.median_ms) for r in store.records())
    assert found == sorted(
        (f"host-{number}", 1.0 + row)
        for number in range(PROCESSES)
        for row in range(ROWS if number else KILLED_AT)
    )
    if isinstance(where, Path):
        assert integrity(where) == "ok"
        left = {p.name.removeprefix(where.name) for p in where.parent.iterdir()}
        assert left <= {"", ".lock", "-wal", "-shm"}
    bare_home.open().add_record(record_of())


def die_writing(path, flushed):
    store = Store(path)
    store.add_record(record_of(day=2))
    with store._session("die") as session:
        # A small cache spills, so that uncommitted pages lie in the WAL when the writer dies.
        session.connection().exec_driver_sql("PRAGMA cache_size = 10")
        session.execute(insert(RecordRow), [record_to_row(record_of(day=9))] * 500)
        session.flush()
        flushed.set()
        signal.pause()


def test_a_writer_that_is_killed_leaves_what_it_had_committed(store, path, make, fresh):
    store.add_record(make.record(day=1))
    flushed = fresh.Event()
    writer = fresh.Process(target=die_writing, args=(path, flushed))
    writer.start()
    assert flushed.wait(timeout=240)
    assert len(Store(path, read_only=True).records()) == 2
    writer.kill()
    writer.join()
    assert writer.exitcode == -signal.SIGKILL
    assert path.with_name(path.name + "-wal").stat().st_size > 0
    expected = [make.record(day=2), make.record(day=1)]
    assert Store(path, read_only=True).records() == expected
    Store(path).add_record(make.record(day=3))
    assert store.records() == [make.record(day=3), *expected]
    assert integrity(path) == "ok"


def add_after_fork(store):
    assert len(store.records()) == 1
    store.add_record(record_of(day=5))


def test_a_store_works_after_a_fork(home, make):
    store = home.open()
    store.add_record(make.record())
    child = multiprocessing.get_context("fork").Process(target=add_after_fork, args=(store,))
    child.start()
    child.join(timeout=240)
    assert child.exitcode == 0
    store.add_record(make.record(day=3))
    assert store.records() == [make.record(day=day) for day in (5, 3, 1)]
