"""Fixtures of the store's tests."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from autoflash.problem import Bucket
from autoflash.settings import DatabaseUrl
from autoflash.store.base import AnyStore
from autoflash.store.opening import open_store
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


BACKENDS = ("sqlite", "postgres")


@dataclass
class Home:
    """Where a store lies, in whichever database."""

    where: Path | DatabaseUrl

    def open(self, *, read_only: bool = False) -> AnyStore:
        """As the program does."""
        return open_store(self.where, read_only=read_only)


@pytest.fixture(params=BACKENDS)
def home(request: pytest.FixtureRequest, path: Path, empty_store_file: Path) -> Home:
    """One that holds an empty store."""
    if request.param == "postgres":
        return Home(request.getfixturevalue("url"))
    path.parent.mkdir()
    shutil.copy(empty_store_file, path)
    return Home(path)


@pytest.fixture(params=BACKENDS)
def bare_home(request: pytest.FixtureRequest, path: Path) -> Home:
    """One where nothing is yet."""
    postgres = request.param == "postgres"
    return Home(request.getfixturevalue("bare_url") if postgres else path)


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
