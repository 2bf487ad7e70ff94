"""The quantisation kernels in Triton's interpreter give torch's bits, and write nothing else."""

import itertools
import os
import random
from pathlib import Path

import pytest

from tests.kernels.interpreter.test_numerics import Worker, needs_interpreter

WORKER = Path(__file__).with_name("quantize_worker.py")
SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
COUNT = 40
DATA = ("normal", "outliers", "zero blocks", "not finite", "all nan", "tiny", "ties")
ROWS = (1, 15, 33, 128, 130, 257)
# granularity, transposed, permuted
FORMS = tuple(
    (granularity, transposed, permuted)
    for granularity in ("tensor", "head", "block")
    for transposed, permuted in ((False, False), (True, False), (True, True))
)


def cases() -> list[dict]:
    """Every form twice with each kind of data, the other axes by lot; then rotated ones, which are
    small, since the interpreter is slow at them."""
    lot = random.Random(SEED)
    found = [
        case_of(lot, form, data, lot.choice(ROWS), lot.choice((8, 63, 96, 200)))
        for form, data in itertools.product(FORMS, DATA)
    ]
    found = lot.sample(found, COUNT)
    small = {"batch": 1, "heads": 2}
    rotated = [
        case_of(lot, (granularity, False, False), data, rows, dim)
        | {**small, "rotation": lot.choice((0, 1, 2**31 - 1))}
        for granularity in ("tensor", "head", "block")
        for data, rows, dim in (
            ("outliers", 9, 32), ("normal", 9, 96), ("not finite", 16, 40), ("outliers", 130, 16),
            ("normal", 33, 64), ("ties", 9, 8), ("outliers", 5, 63),
        )
    ]  # fmt: skip
    # Several tiles a program, the next one loaded before.
    ahead = [
        case_of(lot, ("block", False, False), data, rows, dim)
        | {**small, "rotation": 3, "dtype": dtype}
        for data, rows, dim, dtype in (
            ("outliers", 300, 128, "bfloat16"), ("not finite", 130, 256, "float16"),
        )
    ]  # fmt: skip
    wide = [
        case_of(lot, (granularity, False, False), data, rows, 64)
        | {**small, "rotation": 3, "dtype": "float16"}
        for granularity in ("tensor", "head", "block")
        for data, rows in (("outliers", 9), ("normal", 130), ("not finite", 257), ("normal", 33))
    ]
    return found + rotated + ahead + wide


def case_of(lot: random.Random, form: tuple, data: str, rows: int, dim: int) -> dict:
    granularity, transposed, permuted = form
    group = 1 if transposed else lot.choice((1, 2))
    return {
        "granularity": granularity, "transposed": transposed, "permuted": permuted, "data": data,
        "batch": lot.choice((1, 2)) if rows < 100 else 1, "heads": 2 * lot.choice((1, 2)),
        "rows": rows, "dim": dim, "group": group, "rotation": None, "seed": lot.randrange(100),
        "dtype": lot.choice(("float16", "bfloat16", "float32")),
        "strides": lot.choice(("bhsd", "bshd", "columns", "slice")),
    }  # fmt: skip


def name_of(case: dict) -> str:
    return (
        "{granularity}-t{transposed:d}p{permuted:d}-{data}-b{batch}h{heads}g{group}-{rows}x{dim}"
        "-{dtype}-{strides}-rotation{rotation}-{seed}"
    ).format(**case)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("interpreter"), WORKER)
    yield worker
    worker.process.stdin.close()
    assert worker.process.wait(timeout=30) == 0


@needs_interpreter
@pytest.mark.parametrize("case", cases(), ids=name_of)
def test_the_kernels_give_torchs_bits(worker, case):
    found = worker.measure(case)
    assert found["same_shapes"]
    assert found["different_scales"] == 0
    assert found["different"] == 0
    assert found["outside"] == 0
    if case["data"] == "all nan":
        assert found["nan"] == case["batch"] * case["heads"] * case["rows"] * case["dim"]
    elif case["data"] != "not finite":
        assert found["nan"] == 0
