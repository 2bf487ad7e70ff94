"""Creating a store, upgrading it, and the schema that the migrations make."""

import functools
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import alembic.autogenerate
import alembic.config
import alembic.runtime.migration
import alembic.script
import pytest
import sqlalchemy

from autoflash.errors import StoreError
from autoflash.store import schema, upgrade
from autoflash.store.digest import trial_digest
from autoflash.store.models import Base
from autoflash.store.store import Store
from tests.store.support import TO_THE_FIRST_SCHEMA


def integrity(path):
    with closing(sqlite3.connect(path)) as raw:
        return raw.execute("PRAGMA integrity_check").fetchone()[0]


def set_version(path, version):
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("UPDATE autoflash_schema SET version_num = ?", [version])


def test_creating_leaves_the_store_and_its_lock(path):
    store = Store(path)
    assert store.schema_version == "0004"
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]
    assert integrity(path) == "ok"


def test_a_relative_path_and_text_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = Store("here.sqlite")
    monkeypatch.chdir("/")
    assert store.path == tmp_path / "here.sqlite"
    assert store.records() == []


def test_migrations_make_the_schema_of_the_models(store, path):
    engine = sqlalchemy.create_engine("sqlite://", creator=lambda: sqlite3.connect(path))
    with engine.connect() as connection:
        context = alembic.runtime.migration.MigrationContext.configure(
            connection, opts={"version_table": schema.VERSION_TABLE, "compare_type": True}
        )
        assert alembic.autogenerate.compare_metadata(context, Base.metadata) == []
        inspector = sqlalchemy.inspect(connection)
        for table in Base.metadata.tables.values():
            names = [column["name"] for column in inspector.get_columns(table.name)]
            assert sorted(names) == sorted(table.columns.keys())
    assert store.schema_version == schema.SCHEMA_VERSIONS[-1]


def test_schema_versions_are_the_revisions():
    config = alembic.config.Config()
    config.set_main_option("script_location", str(upgrade._MIGRATIONS))
    script = alembic.script.ScriptDirectory.from_config(config)
    revisions = [revision.revision for revision in script.walk_revisions()]
    assert tuple(reversed(revisions)) == schema.SCHEMA_VERSIONS


def test_an_existing_store_is_opened_without_alembic(store, path):
    code = (
        "import sys\n"
        "from autoflash.store.store import Store\n"
        "Store(sys.argv[1]).records()\n"
        "assert 'alembic' not in sys.modules and 'filelock' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)
    assert not path.with_name(path.name + ".lock").exists()


def test_a_database_without_tables_is_filled(tmp_path, make):
    path = tmp_path / "bare.sqlite"
    with closing(sqlite3.connect(path)) as raw:
        raw.execute("PRAGMA user_version = 1")
        raw.commit()
    with pytest.raises(StoreError, match="holds no tables"):
        Store(path, read_only=True)
    Store(path).add_record(make.record())
    assert Store(path, read_only=True).records() == [make.record()]


def test_a_draft_that_was_left_behind_is_replaced(path):
    path.parent.mkdir()
    for suffix in (".new", ".new-wal", ".new-journal"):
        path.with_name(path.name + suffix).write_bytes(b"left by a killed process")
    assert Store(path).records() == []
    assert sorted(p.name for p in path.parent.iterdir()) == [path.name, f"{path.name}.lock"]


def test_the_wal_of_a_deleted_store_is_not_replayed(store, path, make):
    with closing(sqlite3.connect(path)) as open_elsewhere:
        open_elsewhere.execute("SELECT count(*) FROM records").fetchone()
        store.add_record(make.record())
        wal = path.with_name(path.name + "-wal")
        stale = wal.read_bytes()
    path.unlink()
    wal.write_bytes(stale)
    fresh = Store(path)
    assert fresh.records() == []
    fresh.add_record(make.record(day=2))
    assert fresh.records() == [make.record(day=2)]
    assert integrity(path) == "ok"


@pytest.mark.parametrize("version", ["0005", "9f3c", ""])
def test_a_newer_schema_is_read_and_not_written(store, path, make, caplog, version):
    store.add_record(make.record())
    set_version(path, version)
    content = path.read_bytes()
    with pytest.raises(StoreError, match=f"has schema {version}, newer .*: upgrade autoflash"):
        Store(path)
    assert not caplog.records
    reader = Store(path, read_only=True)
    assert reader.records() == [make.record()]
    assert reader.schema_version == version
    assert "upgrade autoflash" in caplog.text
    assert path.read_bytes() == content


def test_a_newer_schema_that_cannot_be_read_is_a_store_error(store, path):
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("ALTER TABLE records RENAME COLUMN median_ms TO median_us")
    set_version(path, "0005")
    with pytest.raises(StoreError, match=r"median_ms; .*upgrade autoflash"):
        Store(path, read_only=True).records()


NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade():
    op.add_column("records", sa.Column("comment", sa.String()))
    {more}
"""


@pytest.fixture
def next_version(tmp_path, monkeypatch):
    """Makes this a version with one revision more, which may end in an error."""

    def install(more="pass"):
        folder = tmp_path / "migrations"
        shutil.copytree(upgrade._MIGRATIONS, folder)
        (folder / "versions" / "0005_comment.py").write_text(NEXT_REVISION.format(more=more))
        monkeypatch.setattr(upgrade, "_MIGRATIONS", folder)
        monkeypatch.setattr(schema, "SCHEMA_VERSIONS", ("0001", "0002", "0003", "0004", "0005"))

    return install


def columns(path):
    with closing(sqlite3.connect(path)) as raw:
        return [row[1] for row in raw.execute("PRAGMA table_info(records)")]


def test_an_older_schema_is_backed_up_and_upgraded(store, path, make, next_version):
    store.add_record(make.record())
    # A connection that stays open keeps the newest row in the WAL: it must be in the backup.
    with closing(sqlite3.connect(path)) as open_elsewhere:
        open_elsewhere.execute("SELECT count(*) FROM records").fetchone()
        store.add_record(make.record(day=2))
        next_version()
        assert len(Store(path, read_only=True).records()) == 2
        assert "comment" not in columns(path)
        upgraded = Store(path)
    assert upgraded.schema_version == "0005"
    assert "comment" in columns(path)
    assert upgraded.records() == [make.record(day=2), make.record()]
    backup = path.with_name(f"{path.name}.backup-0004")
    assert "comment" not in columns(backup)
    assert integrity(backup) == "ok"
    with closing(sqlite3.connect(backup)) as raw:
        assert raw.execute("SELECT count(*) FROM records").fetchone()[0] == 2
        assert raw.execute("SELECT * FROM autoflash_schema").fetchall() == [("0004",)]


def test_a_backup_is_never_overwritten(store, path, next_version):
    first = path.with_name(f"{path.name}.backup-0004")
    first.write_bytes(b"precious")
    next_version()
    Store(path)
    assert first.read_bytes() == b"precious"
    assert "kernel" in columns(path.with_name(f"{path.name}.backup-0004.2"))


def test_an_upgrade_that_fails_changes_nothing(store, path, make, next_version):
    store.add_record(make.record())
    next_version(more='op.execute("INSERT INTO nowhere VALUES (1)")')
    for _ in range(2):
        with pytest.raises(StoreError, match=r"schema 0005 and was left as it was: .*nowhere"):
            Store(path)
    assert "comment" not in columns(path)
    assert Store(path, read_only=True).records() == [make.record()]


def killed_upgrading(path):
    """Opens the store in a fork that kills itself on the way."""
    child = multiprocessing.get_context("fork").Process(target=Store, args=(path,))
    child.start()
    child.join(timeout=240)
    return child.exitcode == -signal.SIGKILL


def test_an_upgrade_that_is_killed_changes_nothing(store, path, make, next_version, monkeypatch):
    store.add_record(make.record())
    next_version(more='import os; os.kill(os.getpid(), 9) if os.environ.get("KILL") else None')
    monkeypatch.setenv("KILL", "1")
    assert killed_upgrading(path)
    assert integrity(path) == "ok"
    assert "comment" not in columns(path)
    monkeypatch.delenv("KILL")
    assert Store(path).records() == [make.record()]
    assert "comment" in columns(path)


class KilledCopying(sqlite3.Connection):
    """Copies one page; then the process is killed."""

    def backup(self, target):
        super().backup(target, pages=1, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def test_half_a_backup_never_passes_for_one(store, path, make, next_version, monkeypatch):
    store.add_record(make.record())
    next_version()
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", functools.partial(sqlite3.connect, factory=KilledCopying))
        assert killed_upgrading(path)
    backup = path.with_name(f"{path.name}.backup-0004")
    assert not backup.exists()
    assert Store(path).records() == [make.record()]
    assert integrity(backup) == "ok"
    assert "kernel" in columns(backup)
    assert [p.name for p in path.parent.glob("*.backup-*")] == [backup.name]


def test_a_lock_that_stays_taken_is_a_store_error(path, monkeypatch):
    import filelock

    monkeypatch.setattr(upgrade, "LOCK_TIMEOUT_S", 0.1)
    path.parent.mkdir()
    with (
        filelock.FileLock(path.with_name(path.name + ".lock")),
        pytest.raises(StoreError, match=r"another process held tuning #1\?\.sqlite\.lock"),
    ):
        Store(path)
    assert not path.exists()


def test_threads_create_two_stores_at_once(tmp_path):
    paths = [tmp_path / f"{i % 2}.sqlite" for i in range(6)]
    found = []
    threads = [threading.Thread(target=lambda p=p: found.append(Store(p).records())) for p in paths]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[]] * 6


def test_a_file_of_the_first_schema_is_read_and_upgraded(store, path, make):
    old = make.trial(reason="of old")
    store.add_trial(old)
    store.add_record(make.record())
    with closing(sqlite3.connect(path)) as raw, raw:
        for statement in TO_THE_FIRST_SCHEMA:
            raw.execute(statement)
    reader = Store(path, read_only=True)
    assert reader.trials(make.bucket, make.h200) == [old]
    assert reader.best(make.bucket, make.h200) == make.record() == reader.records()[0]
    upgraded = Store(path)
    new = make.trial(came_from="tpe")
    upgraded.add_trial(new)
    assert upgraded.trials(make.bucket, make.h200) == [old, new]
    with closing(sqlite3.connect(path)) as raw:
        found = raw.execute("SELECT digest FROM trials ORDER BY id").fetchall()
    assert found == [("",), (trial_digest(new),)]
    backup = Store(path.with_name(f"{path.name}.backup-0001"), read_only=True)
    assert backup.trials(make.bucket, make.h200) == [old]
    assert integrity(path) == "ok"
