"""Which kernel a GPU test runs; what follows a test that broke the context."""

import os
from collections.abc import Iterator

import pytest
import torch

from autoflash.runtime import dispatch
from tests.gpu.support import any_config_of


def pytest_configure() -> None:
    """Processes side by side share the cores, where torch on the CPU says what is right."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@pytest.fixture(params=["served", "flash_fwd", "flash_fwd_ws"])
def each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """attention runs what is served, then any config of one kernel where that can run, with a seed
    that is printed."""
    if request.param != "served":
        monkeypatch.setattr(dispatch, "choose", any_config_of(request.param))
    dispatch.forget()
    yield request.param
    dispatch.forget()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """A context that one test has broken would fail all that follow in its process: it ends, and
    pytest-xdist starts another one."""
    if call.excinfo is None or not call.excinfo.errisinstance(torch.AcceleratorError):
        return
    print(f"{item.nodeid}: {call.excinfo.value}", flush=True)
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(1)
    pytest.exit(f"{item.nodeid} broke the CUDA context", returncode=1)
