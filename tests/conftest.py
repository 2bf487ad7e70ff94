"""Every test runs on its own store and its own folder of emitted kernels, never on the user's."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from autoflash.kernels import KERNELS, kernels_to_test_with
from autoflash.kernels.kernel import Kernel
from autoflash.settings import DatabaseUrl
from tests.store.server import Server

HERE = Path(__file__).parent
GPU_TESTS = HERE / "gpu"

# How long an example takes says more of the machine than of the code.
settings.register_profile("autoflash", deadline=None)
settings.load_profile("autoflash")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lies in tests/gpu is marked ``gpu``, and skipped where torch sees none."""
    present = torch.cuda.is_available()
    for item in items:
        if item.path.is_relative_to(GPU_TESTS):
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not present:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Emitted kernels are checked against their text when read: tests may share the folder."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(autouse=True)
def isolated(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    kernel_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """AUTOFLASH_* point into temporary folders; nothing of the caller's settings leaks in."""
    for variable in (
        *("AUTOFLASH_MODE", "AUTOFLASH_LOCK", "AUTOFLASH_WORKERS", "AUTOFLASH_SITE_DB"),
        *("AUTOFLASH_NOTE_MISSED", "AUTOFLASH_TEST_KERNELS"),
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path_factory.mktemp("db") / "store.sqlite"))
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", str(kernel_folder))
    monkeypatch.setenv("AUTOFLASH_ORIGIN", "test")
    if not request.path.is_relative_to(GPU_TESTS):
        # The same on every machine: what doesn't need a GPU is tested without one.
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
            monkeypatch.setenv(variable, "")
    # The store's own tests bring the shipped records that they look up.
    if not request.path.is_relative_to(HERE / "store"):
        monkeypatch.setenv("AUTOFLASH_SHIPPED_DB", "0")


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Kernel]]:
    """Sets AUTOFLASH_TEST_KERNELS: the module's kernels, by name, join the table of this process,
    which has long been made, and of the workers that are started from now on."""

    def join(module: str) -> dict[str, Kernel]:
        monkeypatch.setenv("AUTOFLASH_TEST_KERNELS", module)
        path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
        found = {kernel.name: kernel for kernel in kernels_to_test_with()}
        for name, kernel in found.items():
            monkeypatch.setitem(KERNELS, name, kernel)
        return found

    return join


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A real PostgreSQL; where none can be started, that is an error of each test that asks."""
    running = Server()
    yield running
    running.close()


@pytest.fixture(scope="session")
def empty_database(server: Server) -> str:
    """The name of one with our tables, to be copied."""
    from autoflash.store.postgres import PostgresStore

    url = server.new_database()
    PostgresStore(url)._engine.dispose()
    return str(url).rpartition("/")[2]


@pytest.fixture
def url(server: Server, empty_database: str) -> Iterator[DatabaseUrl]:
    """A database with our tables."""
    found = server.new_database(empty_database)
    yield found
    server.drop(found)


@pytest.fixture
def bare_url(server: Server) -> Iterator[DatabaseUrl]:
    """A database without any table."""
    found = server.new_database()
    yield found
    server.drop(found)


@pytest.fixture
def going_away(server: Server) -> Iterator[Server]:
    """The server, which a test may stop or freeze: it is there again for the next one."""
    yield server
    server.thaw()
    server.start()
