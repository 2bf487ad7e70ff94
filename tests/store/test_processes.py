"""Many processes on one file, and one that is killed in the middle of writing."""

import multiprocessing
import signal
import sqlite3
from contextlib import closing

import pytest

from autoflash.store.rows import record_to_row
from autoflash.store.store import Store
from tests.store.support import record_of, trial_of

PROCESSES = 16
ROWS = 20


@pytest.fixture(scope="module")
def fresh():
    """Starts fresh processes that share nothing with this one, but import autoflash only once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autoflash.store.store", "alembic.command", "pytest"])
    return context


def integrity(path):
    with closing(sqlite3.connect(path)) as raw:
        return raw.execute("PRAGMA integrity_check").fetchone()[0]


def fill(path, number, start, end):
    start.wait()
    store = Store(path)
    for row in range(ROWS // 2):
        store.add_record(record_of(ms=1 + row, origin=f"host-{number}"))
        store.add_trial(trial_of(reason=f"{number} {row}"))
    end.wait()


def test_processes_that_create_one_store_at_once_lose_nothing(path, make, fresh):
    start, end = fresh.Barrier(PROCESSES), fresh.Barrier(PROCESSES)
    workers = [
        fresh.Process(target=fill, args=(path, number, start, end)) for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=240)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    store = Store(path, read_only=True)
    found = sorted((r.provenance.origin, r.measurement.median_ms) for r in store.records())
    assert found == sorted(
        (f"host-{number}", 1.0 + row) for number in range(PROCESSES) for row in range(ROWS // 2)
    )
    reasons = {trial.reason for trial in store.trials(make.bucket, make.h200)}
    assert reasons == {f"{number} {row}" for number in range(PROCESSES) for row in range(ROWS // 2)}
    assert integrity(path) == "ok"
    left = {p.name.removeprefix(path.name) for p in path.parent.iterdir()}
    assert left <= {"", ".lock", "-wal", "-shm"}


def die_writing(path, flushed):
    store = Store(path)
    store.add_record(record_of(day=2))
    with store._session("die") as session:
        # A small cache spills, so that uncommitted pages lie in the WAL when the writer dies.
        session.connection().exec_driver_sql("PRAGMA cache_size = 10")
        session.add_all([record_to_row(record_of(day=9)) for _ in range(500)])
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
    store.add_record(record_of(day=5))


def test_a_store_works_after_a_fork(store, make):
    store.add_record(make.record())
    child = multiprocessing.get_context("fork").Process(target=add_after_fork, args=(store,))
    child.start()
    child.join(timeout=240)
    assert child.exitcode == 0
    store.add_record(make.record(day=3))
    assert store.records() == [make.record(day=day) for day in (5, 3, 1)]
