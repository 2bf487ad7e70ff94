"""A database across a network: no WAL, no lock that could hang, nothing touched while serving.

The mount table says that the tests' folder is one; SQLite's own locks there are made to fail.
"""

import contextlib
import dataclasses
import shutil
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from autoflash.errors import StoreError
from autoflash.settings import settings
from autoflash.store import mounts, network_lock, remote, schema
from autoflash.store.layers import Layers
from autoflash.store.store import Store

QUICK_S = 0.9


@pytest.fixture
def share(tmp_path, monkeypatch):
    """A folder that lies on a network file system."""
    folder = tmp_path / "share"
    folder.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(
        f"1 1 0:1 / / rw - ext4 /dev/x rw\n2 1 0:2 / {folder} rw - nfs4 server:/x rw\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(mounts, "_MOUNTS", table)
    return folder


@pytest.fixture
def connections(monkeypatch):
    """The URIs by which SQLite is asked."""
    asked = []
    real = sqlite3.connect

    def connect(database, *args, **kwargs):
        asked.append(str(database))
        return real(database, *args, **kwargs)

    monkeypatch.setattr(sqlite3, "connect", connect)
    return asked


@pytest.fixture
def layers(tmp_path):
    def build(**changes):
        return Layers(dataclasses.replace(settings(), **changes), shipped=tmp_path / "none")

    return build


def eventually(looking, make):
    """An answer that came late is there for the next lookup."""
    end = time.monotonic() + 30
    while True:
        found = looking.lookup(make.bucket, make.h200)
        if found or time.monotonic() > end:
            return found
        for source in looking._sources.values():
            source._rest_until = 0.0
        time.sleep(0.02)


def journal_mode(path):
    # The file format versions of SQLite's header.
    return {b"\x01\x01": "delete", b"\x02\x02": "wal"}[path.read_bytes()[18:20]]


def test_it_is_written_without_wal_and_without_sqlites_locks(share, make, connections):
    store = Store(share / "x.sqlite")
    store.add_record(make.record(ms=2.0))
    store.add_trials([make.trial(), make.trial()])
    assert len(store.trials(make.bucket, make.h200)) == 2
    assert Store(share / "x.sqlite").best(make.bucket, make.h200) == make.record(ms=2.0)
    assert journal_mode(share / "x.sqlite") == "delete"
    assert sorted(path.name for path in share.iterdir()) == ["x.sqlite"]
    assert connections
    ours = [uri for uri in connections if "?" in uri]
    assert ours == connections
    assert not [uri for uri in ours if "nolock=1" not in uri and "immutable=1" not in uri]


def test_it_is_read_without_any_lock(share, make, connections):
    Store(share / "x.sqlite").add_record(make.record())
    connections.clear()
    store = Store(share / "x.sqlite", read_only=True)
    with network_lock.network_lock(share / "x.sqlite", 1.0):
        assert store.best(make.bucket, make.h200) == make.record()
    assert connections
    assert all(uri.endswith("?immutable=1") for uri in connections)


def test_a_database_that_was_moved_there_gives_up_its_wal(tmp_path, share, make, connections):
    local = Store(tmp_path / "x.sqlite")
    # As a process leaves it that was killed: the newest row is in the WAL alone.
    with contextlib.closing(sqlite3.connect(tmp_path / "x.sqlite")) as reader:
        reader.execute("SELECT * FROM records").fetchall()
        local.add_record(make.record(ms=3.0))
        assert (tmp_path / "x.sqlite-wal").stat().st_size
        for name in ("x.sqlite", "x.sqlite-wal"):
            shutil.copy(tmp_path / name, share / name)
    assert journal_mode(share / "x.sqlite") == "wal"
    connections.clear()
    moved = Store(share / "x.sqlite")
    moved.add_record(make.record(ms=2.0, day=2))
    assert len(moved.records()) == 2
    assert journal_mode(share / "x.sqlite") == "delete"
    assert [path.name for path in share.iterdir()] == ["x.sqlite"]
    there = [uri for uri in connections if str(share) in uri]
    assert there
    assert all("nolock=1" in uri or "immutable=1" in uri for uri in there)


def test_who_writes_waits_for_who_writes(share, make, monkeypatch):
    store = Store(share / "x.sqlite")
    monkeypatch.setattr(schema, "WRITE_TIMEOUT_S", 0.3)
    busy = pytest.raises(StoreError, match=r"another process is writing.*remove .*netlock")
    with network_lock.network_lock(share / "x.sqlite", 1.0), busy:
        store.add_record(make.record())
    assert store.records() == []
    monkeypatch.setattr(schema, "WRITE_TIMEOUT_S", 30.0)
    released = threading.Event()

    def hold():
        with network_lock.network_lock(share / "x.sqlite", 1.0):
            held.set()
            released.wait(30)

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(30)
    threading.Timer(0.2, released.set).start()
    store.add_record(make.record())
    thread.join()
    assert store.records() == [make.record()]


def test_many_processes_lose_nothing(share, tmp_path):
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from autoflash.store import mounts, schema\n"
        "mounts._MOUNTS = Path(sys.argv[1])\n"
        "schema.WRITE_TIMEOUT_S = 60.0\n"
        "from autoflash.store.store import Store\n"
        "from tests.store.support import trial_of\n"
        "store = Store(Path(sys.argv[2]))\n"
        "for _ in range(5):\n"
        "    store.add_trial(trial_of())\n"
    )
    path = share / "x.sqlite"
    command = [sys.executable, "-c", program, str(tmp_path / "mountinfo"), str(path)]
    running = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(120) for process in running] == [0, 0, 0, 0]
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM trials").fetchone() == (20,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("layer", ["user", "site"])
def test_serving_goes_on_while_the_network_hangs(layer, share, make, layers, monkeypatch, caplog):
    path = share / "x.sqlite"
    Store(path).add_record(make.record(ms=2.0))
    looking = layers(**{"user": {"db_path": path}, "site": {"site_db": path}}[layer])
    found = eventually(looking, make)
    assert (found.layer, found.record) == (layer, make.record(ms=2.0))
    gone = threading.Event()
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: gone.wait(30))
    begin = time.monotonic()
    again = looking.lookup(make.bucket, make.h200)
    assert time.monotonic() - begin < QUICK_S
    assert again == found
    assert f"going on without the {layer} records: {path}: no answer within 90 ms" in caplog.text
    gone.set()


def test_not_even_whether_the_file_is_there_is_waited_for(share, make, layers, monkeypatch):
    gone = threading.Event()
    real = type(share).exists
    monkeypatch.setattr(
        type(share), "exists", lambda self: gone.wait(30) if share in self.parents else real(self)
    )
    monkeypatch.setattr(remote, "PATIENCE_S", 0.05)
    looking = layers(db_path=share / "x.sqlite")
    begin = time.monotonic()
    assert looking.lookup(make.bucket, make.h200) is None
    assert time.monotonic() - begin < QUICK_S
    gone.set()


def test_a_file_of_the_user_that_isnt_there_is_no_reason_to_warn(share, make, layers, caplog):
    looking = layers(db_path=share / "x.sqlite")
    assert looking.lookup(make.bucket, make.h200) is None
    Store(share / "x.sqlite").add_record(make.record(ms=2.0))
    assert eventually(looking, make).record == make.record(ms=2.0)
    assert not [text for text in caplog.messages if "is not there" in text]
