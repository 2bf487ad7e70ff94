"""Fixtures of the store's tests."""

import shutil
from pathlib import Path

import pytest

from autoflash.problem import Bucket
from autoflash.store.store import Store
from tests.store.support import H200, PROBLEM, problem_of, record_of, trial_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new folder" / "tuning #1?.sqlite"


@pytest.fixture(scope="session")
def empty_store_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creating a store takes Alembic a quarter of a second; copying one doesn't."""
    return Store(tmp_path_factory.mktemp("empty") / "empty.sqlite").path


@pytest.fixture
def store(path: Path, empty_store_file: Path) -> Store:
    path.parent.mkdir()
    shutil.copy(empty_store_file, path)
    return Store(path)


class Make:
    """What the tests are about, and how to make more of it."""

    problem = staticmethod(problem_of)
    record = staticmethod(record_of)
    trial = staticmethod(trial_of)
    h200 = H200
    bucket = Bucket.of(PROBLEM)


@pytest.fixture(scope="session")
def make() -> type[Make]:
    return Make
