"""What goes before and after flash_bwd_ws, in Triton's interpreter, against fp64.

The kernel itself runs in tests/kernels/machine.
"""

from pathlib import Path

import pytest

from tests.kernels.interpreter.test_numerics import Worker, needs_interpreter

WORKER = Path(__file__).with_name("hopper_backward_worker.py")


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("hopper_backward"), WORKER)
    yield worker
    worker.process.stdin.close()
    assert worker.process.wait(timeout=30) == 0


@needs_interpreter
@pytest.mark.parametrize("dlse", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 31, 33, 65, 200])
@pytest.mark.parametrize(("dim", "heads"), [(8, 3), (40, 1), (64, 2), (96, 2), (128, 1)])
def test_statistics_sums_and_rounding(worker, dim, heads, rows, dlse):
    case = {
        "batch": 2, "heads": heads, "kv_heads": 1, "seqlen_q": rows, "seqlen_k": 64,
        "head_dim": dim, "head_dim_v": dim, "dtype": "float16", "causal": True, "dlse": dlse,
        "seed": rows,
    }  # fmt: skip
    found = worker.measure(case)
    # A sum of dim products in fp32.
    assert found.pop("minus_delta") <= 4 * dim * 2**-24 * 16
    # One product in fp32 each.
    assert found.pop("lse2") <= rows * heads * 2 * 2**-22
    assert found == {"infinite": 0, "sums": 0.0, "dq": 0.0, "stray": 0}
