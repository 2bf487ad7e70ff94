"""Forks while threads ask a store: no child hangs, and nobody waits long."""

import contextlib
import dataclasses
import os
import signal
import sqlite3
import threading
import time

import pytest

from autoflash.errors import StoreError
from autoflash.settings import settings
from autoflash.store.exchange import dump_records
from autoflash.store.forks import PATIENCE_S, Gate, gate
from autoflash.store.layers import Layers
from autoflash.store.store import Store

FORKS = 40
# Far more than anything here takes on a busy machine; a hang lasts for ever.
HANG_S = 30.0


def in_child(work):
    """The exit status of ``work()`` in a forked child; fails the test if that hangs."""
    child = os.fork()
    if child == 0:
        status = 99
        # No test framework must clean up in here.
        with contextlib.suppress(BaseException):
            status = work()
        os._exit(status)
    end = time.monotonic() + HANG_S
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("a forked child hangs")


@pytest.fixture
def asked(store, path, make):
    """Threads that ask the store, and open it anew, until the test ends."""
    store.add_records([make.record(day=day) for day in range(1, 21)])
    done = threading.Event()

    def ask():
        while not done.is_set():
            Store(path, read_only=True).best(make.bucket, make.h200)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    yield path
    done.set()
    for thread in threads:
        thread.join()


def test_no_child_hangs_while_threads_ask(asked, make):
    """Without the gate SQLite's own locks hang four of the first ten children."""

    def work():
        try:
            return int(Store(asked, read_only=True).best(make.bucket, make.h200) is None)
        except StoreError as error:
            return 2 if "was forked while another thread" in str(error) else 3

    found = [in_child(work) for _ in range(FORKS)]
    assert set(found) <= {0, 2}
    assert found.count(0) > FORKS // 2


@pytest.fixture
def stuck():
    """A question that doesn't end before the test does."""
    done, inside = threading.Event(), threading.Event()

    def ask():
        with gate.question():
            inside.set()
            done.wait()

    thread = threading.Thread(target=ask)
    thread.start()
    inside.wait()
    yield
    done.set()
    thread.join()


def test_a_child_that_is_forked_in_the_middle_serves_by_the_other_layers(
    stuck, store, path, tmp_path, make, caplog
):
    store.add_record(make.record(ms=2))
    (tmp_path / "nvidia_h200.json").write_text(dump_records([make.record(ms=3)]), encoding="utf-8")
    opened, unopened = (
        Layers(settings_of(path), shipped=tmp_path), Layers(settings_of(path), shipped=tmp_path),
    )  # fmt: skip
    assert opened.lookup(make.bucket, make.h200).layer == "user"

    def work():
        layers = [looking.lookup(make.bucket, make.h200).layer for looking in (opened, unopened)]
        told = [record.getMessage() for record in caplog.records]
        good = layers == ["shipped"] * 2 and len(told) == 2
        return int(not (good and all("fork before that, or spawn" in text for text in told)))

    begin = time.monotonic()
    assert in_child(work) == 0
    assert time.monotonic() - begin < HANG_S / 2
    # The parent's own questions are answered.
    assert unopened.lookup(make.bucket, make.h200).layer == "user"


def settings_of(path):
    return dataclasses.replace(settings(), db_path=path)


def test_a_fork_waits_for_questions_but_not_long():
    ours = Gate()
    inside, done = threading.Event(), threading.Event()

    def ask(seconds):
        with ours.question():
            inside.set()
            done.wait(seconds)

    for seconds, waits in ((PATIENCE_S / 5, PATIENCE_S / 5), (HANG_S, PATIENCE_S)):
        inside.clear()
        thread = threading.Thread(target=ask, args=(seconds,))
        thread.start()
        inside.wait()
        begin = time.monotonic()
        ours._before()
        took = time.monotonic() - begin
        assert waits / 2 < took < HANG_S / 2
        assert ours._inside == (0 if seconds < PATIENCE_S else 1)
        ours._in_parent()
    done.set()
    thread.join()


def test_a_question_waits_for_a_fork_but_one_within_another_does_not():
    ours = Gate()
    entered = threading.Event()

    def ask():
        with ours.question():
            entered.set()

    with ours.question():
        ours._before()
        with ours.question():
            assert ours._inside == 2
        thread = threading.Thread(target=ask)
        thread.start()
        assert not entered.wait(PATIENCE_S / 5)
        ours._in_parent()
        assert entered.wait(HANG_S)
        thread.join()
    assert (ours._inside, ours._forks, ours._depth) == (0, 0, 0)


def test_a_fork_within_a_question_is_no_reason_to_refuse():
    with gate.question():
        assert in_child(lambda: int(gate._cut_short)) == 0


def test_a_lookup_waits_less_than_a_tenth_of_a_second_for_a_lock(store, path, make):
    store.add_record(make.record())
    raw = sqlite3.connect(path, isolation_level=None)
    # As on a network file system: there readers wait for writers.
    raw.execute("PRAGMA journal_mode=DELETE")
    opened = Store(path, read_only=True)
    raw.execute("BEGIN EXCLUSIVE")

    def refused():
        with pytest.raises(StoreError, match="locked"):
            opened.answer(make.bucket, make.h200)

    # What must be loaded and compiled is no waiting: the quickest of some counts.
    for ask in (
        lambda: Layers(settings_of(path)).lookup(make.bucket, make.h200),
        refused,
    ):
        times = []
        for _ in range(7):
            begin = time.monotonic()
            ask()
            times.append(time.monotonic() - begin)
        assert min(times) < 0.1
    raw.execute("ROLLBACK")
    raw.close()
    assert opened.best(make.bucket, make.h200) == make.record()
