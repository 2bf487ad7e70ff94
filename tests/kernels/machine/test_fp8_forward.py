"""What the emitted flash_fwd_fp8_ws computes, on the Gluon machine, against fp64.

By default a sample runs, whose seed is printed; AUTOFLASH_TEST_SEED chooses another one. The others
are marked full.
"""

import dataclasses
import math
import os
import random

import pytest
import torch

from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.check_fp8 import expect, rounded, stand_for
from tests.kernels.interpreter.fp8_worker import make_inputs, surrounded, with_nan_behind
from tests.kernels.machine.gluon_machine import Machine
from tests.kernels.machine.harness import run_function, stray_writes

KERNEL = KERNELS["flash_fwd_fp8_ws"]
# Few enough for persistent programs to have several tiles each.
TARGET = dataclasses.replace(NAMED_TARGETS["h100"], sm_count=3)
SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
SAMPLE, CASES = 48, 400

LENGTHS = (1, 2, 63, 64, 65, 127, 129, 200, 257, 333)
DIMS = ((16, 16), (64, 64), (80, 80), (96, 48), (128, 128), (64, 128), (192, 128), (256, 256))
HEADS = ((1, 1), (2, 2), (6, 2), (9, 3), (8, 1))
DATA = ("normal", "outliers", "large", "dominant", "not finite")


def case(index: int) -> tuple[Problem, Config, str]:
    """A problem, one of all configs that can run it, and the character of its data."""
    lot = random.Random(1000 * SEED + index)
    dim, dim_v = lot.choice(DIMS)
    heads, kv_heads = lot.choice(HEADS)
    problem = Problem(
        batch=lot.choice((1, 2)), heads=heads, kv_heads=kv_heads, seqlen_q=lot.choice(LENGTHS),
        seqlen_k=lot.choice(LENGTHS), head_dim=dim, head_dim_v=dim_v, dtype="float8_e4m3fn",
        out_dtype=lot.choice(("bfloat16", "float16")), causal=lot.random() < 0.6,
        scales=lot.choice(("tensor", "head", "block")), v_layout=lot.choice(("rows", "permuted")),
    )  # fmt: skip
    config = lot.choice(KERNEL.space.configs(problem, TARGET))
    return problem, config, lot.choice(DATA)


def run(problem, config, given, seed, change=str, target=TARGET, patience_s=30.0):
    """out, and LSE in NaN, of the chain on operands that lie in NaN."""
    v = given.v if problem.v_layout == "rows" else with_nan_behind(given.v, problem)
    shape = (problem.batch, problem.heads, problem.seqlen_q, problem.head_dim_v)
    out = torch.full(shape, math.nan, dtype=given.out_dtype)
    lse = torch.full((math.prod(shape[:3]) + 64,), math.nan)
    tensors = {"q": given.q, "k": given.k, "v": v, "out": out}
    tensors = {name: surrounded(x) for name, x in tensors.items()}
    tensors["lse"] = lse[32:-32].view(shape[:3])
    tensors |= {name: x for name, x in given.descales.items() if x is not None}
    for scratch in KERNEL.scratch(problem):
        tensors[scratch.name] = torch.full(scratch.shape, math.nan).to(torch.float8_e4m3fn)
    for function in KERNEL.functions(problem, config):
        machine = Machine(seed=seed, patience_s=patience_s)
        run_function(KERNEL, function.name, problem, config, tensors, target, machine, change)
    return tensors["out"], tensors["lse"], lse


def why_wrong(problem, config, data, seed, **options) -> str | None:
    """How a run breaks the accuracy rule, or None."""
    given = rounded(problem, *make_inputs(problem, data, seed))
    expected = expect("", problem, *stand_for(given))
    out, lse, around = run(problem, config, given, seed, **options)
    nan = expected.out.isnan()
    if not torch.equal(out.isnan(), nan):
        return (
            f"NaN where there should be none or the other way round: {(out.isnan() != nan).sum()}"
        )
    excess = (out.double() - expected.out).abs() - expected.allowance
    if bool((excess > 0)[~nan].any()):
        return f"out: error {excess[~nan].max():.2e} above what is allowed"
    empty, bad = expected.lse == -math.inf, expected.lse.isnan() | (expected.lse == math.inf)
    if not torch.equal(lse == -math.inf, empty) or bool(out[empty].any()):
        return "rows that see no key"
    if not torch.equal(lse.isnan(), bad):
        return "NaN in the LSE"
    error = (lse.double() - expected.lse).masked_fill(empty | bad, 0.0).abs()
    if bool((error > expected.lse_tolerance + 1e-5 * expected.lse.abs()).any()):
        return f"lse: error {error.max():.2e}"
    stray = stray_writes(out) + int((~around[:32].isnan()).sum() + (~around[-32:].isnan()).sum())
    return f"{stray} stray writes" if stray and not bool(nan.any()) else None


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=() if i < SAMPLE else pytest.mark.full) for i in range(CASES)]
)
def test_configs_meet_the_accuracy_rule(index: int) -> None:
    problem, config, data = case(index)
    print(f"AUTOFLASH_TEST_SEED={SEED}: {problem.label()}, {config}, {data}")
    assert why_wrong(problem, config, data, index) is None


def test_the_sample_holds_each_choice() -> None:
    cases = [case(index) for index in range(SAMPLE)]
    for param in KERNEL.space.params:
        if param.name != "GROUP_MB":
            missing = set(param.choices) - {config[param.name] for _, config, _ in cases}
            assert len(missing) <= 1, (param.name, missing)
    assert {data for *_, data in cases} == set(DATA)


# -- NaN in values ---------------------------------------------------------------------------------

PROBLEM = Problem(
    batch=1, heads=2, kv_heads=1, seqlen_q=300, seqlen_k=420, head_dim=64, head_dim_v=64,
    dtype="float8_e4m3fn", scales="head", v_layout="permuted", causal=True,
)  # fmt: skip


@pytest.mark.parametrize("q_in_registers", [False, True])
@pytest.mark.parametrize("consumers", [2, 3])
@pytest.mark.parametrize("v_layout", ["rows", "permuted"])
def test_nan_values_reach_just_the_rows_that_see_them(
    v_layout: str, consumers: int, q_in_registers: bool
) -> None:
    problem = dataclasses.replace(PROBLEM, v_layout=v_layout)
    one = dataclasses.replace(TARGET, sm_count=1)
    values = {**KERNEL.default(problem, one), "CONSUMERS": consumers}
    values |= {"Q_IN_REGISTERS": q_in_registers}
    for keys in ((419,), (300, 410), (130, 131, 300), (5, 417, 418), tuple(range(100, 420, 7))):
        q, k, v = make_inputs(problem, "normal", 1)
        for i, key in enumerate(keys):
            v[0, 0, key, (11 * i) % 64] = math.nan
        given = rounded(problem, q, k, v)
        expected = expect("", problem, *stand_for(given))
        assert bool(expected.out.isnan().any())
        assert not bool(expected.out.isnan().all())
        out, *_ = run(problem, Config(**values), given, 0, target=one)
        assert torch.equal(out.isnan(), expected.out.isnan()), keys
        error = (out.double() - expected.out).abs() - expected.allowance
        assert not bool((error > 0).any())


# -- the machine notices what is wrong -------------------------------------------------------------

CONFIG = Config(
    CONSUMERS=3, BLOCK_N=128, STAGES=2, Q_IN_REGISTERS=False, SCHEDULE="dynamic", GROUP_MB=1,
    PV_PART=64, STAGING="own", PING_PONG="done", LOADER_REGISTERS=24, EXP2_BY_FMA=0,
)  # fmt: skip
# The last tile has rows of the first consumer alone; of the last key's NaN the second one clears.
SHORT = dataclasses.replace(PROBLEM, seqlen_q=252, seqlen_k=372)
DEFECTS = {
    "keys are not waited for": ("    mbarrier.wait(k_full.index(stage), phase)\n", ""),
    "values are not waited for": (
        "    mbarrier.wait(v_full.index(stage), phase)\n", "",
    ),
    "the ring is filled before it is free": (
        "            mbarrier.wait(free.index(stage), ((block // STAGES) & 1) ^ 1)\n", "",
    ),
    "a stage is never given back": (
        "    mbarrier.arrive(free.index(stage))\n    p, m_i", "    p, m_i",
    ),
    "scores are used too early": (
        "        s = warpgroup_mma_wait(0, deps=[s])\n",
        "        s = warpgroup_mma_wait(1, deps=[s])\n",
    ),
    "a mask is off by one": ("gl.minimum(position + 1 + seq", "gl.minimum(position + 2 + seq"),
    "the last block of keys is left out": (
        "    blocks = gl.maximum(gl.cdiv(end, BLOCK_N), 1)",
        "    blocks = gl.maximum(end // BLOCK_N, 1)",
    ),
    "a masked block is taken for a whole one": (
        "blocks - gl.minimum(whole // BLOCK_N, blocks)",
        "blocks - gl.minimum(gl.cdiv(whole, BLOCK_N) + 1, blocks)",
    ),
    "hidden blocks are counted wrong": (
        "hidden = blocks - gl.maximum(gl.cdiv(own_end, BLOCK_N), 1)",
        "hidden = blocks - gl.maximum(gl.cdiv(own_end, BLOCK_N) - 1, 1)",
    ),
    "v's scale is forgotten": ("(empty, 0.0, unit / l_i)", "(empty, 0.0, 1.0 / l_i)"),
    "k's scale is applied twice": (
        "            scale = scale * load_scale(k_scales, k_scaled & any_key)\n",
        "            scale = scale * load_scale(k_scales, k_scaled & any_key) ** 2\n",
    ),
    "out's place is filled again too early": (
        "once what lay there is on its way.\n    tma.store_wait(0)\n", "\n",
    ),
    "the counter is not set back": ("        gl.atomic_xchg(counter, 0)\n", ""),
    "a phase is off": (
        "    phase = (block // STAGES) & 1\n", "    phase = ((block + 1) // STAGES) & 1\n",
    ),
    "values are watched before they have landed": (
        "mbarrier.wait(v_landed.index(watched % STAGES), (watched // STAGES) & 1)", "pass",
    ),
    "values that not every row sees aren't watched": (
        "watched, i <= masked, STAGES", "watched, i < masked, STAGES",
    ),
    "a factor of the sums is left out": (
        "acc = acc * factor + new", "acc = acc + new",
    ),
    "a consumer without rows lets one block too many go": (
        "hidden = blocks - 1", "hidden = blocks",
    ),
    "keys are permuted once too often": (
        "key = start + word // 4 * 16 + word % 4 * 2", "key = start + word * 4",
    ),
}  # fmt: skip


def test_the_kernel_without_a_defect_is_right() -> None:
    for data in ("normal", "not finite"):
        assert [why_wrong(SHORT, CONFIG, data, seed) for seed in range(3)] == [None] * 3


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_machine_notices(defect: str) -> None:
    old, new = DEFECTS[defect]

    def change(text: str) -> str:
        assert text.count(old) == 1, f"{text.count(old)} times in the text"
        return text.replace(old, new)

    def noticed(seed: int) -> bool:
        data = DATA[-1] if seed % 2 else DATA[0]
        try:
            # One program has all tiles, and uses each buffer again.
            one = dataclasses.replace(TARGET, sm_count=1)
            options = {"change": change, "target": one, "patience_s": 1.0}
            return why_wrong(SHORT, CONFIG, data, seed, **options) is not None
        except (AssertionError, RuntimeError):
            return True

    # Some depend on the order of events.
    assert any(noticed(seed) for seed in range(40))
