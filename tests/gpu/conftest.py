"""Which kernel a GPU test runs."""

from collections.abc import Iterator

import pytest

from autoflash.runtime import dispatch
from tests.gpu.support import any_config_of


@pytest.fixture(params=["served", "flash_fwd", "flash_fwd_ws"])
def each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """attention runs what is served, then any config of one kernel where that can run, with a seed
    that is printed."""
    if request.param != "served":
        monkeypatch.setattr(dispatch, "choose", any_config_of(request.param))
    dispatch.forget()
    yield request.param
    dispatch.forget()
