"""What the emitted flash_bwd_ws and flash_bwd_split compute, on the Gluon machine, against fp64;
what goes before and after is computed by torch here, and in Triton's interpreter in
tests/kernels/interpreter.

By default a sample runs, whose seed is printed; AUTOFLASH_TEST_SEED chooses another one. The others
are marked full.
"""

import dataclasses
import math
import os
import random

import pytest
import torch
from torch import Tensor

from autoflash.kernels import KERNELS
from autoflash.kernels.flash_bwd_ws_space import lead_rows
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.check_bwd import make_gradient_case
from tests.kernels.interpreter.interpreter_worker import surrounded
from tests.kernels.machine.gluon_machine import Machine
from tests.kernels.machine.harness import run_function, stray_writes

# The functions that run on the machine.
FUNCTIONS = {
    "flash_bwd_ws": ("flash_bwd_ws",),
    "flash_bwd_split": ("flash_bwd_split_dkdv", "flash_bwd_split_dq"),
}
# Few SMs: a program of a dynamic schedule computes several tiles.
TARGET = dataclasses.replace(NAMED_TARGETS["h100"], sm_count=2)
ONE_SM = dataclasses.replace(TARGET, sm_count=1)
SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
SAMPLE, CASES = 32, 300

LENGTHS = (1, 2, 63, 64, 65, 127, 129, 200, 257, 333)
DIMS = {
    "flash_bwd_ws": (8, 40, 64, 72, 80, 96, 128),
    "flash_bwd_split": (8, 64, 72, 96, 128, 192, 256),
}
HEADS = ((1, 1), (2, 2), (6, 2), (3, 1))


def case(name: str, index: int) -> tuple[Problem, Config]:
    """A problem and one of all configs that can run it."""
    lot = random.Random(1000 * SEED + index)
    dim = lot.choice(DIMS[name])
    heads, kv_heads = lot.choice(HEADS)
    problem = Problem(
        batch=lot.choice((1, 2)), heads=heads, kv_heads=kv_heads, seqlen_q=lot.choice(LENGTHS),
        seqlen_k=lot.choice(LENGTHS), head_dim=dim, head_dim_v=dim,
        dtype=lot.choice(("float16", "bfloat16")), causal=lot.random() < 0.6, op="bwd",
    )  # fmt: skip
    return problem, lot.choice(KERNELS[name].space.configs(problem, TARGET))


def why_wrong(
    name, problem, config, seed, change=str, patience_s=30.0, target=TARGET
) -> str | None:
    """How a run breaks the accuracy rule, or None. Inputs and outputs lie in NaN; rows that see no
    key hold NaN too."""
    p, generator = problem, torch.Generator().manual_seed(seed)
    rows, keys = (p.heads, p.seqlen_q), (p.kv_heads, p.seqlen_k)
    q, k, v, dout = (
        torch.randn(p.batch, *size, p.head_dim, generator=generator).to(getattr(torch, p.dtype))
        for size in (rows, keys, keys, rows)
    )
    q[..., ::17] *= 1 + 10 * (seed % 3 == 0)
    if seed % 5 == 4:
        # Scores far below zero: exp(-lse) overflows.
        q[..., 0], k[..., 0] = 60, -60
    dlse = torch.randn(q.shape[:3], generator=generator) if seed % 2 else None
    gradients = make_gradient_case("machine", p, q, k, v, dout, dlse)
    tensors = {n: surrounded(x) for n, x in {"q": q, "k": k, "v": v, "dout": dout}.items()}
    if p.causal:
        for given in ("q", "dout"):
            tensors[given][:, :, : max(0, p.seqlen_q - p.seqlen_k)] = math.nan
    for grad, x in (("dq", q), ("dk", k), ("dv", v)):
        tensors[grad] = surrounded(torch.full_like(x, math.nan))
    tensors |= scratch(name, problem, gradients.inputs)
    for function in FUNCTIONS[name]:
        machine = Machine(seed=seed, patience_s=patience_s)
        run_function(KERNELS[name], function, problem, config, tensors, target, machine, change)
    if "sums" in tensors:
        tensors["dq"].copy_(tensors["sums"][:, :, own_rows(p)] * p.head_dim**-0.5)
    stray = sum(stray_writes(tensors[grad]) for grad in ("dq", "dk", "dv"))
    if stray:
        return f"{stray} stray writes"
    return gradients.compare((tensors["dq"], tensors["dk"], tensors["dv"]))


def own_rows(problem: Problem) -> slice:
    """Where a head's rows lie in its statistics and sums."""
    return slice(lead_rows(problem), lead_rows(problem) + problem.seqlen_q)


def scratch(name: str, problem: Problem, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What the first function of the chain makes."""
    made = {s.name: torch.zeros(s.shape) for s in KERNELS[name].scratch(problem)}
    lse, rows = inputs["lse"], own_rows(problem)
    made["lse2"].fill_(math.inf)
    made["lse2"][..., rows] = lse.masked_fill(lse == -math.inf, math.inf) * math.log2(math.e)
    delta = (inputs["out"].float() * inputs["dout"].float()).sum(-1)
    made["minus_delta"][..., rows] = inputs.get("dlse", 0.0) - delta
    return made


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=() if i < SAMPLE else pytest.mark.full) for i in range(CASES)]
)
def test_configs_meet_the_accuracy_rule(name, index):
    problem, config = case(name, index)
    print(f"AUTOFLASH_TEST_SEED={SEED}: {problem.label()}, {config}")
    assert why_wrong(name, problem, config, index) is None


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_sample_holds_each_choice(name):
    configs = [case(name, index)[1] for index in range(SAMPLE)]
    for param in KERNELS[name].space.params:
        if param.name != "GROUP_MB":
            assert {config[param.name] for config in configs} == set(param.choices)


# -- the machine notices what is wrong -------------------------------------------------------------

PROBLEM = Problem(
    batch=1, heads=2, kv_heads=1, seqlen_q=300, seqlen_k=202, head_dim=64, head_dim_v=64,
    dtype="float16", causal=True, op="bwd",
)  # fmt: skip
CONFIG = Config(
    BLOCK_M=64, STAGES=2, DQ_SPLIT="columns", DP_EARLY=False, TURNS=True, SPREAD=False,
    SCHEDULE="dynamic", GROUP_MB=1,
)  # fmt: skip
DEFECTS = {
    "dS of the other consumer is not waited for": (
        "    mbarrier.wait(ds_full.index(before & 1), (before >> 1) & 1)\n"
        "    dq = dq_products(c, ds_s, k_s, before, last_place, zero_q, CONSUMERS, DQ_SPLIT)\n"
        "    mbarrier.wait(q_full",
        "    dq = dq_products(c, ds_s, k_s, before, last_place, zero_q, CONSUMERS, DQ_SPLIT)\n"
        "    mbarrier.wait(q_full",
    ),
    "dS has one buffer": (
        "    ds_s.index((block & 1) * CONSUMERS + c).store(ds)\n",
        "    ds_s.index((before & 1) * CONSUMERS + c).store(ds)\n",
    ),
    "dq's place is filled again too early": (
        "once what lay there is on its way.\n    tma.store_wait(0)\n    matrix(dq_s",
        "\n    matrix(dq_s",
    ),
    "rows are loaded before their place is free": (
        "            mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)\n", "",
    ),
    "k is overwritten by the next tile's but one": (
        "    mbarrier.wait(k_free.index(place), ((turn // (k_s.shape[0] // PARTS)) & 1) ^ 1)\n", "",
    ),
    "k has one place": ("        k_place = turn & 1\n", "        k_place = 0\n"),
    "v is overwritten by the next tile's": (
        "                mbarrier.wait(v_free.index(0), (turn & 1) ^ 1)\n", "",
    ),
    "v is given back before the tile's last block": (
        "        mbarrier.wait(v_full.index(0), turn & 1)\n",
        "        mbarrier.wait(v_full.index(0), turn & 1)\n"
        "        mbarrier.arrive(v_free.index(0))\n",
    ),
    "dq of another tile's block is made with this tile's k": (
        "k_s, before, last_place, zero_q, CONSUMERS, DQ_SPLIT)\n    mbarrier.wait(q_full",
        "k_s, before, k_place, zero_q, CONSUMERS, DQ_SPLIT)\n    mbarrier.wait(q_full",
    ),
    "the next tile's k is not waited for": (
        "        mbarrier.wait(k_full.index(k_place), (turn // 2) & 1)\n", "",
    ),
    "what is no dq is handed in": ("if last_at >= 0:", "if block >= 0:"),
    "dk lies where dq is still being read": (
        "        put_out(dk * scale, dk_desc, place, batch, head_kv, start_n + c * 64, 0, 1)\n",
        "        matrix(place).store((dk * scale).to(dk_desc.dtype))\n"
        "        copy_out(dk_desc, [batch, head_kv, start_n + c * 64, 0], place)\n",
    ),
    "dout is not waited for": ("    mbarrier.wait(dout_full.index(stage), phase)\n", ""),
    "the last block's dq is forgotten": (
        "(0, deps=[dq])\n    hand_in(c, dq,", "(0, deps=[dq])\n    hand_in(c, dq * 0,",
    ),
    "a mask is off by one": ("needed = key - seqlen_k", "needed = key + 1 - seqlen_k"),
    "keys behind the last are not masked": (
        "    if start_n + BLOCK_N > seqlen_k:\n        masked = blocks\n", "",
    ),
    "rows are counted from the wrong one": (
        "first = gl.maximum(start_n - seqlen_k", "first = gl.maximum(start_n + 1 - seqlen_k",
    ),
    "statistics are not aligned": (
        "        statistics = (batch * kv_heads * group + head) * padded + lead",
        "        statistics = (batch * kv_heads * group + head) * padded",
    ),
    "a group's heads are mixed up": (
        "        statistics = (batch * kv_heads * group + head) * padded + lead",
        "        statistics = (batch * kv_heads * group + head_kv) * padded + lead",
    ),
    "the consumers wait for each other": ("(block & 1) ^ (c == 0)", "(block & 1)"),
}  # fmt: skip


SPLIT_CONFIG = Config(
    DKDV_BLOCK_M=64, DKDV_STAGES=2, DP_EARLY=False, DQ_BLOCK_N=64, DQ_SLOTS=3, GROUP_MB=1
)  # fmt: skip
SPLIT_DEFECTS = {
    "P is not waited for": ("    mbarrier.wait(p_full.index(stage), phase)\n", ""),
    "v is not waited for": (
        "    mbarrier.wait(full.index(at_v % SLOTS), (at_v // SLOTS) & 1)\n", "",
    ),
    "k is given back too early": (
        "    dq = warpgroup_mma(ds, k, dq, is_async=True)\n",
        "    dq = warpgroup_mma(ds, k, dq, is_async=True)\n"
        "    mbarrier.arrive(free.index((2 * i) % SLOTS))\n",
    ),
    "a row's statistics are another's": (
        "lse2 = gl.load(lse2_ptr + statistics)", "lse2 = gl.load(lse2_ptr + statistics // 2)",
    ),
    "dk is not scaled": ("put_out(acc * scale, dk_desc", "put_out(acc, dk_desc"),
}  # fmt: skip


def test_the_kernels_without_a_defect_are_right():
    wide = dataclasses.replace(PROBLEM, head_dim=256, head_dim_v=256)
    split = {**SPLIT_CONFIG, "DQ_BLOCK_N": 32}
    for seed in range(4):
        assert why_wrong("flash_bwd_ws", PROBLEM, CONFIG, seed) is None
        assert why_wrong("flash_bwd_split", PROBLEM, SPLIT_CONFIG, seed) is None
        assert why_wrong("flash_bwd_split", wide, Config(**split), seed) is None


@pytest.mark.parametrize("seed", [4, 9])
def test_keys_behind_the_last_are_hidden_from_rows_before_the_first(seed):
    # The statistics begin two rows before the first; scores are far below zero.
    problem = dataclasses.replace(PROBLEM, seqlen_q=9, seqlen_k=15)
    assert lead_rows(problem) == 2
    assert why_wrong("flash_bwd_ws", problem, CONFIG, seed) is None


@pytest.mark.parametrize("defect", SPLIT_DEFECTS)
def test_the_machine_notices_in_the_split_form(defect):
    old, new = SPLIT_DEFECTS[defect]

    def change(text: str) -> str:
        assert text.count(old) == 1, f"{text.count(old)} times in the text"
        return text.replace(old, new)

    def noticed(seed: int) -> bool:
        # Wide enough for consumers in pairs.
        wide = {"head_dim": 256, "head_dim_v": 256, "causal": seed % 2 == 0}
        problem = dataclasses.replace(PROBLEM, **wide)
        config = Config(**{**SPLIT_CONFIG, "DQ_BLOCK_N": 32})
        try:
            return why_wrong("flash_bwd_split", problem, config, seed, change, 1.0) is not None
        except (AssertionError, RuntimeError):
            return True

    assert any(noticed(seed) for seed in range(40))


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_machine_notices(defect):
    old, new = DEFECTS[defect]

    def change(text: str) -> str:
        assert text.count(old) == 1, f"{text.count(old)} times in the text"
        return text.replace(old, new)

    def noticed(seed: int) -> bool:
        # Two tiles of many blocks of rows, or four of one.
        lengths = {"seqlen_q": 40, "seqlen_k": 500} if seed % 4 > 1 else {}
        problem = dataclasses.replace(PROBLEM, causal=seed % 2 == 0, **lengths)
        try:
            return why_wrong("flash_bwd_ws", problem, CONFIG, seed, change, 1.0, ONE_SM) is not None
        except (AssertionError, RuntimeError):
            return True

    # Some depend on the order of events.
    assert any(noticed(seed) for seed in range(40))
