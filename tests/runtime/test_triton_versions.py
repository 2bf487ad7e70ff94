"""Each Triton that we claim to work with compiles the kernels, in a process of its own.

The installed version always runs. The others are fetched from the package index, once, into a cache
folder (AUTOFLASH_TEST_TRITON_DIR names another; <folder>/<version>/triton). Where they can't be had
the test is expected to fail, and says why.
"""

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import platformdirs
import pytest
import triton
from filelock import FileLock

# The newest patch of each minor version from 3.6 on.
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
_FETCH_LIMIT_S = 420
_COMPILE_LIMIT_S = 300

SCRIPT = """
import json
import triton
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Problem
from autoflash.runtime.compiler import compile_config
from autoflash.space import Config
from autoflash.target import named_target
from autoflash.tuning.ptxas import why_serialized
from autoflash.tuning.resources import Resources, resources_of

h100 = named_target("h100")
fields = {"batch": 4, "heads": 16, "seqlen": 4096}
found = []
for name, others in (
    ("flash_fwd", {"head_dim": 128, "causal": True}),
    ("flash_fwd_ws", {"head_dim": 128}),
    ("flash_fwd_ws", {"head_dim": 64, "causal": True, "dtype": "float16"}),
    ("flash_fwd_ws", {"head_dim": 256, "kv_heads": 2, "seqlen_q": 16, "causal": True}),
    ("flash_fwd_fp8", {"head_dim": 128, "dtype": "fp8", "scales": "block", "v_layout": "permuted"}),
    ("flash_fwd_fp8", {"head_dim": 64, "kv_dtype": "fp8", "causal": True}),
    ("flash_fwd_fp8_ws", {"head_dim": 128, "dtype": "fp8", "scales": "block", "causal": True}),
    (
        "flash_fwd_fp8_ws",
        {
            "head_dim": 64, "dtype": "fp8", "v_layout": "permuted",
            "config": {"Q_IN_REGISTERS": True},
        },
    ),
    ("flash_bwd", {"head_dim": 128, "kv_heads": 2, "causal": True, "op": "bwd"}),
    ("flash_bwd_ws", {"head_dim": 64, "causal": True, "op": "bwd"}),
    ("flash_bwd_ws", {"head_dim": 128, "dtype": "float16", "op": "bwd"}),
    ("flash_bwd_split", {"head_dim": 128, "op": "bwd"}),
    ("flash_bwd_split", {"head_dim": 256, "causal": True, "op": "bwd"}),
):
    changes = others.pop("config", {})
    kernel, problem = KERNELS[name], Problem.parse(fields | others)
    config = Config(**{**kernel.default(problem, h100), **changes})
    compiled = compile_config(kernel, problem, config, ALIGNED, h100)
    resources = Resources.most(map(resources_of, compiled))
    reasons = [resources.why_not(h100)]
    if kernel.language == "gluon":
        reasons += [resources.why_spilled(kernel.tolerable_spills), *map(why_serialized, compiled)]
    found.append([problem.label(), *filter(None, reasons)])
print(json.dumps({"version": triton.__version__, "found": found}))
"""


def minor(version: str) -> str:
    return version.rpartition(".")[0]


def folder() -> Path:
    """Where the versions lie, for this Python."""
    given = os.environ.get("AUTOFLASH_TEST_TRITON_DIR")
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    return Path(given or platformdirs.user_cache_path("autoflash-tests") / f"triton-{tag}")


def fetch(version: str) -> Path:
    """The folder of a version, fetched if it isn't there. Raises with pip's last words."""
    place = folder() / version
    place.parent.mkdir(parents=True, exist_ok=True)
    # Another test process may be at it.
    with FileLock(place.with_suffix(".lock"), timeout=_FETCH_LIMIT_S):
        if not place.is_dir():
            fresh = place.with_suffix(".part")
            done = subprocess.run(
                [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-cache-dir",
                 "--disable-pip-version-check", "--only-binary=:all:", "--upgrade",
                 "--target", str(fresh), f"triton=={version}"],
                capture_output=True, text=True, timeout=_FETCH_LIMIT_S, check=False,
            )  # fmt: skip
            if done.returncode:
                raise OSError(" ".join(done.stderr.split())[-300:])
            fresh.rename(place)
    return place


@functools.cache
def fetching() -> dict[str, "Future[Path]"]:
    """All versions but the installed one, side by side: each is some 180 MB."""
    wanted = [v for v in VERSIONS if minor(v) != minor(triton.__version__)]
    threads = ThreadPoolExecutor(len(wanted))
    return {version: threads.submit(fetch, version) for version in wanted}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernels_compile(version, tmp_path):
    first: list[str] = []
    if minor(version) == minor(triton.__version__):
        version = triton.__version__
    else:
        try:
            first = [str(fetching()[version].result())]
        except (OSError, TimeoutError, subprocess.SubprocessError) as error:
            pytest.xfail(f"triton {version} can't be had here: {error}")
    path = os.pathsep.join([*first, *(part for part in sys.path if part)])
    environment = os.environ | {
        "PYTHONPATH": path,
        "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "AUTOFLASH_CACHE_DIR": str(tmp_path / "kernels"),
        # 3.9 warns that its default will change.
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment,
        cwd=tmp_path, timeout=_COMPILE_LIMIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["version"] == version
    assert [found for found in answer["found"] if len(found) > 1] == []
