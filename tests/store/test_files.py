"""Files that are missing, broken, foreign, or that may only be read."""

import logging
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from autoflash.errors import StoreError
from autoflash.store.store import Store
from tests.store.support import as_a_stranger


def broken(kind, whole):
    return {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "random": random.Random(1).randbytes(len(whole)),
        "header only": whole[:100],
        "text": b"autoflash\n" * 100,
        "smashed pages": whole[:100] + random.Random(1).randbytes(len(whole) - 100),
    }[kind]


@pytest.mark.parametrize(
    "kind", ["empty", "half", "random", "header only", "text", "smashed pages"]
)
def test_a_broken_file_is_refused_and_left_as_it_is(store, path, make, kind):
    for _ in range(50):
        store.add_record(make.record())
    content = broken(kind, path.read_bytes())
    path.write_bytes(content)
    for read_only in (True, False):
        with pytest.raises(StoreError, match=r"tuning #1\?\.sqlite: .*(move it away|another path)"):
            Store(path, read_only=read_only)
    assert path.read_bytes() == content


def test_a_store_that_breaks_later_raises_store_error(store, path, make):
    for _ in range(50):
        store.add_record(make.record())
    content = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(content)
    for read in (store.records, lambda: store.best(make.bucket, make.h200)):
        with pytest.raises(StoreError, match="damaged"):
            read()
    with pytest.raises(StoreError, match="damaged"):
        store.add_record(make.record())
    assert path.read_bytes() == content


def test_damage_inside_never_leaves_as_another_error(store, path, make):
    for _ in range(30):
        store.add_record(make.record())
    whole = bytearray(path.read_bytes())
    rng = random.Random(7)
    failed = 0
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(40):
            content[rng.randrange(100, len(content))] = rng.randrange(256)
        path.write_bytes(content)
        try:
            opened = Store(path, read_only=True)
            opened.records()
            opened.best(make.bucket, make.h200)
            opened.neighbours(make.bucket, make.h200)
        except StoreError:
            failed += 1
        assert path.read_bytes() == content
    assert failed


def test_a_missing_file_is_not_made_by_reading(path):
    with pytest.raises(StoreError, match="no such store"):
        Store(path, read_only=True)
    assert not path.parent.exists()


def test_something_else_is_refused(tmp_path):
    for read_only in (True, False):
        with pytest.raises(StoreError, match="not a file"):
            Store(tmp_path, read_only=read_only)
    foreign = tmp_path / "browser.sqlite"
    with closing(sqlite3.connect(foreign)) as raw, raw:
        raw.execute("CREATE TABLE history (url)")
    content = foreign.read_bytes()
    for read_only in (True, False):
        with pytest.raises(StoreError, match="a database of something else"):
            Store(foreign, read_only=read_only)
    assert foreign.read_bytes() == content
    with pytest.raises(StoreError, match="can't be"):
        Store(foreign / "below" / "store.sqlite")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE VIEW v AS WITH RECURSIVE n(x) AS (VALUES (1) UNION ALL SELECT x FROM n) SELECT 1",
        "CREATE TRIGGER t AFTER INSERT ON records BEGIN DELETE FROM records; END",
    ],
)
def test_a_schema_that_does_things_is_refused(store, path, statement):
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute(statement)
    for read_only in (True, False):
        with pytest.raises(StoreError, match="can't be trusted"):
            Store(path, read_only=read_only)


@pytest.fixture
def sealed(store, path, make):
    """A folder that may not be written, with a store of one record."""
    store.add_record(make.record())
    path.chmod(0o444)
    path.parent.chmod(0o555)
    above = path.parent.parent
    opened = []
    while above != Path("/") and not above.stat().st_mode & 0o001:
        opened.append((above, above.stat().st_mode))
        above.chmod(above.stat().st_mode | 0o011)
        above = above.parent
    yield path
    for folder, mode in opened:
        folder.chmod(mode)
    path.parent.chmod(0o755)


def test_a_read_only_folder_is_served(sealed, make):
    def work():
        try:
            (sealed.parent / "probe").touch()
        except PermissionError:
            reader = Store(sealed, read_only=True)
            return f"{reader._uri[-11:]} {reader.best(make.bucket, make.h200) == make.record()}"
        return "the folder can be written: this tests nothing"

    content = sealed.read_bytes()
    assert as_a_stranger(work) == "immutable=1 True"
    assert sealed.read_bytes() == content
    assert [p.name for p in sealed.parent.iterdir()] == [sealed.name]


def test_a_read_only_folder_with_a_live_wal_is_served_whole(sealed, store, make):
    def work():
        reader = Store(sealed, read_only=True)
        return f"{reader._uri[-7:]} {len(reader.records())}"

    with closing(sqlite3.connect(sealed)) as writer:
        writer.execute("SELECT count(*) FROM records").fetchone()
        store.add_record(make.record(day=2))
        for suffix in ("-wal", "-shm"):
            sealed.with_name(sealed.name + suffix).chmod(0o444)
        assert as_a_stranger(work) == "mode=ro 2"


def test_rows_that_only_stand_in_an_unreadable_wal_are_told_of(sealed, store, make):
    def work():
        messages = []
        handler = logging.Handler()
        handler.emit = lambda record: messages.append(record.getMessage())
        logging.getLogger("autoflash").addHandler(handler)
        reader = Store(sealed, read_only=True)
        return f"{len(reader.records())} {messages[0].rpartition(': ')[2]}"

    wal = sealed.with_name(sealed.name + "-wal")
    with closing(sqlite3.connect(sealed)) as writer:
        writer.execute("SELECT count(*) FROM records").fetchone()
        store.add_record(make.record(day=2))
        content = wal.read_bytes()
    # As a copy of a folder that leaves the -shm file behind.
    main = sealed.read_bytes()
    wal.write_bytes(content)
    wal.chmod(0o444)
    said = as_a_stranger(work)
    assert said.endswith(f"the newest rows are in {wal.name}, which can't be read here")
    assert sealed.read_bytes() == main


def test_what_may_not_be_written_is_not_opened_for_writing(sealed):
    def work():
        said = []
        for path in (sealed, sealed.with_name("other.sqlite")):
            try:
                Store(path)
            except StoreError as error:
                said.append(str(error))
        return "\n".join(said)

    existing, missing = as_a_stranger(work).splitlines()
    assert "read_only=True" in existing
    assert "can't be" in missing
    assert [p.name for p in sealed.parent.iterdir()] == [sealed.name]
