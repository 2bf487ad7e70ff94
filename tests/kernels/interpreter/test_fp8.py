"""What flash_fwd_fp8 computes, in Triton's interpreter, against fp64 of what its inputs stand for.

Each case surrounds its inputs and outputs with NaN, behind the last key of a transposed v too. By
default a sample runs in which each value of each axis occurs; the other cases are marked full.
AUTOFLASH_TEST_SEED chooses another sample.
"""

import itertools
import os
import random
from pathlib import Path

import pytest

from tests.kernels.interpreter.test_numerics import Worker, needs_interpreter

WORKER = Path(__file__).with_name("fp8_worker.py")
SAMPLE = 60
SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
FP8 = "float8_e4m3fn"

# q, k and v, out, FNUZ. In bf16 the interpreter's products are garbage.
KINDS = (
    (FP8, "", "", False), (FP8, "", "float16", False), (FP8, "", "float16", True),
    ("float16", FP8, "", False),
)  # fmt: skip
LAYOUTS = ("rows", "columns", "permuted")
SCALES = ("tensor", "head", "block")
DATA = ("normal", "outliers", "large", "dominant", "not finite")
LENGTHS = (1, 2, 15, 17, 33, 65, 129, 150, 300)
DIMS = ((8, 8), (40, 40), (63, 63), (64, 64), (72, 40), (16, 96), (63, 16))
HEADS = ((2, 2, 2), (1, 6, 2), (1, 9, 3), (2, 4, 1))  # batch, heads, kv_heads
# BLOCK_M, BLOCK_N, GROUP_HEADS: all that the interpreter can tell configs apart by.
TILES = tuple(itertools.product((16, 32, 64, 128), (32, 64, 128), (1, 8, 32)))
NAMES = ("q_descale", "k_descale", "v_descale", "")


def grid() -> list[dict]:
    """All variants x data, x lengths and x tiles, the other axes by lot."""
    lot = random.Random(0)
    variants = list(itertools.product(KINDS, LAYOUTS, SCALES, (False, True)))
    cases = [case_of(lot, variant, data=data) for variant in variants for data in DATA]
    cases += [
        case_of(lot, lot.choice(variants), lengths=lengths)
        for lengths in itertools.product(LENGTHS, LENGTHS)
    ]
    cases += [case_of(lot, lot.choice(variants), tile=tile) for tile in TILES for _ in range(3)]
    cases += [case_of(lot, lot.choice(variants), dims=dims) for dims in DIMS for _ in range(3)]
    return list({name_of(case): case for case in cases}.values())


def case_of(lot, variant, *, data=None, lengths=None, tile=None, dims=None) -> dict:
    (dtype, kv_dtype, out_dtype, fnuz), layout, scales, causal = variant
    lengths = lengths or (lot.choice((17, 65, 150)), lot.choice((33, 129, 150, 300)))
    block_m, block_n, group_heads = tile or lot.choice(TILES)
    head_dim, head_dim_v = dims or lot.choice(DIMS)
    batch, heads, kv_heads = lot.choice(HEADS)
    return {
        "dtype": dtype, "kv_dtype": kv_dtype, "out_dtype": out_dtype, "FNUZ": fnuz,
        "v_layout": layout, "scales": scales, "causal": causal,
        "batch": batch, "heads": heads, "kv_heads": kv_heads,
        "seqlen_q": lengths[0], "seqlen_k": lengths[1],
        "head_dim": head_dim, "head_dim_v": head_dim_v, "data": data or lot.choice(DATA),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "GROUP_HEADS": group_heads,
        "lie": lot.choice(("dense", "strided")), "dropped": lot.choice(NAMES),
        "by_query_head": lot.random() < 0.5, "seed": lot.randrange(100),
    }  # fmt: skip


def name_of(case: dict) -> str:
    kind = "-".join(filter(None, (case["dtype"], case["kv_dtype"], case["out_dtype"])))
    return kind.replace(FP8, "fp8") + (
        "-fnuz{FNUZ:d}-{v_layout}-{scales}-causal{causal:d}-b{batch}h{heads}k{kv_heads}"
        "-s{seqlen_q}x{seqlen_k}-d{head_dim}v{head_dim_v}-{data}-m{BLOCK_M}n{BLOCK_N}"
        "g{GROUP_HEADS}-{lie}-no{dropped}-each{by_query_head:d}"
    ).format(**case)


def axes_of(case: dict) -> set[tuple]:
    """What the sample must hold at least once."""
    plain = ("seqlen_q", "seqlen_k", "BLOCK_M", "BLOCK_N", "GROUP_HEADS", "lie", "dropped")
    values = {(name, case[name]) for name in plain}
    kind = (case["dtype"], case["out_dtype"], case["FNUZ"])
    values |= {("layout", *kind, case["v_layout"], case["causal"])}
    values |= {("scales", *kind, case["scales"])}
    values |= {("data", case["data"], *kind), ("data", case["data"], case["v_layout"])}
    values |= {("dims", case["head_dim"], case["head_dim_v"])}
    values |= {("heads", case["heads"], case["kv_heads"])}
    if case["scales"] == "head":
        values |= {("by query head", case["by_query_head"])}
    if case["causal"]:
        values |= {("empty rows", case["seqlen_q"] > case["seqlen_k"])}
    return values


def sample(cases: list[dict], seed: int) -> set[str]:
    """Names of SAMPLE cases that hold all of axes_of: the rarest first, then at random."""
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
    worker = Worker(tmp_path_factory.mktemp("fp8"), WORKER)
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
def test_the_kernel_is_as_exact_as_the_rule_asks(worker, case):
    found = worker.measure(case)
    assert found["excess"] <= 1, found
    # NaN and infinities are NaN in the rows that see them, and nowhere else.
    assert found["nan_differs"] == 0, found
    if case["dtype"] == FP8:
        assert found["lse_nan_differs"] == 0
    if case["data"] != "not finite":
        assert found["nan"] == 0
    # Scores are summed in fp32 here.
    assert found["lse_error"] <= 1e-5 * (1 + found["lse_size"])
    rows = max(0, case["seqlen_q"] - case["seqlen_k"]) if case["causal"] else 0
    assert found["empty_rows"] == rows * case["batch"] * case["heads"]
    assert found["empty_wrong"] == 0
    assert found["written_outside"] == 0


def test_the_sample_holds_every_value_of_every_axis():
    sampled = [axes_of(case) for case in CASES if name_of(case) in BY_DEFAULT]
    assert set().union(*sampled) == set().union(*map(axes_of, CASES))
