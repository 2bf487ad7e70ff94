"""Every AUTOFLASH_* variable: its default, its values, its refusals."""

import os
import socket
import traceback
from pathlib import Path

import pytest

import autoflash
from autoflash.errors import InvalidInputError
from autoflash.settings import Settings, settings

VARIABLES = [
    "AUTOFLASH_DB", "AUTOFLASH_SITE_DB", "AUTOFLASH_CACHE_DIR", "AUTOFLASH_MODE", "AUTOFLASH_LOCK",
    "AUTOFLASH_WORKERS", "AUTOFLASH_SHIPPED_DB", "AUTOFLASH_ORIGIN", "AUTOFLASH_NOTE_MISSED",
    "AUTOFLASH_TEST_KERNELS",
]  # fmt: skip


@pytest.fixture
def unset(monkeypatch, tmp_path):
    for variable in (*VARIABLES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_defaults(unset):
    assert settings() == Settings(
        db_path=unset / "data" / "autoflash" / "autoflash.sqlite",
        cache_dir=unset / "cache" / "autoflash" / "kernels",
        mode="lookup",
        lock_path=None,
        workers=len(os.sched_getaffinity(0)),
        use_shipped_records=True,
        origin=socket.gethostname()[:64],
        visible_gpus=(),
        note_missed=False,
    )
    assert list(unset.iterdir()) == []


def test_all_set(unset, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_DB", "~/my/store.sqlite")
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", "kernels")
    monkeypatch.setenv("AUTOFLASH_MODE", "lock")
    monkeypatch.setenv("AUTOFLASH_WORKERS", "3")
    monkeypatch.setenv("AUTOFLASH_SHIPPED_DB", "0")
    monkeypatch.setenv("AUTOFLASH_ORIGIN", "x" * 100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-ab")
    monkeypatch.setenv("AUTOFLASH_NOTE_MISSED", "1")
    assert settings() == Settings(
        db_path=unset / "my" / "store.sqlite",
        cache_dir=Path.cwd() / "kernels",
        mode="lock",
        lock_path=None,
        workers=3,
        use_shipped_records=False,
        origin="x" * 64,
        visible_gpus=("3", "GPU-ab"),
        note_missed=True,
    )


def test_a_snapshot_is_hashable_and_follows_the_environment(monkeypatch):
    before = settings()
    assert hash(before) == hash(settings())
    monkeypatch.setenv("AUTOFLASH_WORKERS", str(before.workers + 1))
    assert settings() != before


@pytest.mark.parametrize("variable", ["AUTOFLASH_DB", "AUTOFLASH_CACHE_DIR"])
def test_an_empty_path_is_the_default(unset, monkeypatch, variable):
    default = settings()
    monkeypatch.setenv(variable, "")
    assert settings() == default


@pytest.mark.parametrize("mode", ["", "LOCK", "tune"])
def test_mode_is_lookup_or_lock(monkeypatch, mode):
    monkeypatch.setenv("AUTOFLASH_MODE", mode)
    with pytest.raises(InvalidInputError) as caught:
        settings()
    assert str(caught.value) == f"AUTOFLASH_MODE={mode!r}: must be one of lookup, lock"


@pytest.mark.parametrize("mode", [None, "lookup", "lock"])
def test_a_lock_file_locks(unset, monkeypatch, mode):
    if mode:
        monkeypatch.setenv("AUTOFLASH_MODE", mode)
    monkeypatch.setenv("AUTOFLASH_LOCK", "~/some.lock")
    assert (settings().mode, settings().lock_path) == ("lock", unset / "some.lock")


def test_an_empty_lock_does_not_unlock(monkeypatch):
    monkeypatch.setenv("AUTOFLASH_LOCK", "")
    with pytest.raises(
        InvalidInputError, match=r"^AUTOFLASH_LOCK is empty: name the lock file, or"
    ):
        settings()


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "", " 2"])
def test_workers_is_a_count(monkeypatch, text):
    monkeypatch.setenv("AUTOFLASH_WORKERS", text)
    with pytest.raises(InvalidInputError) as caught:
        settings()
    assert str(caught.value) == (f"AUTOFLASH_WORKERS={text!r}: must be a whole number, at least 1")


@pytest.mark.parametrize("scheme", ["postgresql", "postgresql+psycopg"])
def test_the_store_may_be_a_server(unset, monkeypatch, scheme):
    monkeypatch.setenv("AUTOFLASH_DB", f"{scheme}://me:s3cr%40t@[::1]:5433/tuning?sslpassword=s3c")
    found = settings()
    assert found.db is found.db_url
    # What stays on this host, such as the file of missed calls, lies where it would by default.
    assert found.db_path == unset / "data" / "autoflash" / "autoflash.sqlite"
    assert found.db_url.with_password == (
        "postgresql+psycopg://me:s3cr%40t@[::1]:5433/tuning?sslpassword=s3c"
    )
    assert str(found.db_url) == "postgresql+psycopg://me@[::1]:5433/tuning"
    assert "s3c" not in f"{found!r} {found} {found.db_url!r}"
    assert hash(found) == hash(settings())


def test_a_server_may_be_reached_by_a_socket(monkeypatch):
    monkeypatch.setenv("AUTOFLASH_DB", "postgresql:///tuning?host=/run/postgresql")
    assert str(settings().db) == "postgresql+psycopg:///tuning"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("sqlite:///s3cret.sqlite", "scheme 'sqlite' is not served: give a file path or"),
        ("mysql://me:s3cret@host/db", "scheme 'mysql' is not served"),
        ("postgresql+asyncpg://me:s3cret@host/db", "scheme 'postgresql+asyncpg' is not"),
        ("postgresql://me:s3cret@host", "names no database"),
        ("postgresql://me:s3cret@host/?dbname=x", "names no database"),
        ("postgresql://me:s3cret/x@host/db", "must be percent-encoded"),
        ("postgresql://me:x@host:s3cret/db", "must be percent-encoded"),
        ("postgresql://me:s3cret@[::1/db", "must be percent-encoded"),
    ],
)
def test_other_urls_are_refused_without_a_word_of_their_secrets(monkeypatch, url, reason):
    monkeypatch.setenv("AUTOFLASH_DB", url)
    with pytest.raises(InvalidInputError) as caught:
        settings()
    said = "".join(traceback.format_exception(caught.value))
    assert str(caught.value).startswith("AUTOFLASH_DB: ")
    assert reason in str(caught.value)
    assert "s3cret" not in said


def test_the_kernels_lie_in_a_folder(monkeypatch):
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", "s3://bucket/kernels")
    with pytest.raises(InvalidInputError, match="AUTOFLASH_CACHE_DIR: give a path, not a URL"):
        settings()


@pytest.mark.parametrize(("text", "expected"), [("0", False), ("1", True), ("", True)])
def test_shipped_records_are_left_out_with_0(monkeypatch, text, expected):
    monkeypatch.setenv("AUTOFLASH_SHIPPED_DB", text)
    assert settings().use_shipped_records is expected


@pytest.mark.parametrize("text", ["", "yes", "2", "01", "1 "])
def test_noting_is_on_or_off(monkeypatch, text):
    monkeypatch.setenv("AUTOFLASH_NOTE_MISSED", "0")
    assert settings().note_missed is False
    monkeypatch.setenv("AUTOFLASH_NOTE_MISSED", text)
    with pytest.raises(InvalidInputError) as caught:
        settings()
    assert str(caught.value) == f"AUTOFLASH_NOTE_MISSED={text!r}: must be 0 or 1"


def test_tests_run_isolated():
    found = settings()
    assert found.origin == "test"
    assert found.use_shipped_records is False
    assert found.note_missed is False
    assert "pytest-" in str(found.db_path)
    assert "pytest-" in str(found.cache_dir)
    assert not found.db_path.exists()


def test_the_table_in_the_docstring_names_every_variable():
    text = Path(autoflash.__file__).parent.joinpath("settings.py").read_text(encoding="utf-8")
    table, code = text.split('"""', 2)[1:]
    assert [
        line.split()[1] for line in table.splitlines() if line.startswith("| AUTO")
    ] == VARIABLES
    assert all(f'"{variable}"' in code for variable in VARIABLES)


@pytest.mark.parametrize("text", ["²", "١"])
def test_workers_not_ascii(monkeypatch, text):
    monkeypatch.setenv("AUTOFLASH_WORKERS", text)
    with pytest.raises(InvalidInputError):
        settings()


def test_unknown_home(monkeypatch):
    monkeypatch.setenv("AUTOFLASH_DB", "~no_such_user_here/x.sqlite")
    with pytest.raises(InvalidInputError):
        settings()
