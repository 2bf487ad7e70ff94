"""What only a store in a file can show: its pragmas, its plan, its bytes."""

import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from autoflash.errors import StoreError
from autoflash.store.store import Store


def test_lookups_use_the_index(store, path, make):
    store.add_record(make.record())
    seen = []
    plan = "EXPLAIN QUERY PLAN "
    with closing(sqlite3.connect(path)) as raw:

        def explain(query):
            return raw.execute(plan + query).fetchall()[0][3]

        configure = store._configure

        def traced(connection, entry):
            configure(connection, entry)
            connection.set_trace_callback(seen.append)

        from sqlalchemy import event

        event.listen(store._engine, "connect", traced)
        for lookup in (store.best, store.neighbours, store.siblings, store.trials):
            lookup(make.bucket, make.h200)
        plans = [explain(query) for query in seen if query.startswith("SELECT")]
    assert [p.split(" (")[0] for p in plans] == [
        "SEARCH records USING COVERING INDEX ix_records_key",
        # The row that serves is read by its id.
        "SEARCH records USING INTEGER PRIMARY KEY",
        *["SEARCH records USING COVERING INDEX ix_records_key"] * 2,
        "SEARCH trials USING INDEX ix_trials_key",
    ]
    assert plans[0].count("=?") == 18


def test_read_only_writes_nothing(store, path, make):
    store.add_record(make.record())
    before = path.read_bytes()
    reader = Store(path, read_only=True)
    with pytest.raises(StoreError, match="read_only=True"):
        reader.add_record(make.record())
    with pytest.raises(StoreError, match="read_only=True"):
        reader.add_trial(make.trial())
    # Not only the method says no: the connection itself can't write.
    reader.read_only = False
    with pytest.raises(StoreError, match="readonly database"):
        reader.add_record(make.record())
    assert path.read_bytes() == before
    assert len(store.records()) == 1


def test_pragmas(store, path):
    def pragmas(opened):
        with opened._session("look") as session:
            connection = session.connection()
            names = ("journal_mode", "busy_timeout", "synchronous", "foreign_keys")
            return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    assert pragmas(store) == ["wal", 5000, 1, 1]
    timeout = pragmas(Store(path, read_only=True))[1]
    assert timeout == 25


def test_a_busy_database_is_a_store_error(store, path, make, monkeypatch):
    monkeypatch.setattr("autoflash.store.schema.WRITE_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"could not store records: .*locked; .*try again"):
            store.add_record(make.record())
        # Readers don't wait for a writer.
        assert Store(path, read_only=True).records() == []
    store.add_record(make.record())


def test_a_file_that_goes_away_is_an_error_and_not_made_anew(store, path, make):
    path.unlink()
    with pytest.raises(StoreError, match="unable to open"):
        store.add_record(make.record())
    with pytest.raises(StoreError, match="unable to open"):
        store.records()
    assert not path.exists()


def test_importing_the_package_loads_no_database():
    code = (
        "import sys, autoflash.store, autoflash.store.record, autoflash.store.layers\n"
        "assert not {'sqlalchemy', 'alembic', 'sqlite3'} & set(sys.modules)\n"
        "import autoflash.store.store\n"
        "assert 'alembic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
