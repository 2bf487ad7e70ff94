"""What the emitted kernels compute, in Triton's interpreter, against fp64.

Each case surrounds its inputs and outputs with NaN, so that a row or column read past the end shows
as NaN in the result, and a stray write as a hole in the NaN. bf16 is left out: the interpreter's
bf16 products are garbage.

By default a sample runs in which each value of each axis occurs; the other cases are marked full,
under the same kind of name. AUTOFLASH_TEST_SEED chooses another sample.
"""

import importlib.metadata
import itertools
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("interpreter_worker.py")
SAMPLE = 48
SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in importlib.metadata.version(package).split(".")[:2])


needs_interpreter = pytest.mark.skipif(
    _version("triton") == (3, 6) and _version("numpy") >= (2, 4),
    reason="the interpreter of triton 3.6 breaks on loops with run-time bounds from numpy 2.4 on",
)

LENGTHS = (1, 2, 15, 17, 33, 65, 127)
DIMS = ((8, 8), (40, 40), (63, 63), (64, 64), (72, 72), (96, 96), (72, 40), (8, 96), (63, 16))
HEADS = ((2, 2, 2), (1, 6, 2), (1, 9, 3), (1, 8, 1))  # batch, heads, kv_heads
DATA = ("normal", "outliers", "large", "negative")
# (LOAD, causal, DIAGONAL_FIRST)
VARIANTS = tuple(
    (load, causal, diagonal)
    for load in ("pointer", "tma")
    for causal, diagonal in ((False, False), (True, False), (True, True))
)
BYTES = {"float16": 2, "float32": 4}


def grid() -> list[dict]:
    """All cases: variant x lengths and variant x dims x data, the other axes by lot."""
    lot = random.Random(0)
    cases = [
        case_of(lot, variant, lengths, lot.choice(DIMS), lot.choice(DATA))
        for variant in VARIANTS
        for lengths in itertools.product(LENGTHS, LENGTHS)
    ]
    cases += [
        case_of(lot, variant, (lot.choice((17, 65, 127)), lot.choice((33, 65, 127))), dims, data)
        for variant in VARIANTS
        for dims in DIMS
        for data in DATA
    ]
    # Hidden keys take a causal mask and more than one block of rows.
    cases += [
        case_of(lot, variant, lengths, lot.choice(DIMS), "hidden nan")
        for variant in VARIANTS
        for lengths in ((65, 65), (65, 127), (127, 65), (127, 127), (33, 127))
        if variant[1]
    ]
    return list({name_of(case): case for case in cases if case is not None}.values())


def case_of(lot, variant, lengths, dims, data) -> dict | None:
    load, causal, diagonal = variant
    dtype = lot.choice(("float16", "float32"))
    batch, heads, kv_heads = lot.choice(HEADS)
    case = {
        "dtype": dtype, "LOAD": load, "causal": causal, "DIAGONAL_FIRST": diagonal,
        "GROUP_HEADS": lot.choice((1, 8)), "batch": batch, "heads": heads, "kv_heads": kv_heads,
        "seqlen_q": lengths[0], "seqlen_k": lengths[1],
        "head_dim": dims[0], "head_dim_v": dims[1], "data": data,
        "BLOCK_M": lot.choice((16, 32)), "BLOCK_N": lot.choice((32, 64)),
        "seed": lot.randrange(100),
    }  # fmt: skip
    # The copy engine takes rows of multiples of 16 bytes only.
    if load == "tma" and any(dim * BYTES[dtype] % 16 for dim in dims):
        return None
    return case


def name_of(case: dict) -> str:
    return (
        "{dtype}-{LOAD}-causal{causal:d}-diagonal{DIAGONAL_FIRST:d}-group{GROUP_HEADS}"
        "-b{batch}h{heads}k{kv_heads}-s{seqlen_q}x{seqlen_k}-d{head_dim}v{head_dim_v}"
        "-{data}-m{BLOCK_M}n{BLOCK_N}"
    ).format(**case)


def axes_of(case: dict) -> set[tuple]:
    """What the sample must hold at least once."""
    plain = ("dtype", "GROUP_HEADS", "seqlen_q", "seqlen_k", "BLOCK_M", "BLOCK_N")
    values = {(name, case[name]) for name in plain}
    variant = (case["LOAD"], case["causal"], case["DIAGONAL_FIRST"])
    values |= {("data", case["data"], *variant), ("dtype", case["dtype"], *variant)}
    values |= {("dims", case["head_dim"], case["head_dim_v"], case["LOAD"])}
    values |= {("heads", case["heads"], case["kv_heads"], case["GROUP_HEADS"])}
    if case["causal"]:
        values |= {("empty rows", case["seqlen_q"] > case["seqlen_k"], *variant)}
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


class Worker:
    """A process with the interpreter, that answers case by case."""

    def __init__(self, folder: Path, script: Path = WORKER) -> None:
        self.log = folder / "stderr"
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "AUTOFLASH_CACHE_DIR": str(folder / "kernels"),
            "OMP_NUM_THREADS": "1",
            # The scripts share what they can.
            "PYTHONPATH": os.pathsep.join([str(WORKER.parents[3]), *filter(None, sys.path)]),
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, env=environment,
            )  # fmt: skip

    def measure(self, case: dict) -> dict:
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the interpreter process died:\n{self.log.read_text()}"
        answer = json.loads(line)
        assert "traceback" not in answer, answer["traceback"]
        return answer


@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    print(f"interpreter cases: {len(BY_DEFAULT)} of {len(CASES)}, AUTOFLASH_TEST_SEED={SEED}")
    worker = Worker(tmp_path_factory.mktemp("interpreter"))
    yield worker
    worker.process.stdin.close()
    assert worker.process.wait(timeout=30) == 0


def score_rounding(case: dict, score_size: float) -> float:
    """Error of a score in fp32: a random walk of head_dim roundings (Higham and Mary, 2019) of the
    sum of |q| |k|, and 4 more for scale, exp2 and log2.
    """
    return (case["head_dim"] ** 0.5 + 4) * 2**-24 * (1 + score_size)


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
    assert found["rows"] > 0
    assert found["nan"] == 0
    # In fp32 the rule can ask for too much: its yardstick is the error of one other computation,
    # which may be lucky where there are few rows. No sum in fp32 avoids the rounding of the scores.
    rounding = score_rounding(case, found["score_size"])
    assert found["error"] <= max(found["allowance"], rounding * found["v_size"])
    assert found["written_outside"] == 0
    # Scores are summed in fp32 whatever the inputs are.
    assert found["lse_error"] <= 2 * rounding
    # Rows that see no key.
    rows = min(found["rows"], max(0, case["seqlen_q"] - case["seqlen_k"])) if case["causal"] else 0
    assert found["empty_rows"] == rows * case["batch"] * case["heads"]
    assert found["empty_lse_wrong"] == 0
    assert found["empty_out"] == 0.0


def test_the_sample_holds_every_value_of_every_axis():
    sampled = [axes_of(case) for case in CASES if name_of(case) in BY_DEFAULT]
    assert set().union(*sampled) == set().union(*map(axes_of, CASES))
    values = set().union(*sampled)
    assert {v for n, *rest in values if n == "seqlen_q" for v in rest} == set(LENGTHS)
    assert {v for n, *rest in values if n == "seqlen_k" for v in rest} == set(LENGTHS)
    assert {tuple(r[1:]) for n, *r in values if n == "empty rows" and r[0]} == {
        v for v in VARIANTS if v[1]
    }
    assert {tuple(r[1:]) for n, *r in values if n == "data" and r[0] == "hidden nan"} == {
        v for v in VARIANTS if v[1]
    }
