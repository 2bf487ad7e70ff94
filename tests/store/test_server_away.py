"""A server that goes away: serving goes on at once, and what a tune finds waits in the spool."""

import dataclasses
import multiprocessing
import os
import signal
import socket
import threading
import time

import pytest

from autoflash.settings import DatabaseUrl, settings
from autoflash.store import remote, spool
from autoflash.store.exchange import dump_records
from autoflash.store.layers import Layers
from autoflash.store.opening import open_store, spool_path
from autoflash.store.postgres import PostgresStore
from autoflash.store.spool import SpooledStore, waiting
from tests.store.support import trial_of

# A lookup may wait 0.1 s; one that waits for a server would for seconds.
QUICK_S = 0.9
TRIALS = 30


@pytest.fixture
def layers(tmp_path):
    """Builds Layers on a server, with a folder of shipped records."""
    (tmp_path / "tuning_db").mkdir()

    def build(url, *shipped):
        text = dump_records(shipped)
        (tmp_path / "tuning_db" / "nvidia_h200.json").write_text(text, encoding="utf-8")
        return Layers(dataclasses.replace(settings(), db_url=url), shipped=tmp_path / "tuning_db")

    return build


def eventually(looking, bucket, target, layer="user"):
    """Answers that come late are there for the next lookup; a slow machine may need a few."""
    end = time.monotonic() + 60
    while True:
        found = looking.lookup(bucket, target)
        if (found and found.layer == layer) or time.monotonic() > end:
            return found
        time.sleep(0.05)


def timed(looking, bucket, target):
    begin = time.monotonic()
    found = looking.lookup(bucket, target)
    assert time.monotonic() - begin < QUICK_S
    return found and (found.layer, found.record.measurement.median_ms)


@pytest.fixture
def silent():
    """An address where connections are taken and nothing is ever said."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield DatabaseUrl.parse(f"postgresql://me:x@127.0.0.1:{listener.getsockname()[1]}/db")


class TestServing:
    def test_a_server_answers_as_a_file_does(self, url, layers, make):
        near, own = make.record(problem=make.problem(seqlen_k=8000), ms=2), make.record()
        store = PostgresStore(url)
        store.add_record(near)
        looking = layers(url)
        found = eventually(looking, make.bucket, make.h200)
        assert (found.how, found.record) == ("neighbour", near)
        store.add_record(own)
        end = time.monotonic() + 60
        while found.record != own and time.monotonic() < end:
            found = looking.lookup(make.bucket, make.h200)
        assert (found.layer, found.how, found.record) == ("user", "exact", own)

    @pytest.mark.parametrize("away", ["stop", "freeze"])
    def test_it_goes_on_from_memory_and_the_other_layers(
        self, going_away, url, layers, make, caplog, away
    ):
        other = make.problem(head_dim=64, head_dim_v=64)
        PostgresStore(url).add_record(make.record(ms=2, day=9))
        looking = layers(url, make.record(ms=3), make.record(problem=other, ms=4))
        assert eventually(looking, make.bucket, make.h200)
        caplog.clear()
        getattr(going_away, away)()
        for _ in range(3):
            assert timed(looking, make.bucket, make.h200) == ("user", 2.0)
            assert timed(looking, make.record(problem=other).bucket, make.h200) == ("shipped", 4.0)
        assert looking.losses(make.record()) == []
        assert [r.levelname for r in caplog.records] in (["WARNING"], [])
        assert len(caplog.records) <= 1

    def test_it_asks_again_after_a_while(self, going_away, url, layers, make, monkeypatch):
        store = PostgresStore(url)
        looking = layers(url)
        going_away.stop()
        assert timed(looking, make.bucket, make.h200) is None
        going_away.start()
        store.add_record(make.record())
        assert timed(looking, make.bucket, make.h200) is None
        looking._sources["user"]._rest_until = 0.0
        assert eventually(looking, make.bucket, make.h200).record == make.record()

    def test_a_server_that_never_answers_costs_one_short_wait(self, silent, layers, make, caplog):
        looking = layers(silent, make.record(ms=3))
        for _ in range(5):
            assert timed(looking, make.bucket, make.h200) == ("shipped", 3.0)
        begin = time.monotonic()
        for _ in range(100):
            looking.lookup(make.bucket, make.h200)
        assert time.monotonic() - begin < QUICK_S
        assert len(caplog.records) == 1
        assert "no answer within 90 ms" in caplog.text

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("postgresql://me:s3cret@127.0.0.1:1/db", "refused"),
            ("postgresql://me:s3cret@no-such-host.invalid/db", "no-such-host.invalid"),
            ("postgresql://me:s3cret@127.0.0.1:1/db?no_such_option=1", "no_such_option"),
        ],
    )
    def test_what_can_not_be_reached_costs_one_warning(
        self, layers, make, caplog, monkeypatch, text, reason
    ):
        monkeypatch.setattr(remote, "PATIENCE_S", 20.0)
        looking = layers(DatabaseUrl.parse(text), make.record(ms=3))
        for _ in range(3):
            found = looking.lookup(make.bucket, make.h200)
            assert found.layer == "shipped"
        assert len(caplog.records) == 1
        assert reason in caplog.text
        assert "s3cret" not in caplog.text

    def test_a_database_without_tables_costs_one_warning(self, bare_url, layers, make, caplog):
        looking = layers(bare_url, make.record(ms=3))
        for _ in range(3):
            assert looking.lookup(make.bucket, make.h200).layer == "shipped"
        assert len(caplog.records) == 1

    def test_threads_and_forks(self, url, layers, make):
        PostgresStore(url).add_record(make.record())
        looking = layers(url)
        assert eventually(looking, make.bucket, make.h200)
        failed = []

        def ask():
            for _ in range(20):
                found = looking.lookup(make.bucket, make.h200)
                if not (found and found.layer == "user"):
                    failed.append(found)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        fork = multiprocessing.get_context("fork")
        child = fork.Process(target=lambda: os._exit(bool(ask() or failed)))
        child.start()
        for thread in threads:
            thread.join()
        child.join(timeout=60)
        assert (failed, child.exitcode) == ([], 0)


@pytest.fixture
def impatient(monkeypatch):
    """The server is asked again at once."""
    monkeypatch.setattr(spool, "REST_S", 0.0)


def reasons(store, make):
    return [trial.reason for trial in store.trials(make.bucket, make.h200)]


class TestSpool:
    def test_nothing_is_lost_or_doubled(self, going_away, url, make, impatient, caplog):
        store = open_store(url)
        for number in range(TRIALS):
            if number == 10:
                going_away.stop()
            if number == 20:
                going_away.start()
            store.add_trial(trial_of(reason=str(number)))
            if number == 15:
                store.add_record(make.record())
                assert store.best(make.bucket, make.h200) == make.record()
                assert reasons(store, make) == [str(n) for n in range(10, 16)]
                assert store.losses(make.record()) == []
        expected = [str(number) for number in range(TRIALS)]
        assert reasons(PostgresStore(url, read_only=True), make) == expected
        assert PostgresStore(url, read_only=True).records() == [make.record()]
        assert store.waiting() == 0
        told = [record.getMessage() for record in caplog.records]
        assert sum("results are kept in" in text for text in told) == 1
        assert sum("the server is back, and has" in text for text in told) == 1

    def test_a_server_that_falls_silent_is_given_up(self, going_away, url, make, monkeypatch):
        monkeypatch.setattr("autoflash.store.impatient._GRACE_S", 0.2)
        store = open_store(url)
        store._timeout_s = 0.3
        store._engines.clear()
        store.add_trial(trial_of(reason="before"))
        going_away.freeze()
        begin = time.monotonic()
        for number in range(5):
            store.add_trial(trial_of(reason=str(number)))
        assert time.monotonic() - begin < 10
        assert waiting(spool_path(url)) == 5
        going_away.thaw()
        open_store(url)
        found = reasons(PostgresStore(url, read_only=True), make)
        assert found == ["before", *map(str, range(5))]

    def test_the_next_process_brings_what_waits(self, going_away, url, make, caplog):
        store = open_store(url)
        going_away.stop()
        store.add_trial(trial_of(reason="waits"))
        store.settle()
        assert "1 rows wait in" in caplog.text
        going_away.start()
        assert reasons(open_store(url), make) == ["waits"]
        assert waiting(spool_path(url)) == 0

    def test_it_is_brought_at_the_end_of_a_tune(self, going_away, url, make):
        store = open_store(url)
        going_away.stop()
        store.add_trial(trial_of(reason="waits"))
        going_away.start()
        store.settle()
        assert reasons(PostgresStore(url, read_only=True), make) == ["waits"]

    def test_a_commit_whose_answer_was_lost_is_not_doubled(self, url, make, monkeypatch):
        store = open_store(url)
        from sqlalchemy import event
        from sqlalchemy.exc import OperationalError

        def lose(connection):
            # Done, but nobody hears of it.
            connection.connection.dbapi_connection.commit()
            raise OperationalError("COMMIT", {}, Exception("connection lost"))

        event.listen(store._engine, "commit", lose)
        store.add_trials([trial_of(reason=str(number)) for number in range(3)])
        event.remove(store._engine, "commit", lose)
        assert store.waiting() == 3
        store.add_trial(trial_of(reason="3"))
        store.settle()
        assert reasons(store, make) == ["0", "1", "2", "3"]
        assert reasons(PostgresStore(url, read_only=True), make) == ["0", "1", "2", "3"]

    def test_a_push_that_is_killed_doubles_nothing(self, going_away, url, make, monkeypatch):
        monkeypatch.setattr(spool, "_BATCH", 4)
        store = open_store(url)
        going_away.stop()
        for number in range(10):
            store.add_trial(trial_of(reason=str(number)))
        going_away.start()

        def push_and_die():
            session = spool.Store._session

            def die_emptying(self, action):
                if action == "empty the spool" and len(reasons(PostgresStore(url), make)) == 8:
                    os.kill(os.getpid(), signal.SIGKILL)
                return session(self, action)

            spool.Store._session = die_emptying
            open_store(url)

        child = multiprocessing.get_context("fork").Process(target=push_and_die)
        child.start()
        child.join(timeout=60)
        assert child.exitcode == -signal.SIGKILL
        assert waiting(spool_path(url)) == 6
        assert reasons(open_store(url), make) == [str(number) for number in range(10)]
        assert waiting(spool_path(url)) == 0

    def test_processes_that_push_at_once_double_nothing(self, going_away, url, make):
        store = open_store(url)
        going_away.stop()
        store.add_trials([trial_of(reason=str(number)) for number in range(50)])
        going_away.start()
        fork = multiprocessing.get_context("fork")
        children = [fork.Process(target=open_store, args=(url,)) for _ in range(4)]
        for child in children:
            child.start()
        for child in children:
            child.join(timeout=60)
        assert reasons(PostgresStore(url), make) == [str(number) for number in range(50)]
        assert isinstance(store, SpooledStore)
        assert store.waiting() == 0
