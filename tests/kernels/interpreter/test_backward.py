"""What the emitted backward computes, in Triton's interpreter, against fp64.

As test_numerics.py: inputs and outputs lie in NaN; fp16 and fp32, since the interpreter's bf16
products are garbage; a sample by default, AUTOFLASH_TEST_SEED chooses another.
"""

import itertools
import random
from pathlib import Path

import pytest

from tests.kernels.interpreter.test_numerics import (
    BYTES,
    DIMS,
    HEADS,
    LENGTHS,
    SEED,
    Worker,
    needs_interpreter,
    score_rounding,
)

WORKER = Path(__file__).with_name("backward_worker.py")
SAMPLE = 40
DATA = ("normal", "outliers", "large", "negative", "expanded dout")
AXES = (
    "dtype", "causal", "dlse", "seqlen_q", "seqlen_k", "data", "GROUP_HEADS", "LOAD",
    "DKDV_BLOCK_M", "DKDV_BLOCK_N", "DQ_BLOCK_M", "DQ_BLOCK_N",
)  # fmt: skip


def grid() -> list[dict]:
    """Lengths x mask and dims x data x mask, the other axes by lot; then rows that see no key."""
    lot = random.Random(0)
    cases = [
        case_of(lot, causal, lengths, lot.choice(DIMS), lot.choice(DATA))
        for causal in (False, True)
        for lengths in itertools.product(LENGTHS, LENGTHS)
    ]
    cases += [
        case_of(lot, causal, (lot.choice((17, 65, 127)), lot.choice((33, 65, 127))), dims, data)
        for causal in (False, True)
        for dims in DIMS
        for data in DATA
    ]
    cases += [
        case_of(lot, True, lengths, lot.choice(DIMS), "hidden nan")
        for lengths in ((65, 33), (127, 1), (127, 65), (33, 2), (5, 2))
    ]
    return list({name_of(case): case for case in cases}.values())


def case_of(lot, causal, lengths, dims, data) -> dict:
    batch, heads, kv_heads = lot.choice(HEADS)
    dtype = lot.choice(("float16", "float32"))
    aligned = all(dim * BYTES[dtype] % 16 == 0 for dim in dims)
    return {
        "dtype": dtype, "causal": causal,
        "batch": batch, "heads": heads, "kv_heads": kv_heads,
        "seqlen_q": lengths[0], "seqlen_k": lengths[1],
        "head_dim": dims[0], "head_dim_v": dims[1], "data": data, "dlse": lot.random() < 0.5,
        "DKDV_BLOCK_M": lot.choice((16, 32)), "DKDV_BLOCK_N": lot.choice((32, 64)),
        "DQ_BLOCK_M": lot.choice((16, 32)), "DQ_BLOCK_N": lot.choice((32, 64)),
        "GROUP_HEADS": lot.choice((1, 8)), "LOAD": lot.choice(("pointer", "tma")[: 1 + aligned]),
        "seed": lot.randrange(100),
    }  # fmt: skip


def name_of(case: dict) -> str:
    return (
        "{dtype}-causal{causal:d}-dlse{dlse:d}-b{batch}h{heads}k{kv_heads}-s{seqlen_q}x{seqlen_k}"
        "-d{head_dim}v{head_dim_v}-{data}-{LOAD}-group{GROUP_HEADS}"
        "-m{DKDV_BLOCK_M}n{DKDV_BLOCK_N}-m{DQ_BLOCK_M}n{DQ_BLOCK_N}"
    ).format(**case)


def axes_of(case: dict) -> set[tuple]:
    """What the sample must hold at least once."""
    values = {(name, case[name], case["causal"]) for name in AXES}
    values |= {("dims", case["head_dim"], case["head_dim_v"])}
    return values | {("heads", case["heads"], case["kv_heads"], case["causal"])}


def sample(cases: list[dict], seed: int) -> set[str]:
    """Names of cases that hold all of axes_of: the most telling first, then at random."""
    shuffled = random.Random(seed).sample(cases, len(cases))
    missing = set().union(*(axes_of(case) for case in cases))
    chosen = set()
    while missing:
        best = max(shuffled, key=lambda case: len(axes_of(case) & missing))
        chosen.add(name_of(best))
        missing -= axes_of(best)
    others = [name_of(case) for case in shuffled if name_of(case) not in chosen]
    return {*chosen, *others[: max(0, SAMPLE - len(chosen))]}


CASES = grid()
BY_DEFAULT = sample(CASES, SEED)


@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    print(f"interpreter cases: {len(BY_DEFAULT)} of {len(CASES)}, AUTOFLASH_TEST_SEED={SEED}")
    worker = Worker(tmp_path_factory.mktemp("backward"), WORKER)
    yield worker
    worker.process.stdin.close()
    assert worker.process.wait(timeout=30) == 0


@needs_interpreter
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=name_of(case),
            marks=() if name_of(case) in BY_DEFAULT else pytest.mark.full,
        )
        for case in CASES
    ],
)
def test_the_gradients_are_as_exact_as_the_rule_asks(worker, case):
    found = worker.measure(case)
    assert found["nan"] == 0
    # In fp32 the yardstick may be lucky; no sum in fp32 avoids the rounding of the scores, of the
    # LSE that comes with it, and of dP.
    rounding = 3 * score_rounding(case, found["score_size"])
    for error, allowed, size in zip(
        found["errors"], found["allowed"], found["term_sizes"], strict=True
    ):
        assert error <= max(allowed, rounding * size)
    assert found["written_outside"] == 0
    rows = max(0, case["seqlen_q"] - case["seqlen_k"]) if case["causal"] else 0
    assert found["empty_rows"] == rows * case["batch"] * case["heads"]
    assert found["empty_dq"] == 0.0


def test_the_sample_holds_every_value_of_every_axis():
    sampled = [axes_of(case) for case in CASES if name_of(case) in BY_DEFAULT]
    assert set().union(*sampled) == set().union(*map(axes_of, CASES))
