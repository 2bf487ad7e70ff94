"""What the emitted flash_fwd_ws computes, on the Gluon machine, against fp64.

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
from autoflash.problem import Problem
from autoflash.reference import error_allowance, exact_attention
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from tests.kernels.interpreter.interpreter_worker import surrounded
from tests.kernels.machine.gluon_machine import Machine
from tests.kernels.machine.harness import run_function, stray_writes

KERNEL = KERNELS["flash_fwd_ws"]
# Few enough for persistent programs to have several tiles each.
TARGET = dataclasses.replace(NAMED_TARGETS["h100"], sm_count=3)
SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
SAMPLE, CASES = 48, 400

LENGTHS = (1, 2, 63, 64, 65, 127, 129, 200, 257, 333)
DIMS = (
    (8, 8), (40, 40), (64, 64), (72, 40), (80, 80), (96, 96), (128, 128), (64, 128), (192, 128),
    (256, 256),
)  # fmt: skip
HEADS = ((1, 1), (2, 2), (6, 2), (9, 3), (8, 1), (4, 1))


def case(index: int) -> tuple[Problem, Config]:
    """A problem and one of all configs that can run it."""
    lot = random.Random(1000 * SEED + index)
    dim, dim_v = lot.choice(DIMS)
    heads, kv_heads = lot.choice(HEADS)
    rows, keys = lot.choice(LENGTHS), lot.choice(LENGTHS)
    problem = Problem(
        batch=lot.choice((1, 2)), heads=heads, kv_heads=kv_heads, seqlen_q=rows, seqlen_k=keys,
        head_dim=dim, head_dim_v=dim_v, dtype=lot.choice(("float16", "bfloat16")),
        causal=lot.random() < 0.6,
    )  # fmt: skip
    return problem, lot.choice(KERNEL.space.configs(problem, TARGET))


def inputs(problem: Problem, seed: int) -> list[Tensor]:
    p, generator = problem, torch.Generator().manual_seed(seed)
    shapes = (
        (p.batch, p.heads, p.seqlen_q, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim_v),
    )
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    q[..., ::17] *= 1 + 20 * (seed % 3 == 0)
    return [x.to(getattr(torch, problem.dtype)) for x in (q, k, v)]


def why_wrong(problem, config, seed, change=str, target=TARGET, patience_s=30.0) -> str | None:
    """How a run breaks the accuracy rule, or None. Inputs and outputs lie in NaN."""
    q, k, v = inputs(problem, seed)
    out = torch.full((*q.shape[:3], problem.head_dim_v), math.nan, dtype=q.dtype)
    lse = torch.full((q[..., 0].numel() + 64,), math.nan)
    tensors = {"q": q, "k": k, "v": v, "out": out}
    tensors = {name: surrounded(x) for name, x in tensors.items()}
    tensors["lse"] = lse[32:-32].view(q.shape[:3])
    machine = Machine(seed=seed, patience_s=patience_s)
    run_function(KERNEL, "flash_fwd_ws", problem, config, tensors, target, machine, change)
    scale, causal = problem.head_dim**-0.5, problem.causal
    exact, exact_lse = exact_attention(q, k, v, causal=causal, scale=scale)
    allowed = error_allowance(q, k, v, causal=causal, scale=scale, exact=exact)
    found, found_lse = tensors["out"], tensors["lse"]
    if bool(found.isnan().any()) or bool(found_lse.isnan().any()):
        return "NaN"
    error = (found.double() - exact).abs().max().item()
    if error > allowed:
        return f"out: error {error:.2e}, allowed {allowed:.2e}"
    empty = exact_lse == -math.inf
    if not torch.equal(found_lse == -math.inf, empty) or bool(found[empty].any()):
        return "rows that see no key"
    error = (found_lse.double() - exact_lse).masked_fill(empty, 0.0).abs().max().item()
    if error > 1e-3:
        return f"lse: error {error:.2e}"
    stray = stray_writes(found) + int((~lse[:32].isnan()).sum() + (~lse[-32:].isnan()).sum())
    return f"{stray} stray writes" if stray else None


@pytest.mark.parametrize(
    "index", [pytest.param(i, marks=() if i < SAMPLE else pytest.mark.full) for i in range(CASES)]
)
def test_configs_meet_the_accuracy_rule(index):
    problem, config = case(index)
    print(f"AUTOFLASH_TEST_SEED={SEED}: {problem.label()}, {config}")
    assert why_wrong(problem, config, index) is None


def test_the_sample_holds_each_choice():
    configs = [case(index)[1] for index in range(SAMPLE)]
    for param in KERNEL.space.params:
        if param.name not in ("GROUP_MB", "EXP2_BY_FMA"):
            missing = set(param.choices) - {config[param.name] for config in configs}
            assert len(missing) <= 1, (param.name, missing)


# -- the machine notices what is wrong -------------------------------------------------------------

PROBLEM = Problem(
    batch=1, heads=2, kv_heads=1, seqlen_q=300, seqlen_k=300, head_dim=64, head_dim_v=64,
    dtype="float16", causal=True,
)  # fmt: skip
CONFIG = Config(
    CONSUMERS=3, PACK_HEADS=1, BLOCK_N=128, STAGES=2, OVERLAP=True, Q_IN_REGISTERS=False,
    SCHEDULE="dynamic", GROUP_MB=1, STAGING="own", PV_WAIT="middle", PING_PONG="done",
    LOADER_REGISTERS=24, EXP2_BY_FMA=0, RESCALE_ABOVE=8,
)  # fmt: skip
DEFECTS = {
    "keys are not waited for": ("    mbarrier.wait(k_full.index(stage), phase)\n", ""),
    "values are not waited for": (
        "        mbarrier.wait(v_full.index(v_stage), v_phase)\n        acc, p_left",
        "        acc, p_left",
    ),
    "the ring is filled before it is free": (
        "            mbarrier.wait(free.index(stage), ((block // STAGES) & 1) ^ 1)\n", "",
    ),
    "a stage is never given back": (
        "        mbarrier.arrive(free.index(stage))\n        left = pack", "        left = pack",
    ),
    "scores are used too early": (
        "            s = warpgroup_mma_wait(2, deps=[s])",
        "            s = warpgroup_mma_wait(3, deps=[s])",
    ),
    "a mask is off by one": ("gl.minimum(position + 1 + seq", "gl.minimum(position + 2 + seq"),
    "the last block of keys is left out": (
        "    blocks = gl.maximum(gl.cdiv(end, BLOCK_N), 1)",
        "    blocks = gl.maximum(end // BLOCK_N, 1)",
    ),
    "hidden blocks are counted wrong": (
        "gl.minimum((end - own_end) // BLOCK_N, blocks - 1)",
        "gl.minimum((end - own_end) // BLOCK_N + 1, blocks - 1)",
    ),
    "out's place is filled again too early": (
        "once what lay there is on its way.\n    tma.store_wait(0)\n", "\n",
    ),
    "the program ends before out is copied": (
        "turn)\n    tma.store_wait(0)\n\n\n@gluon.jit\ndef consume_0",
        "turn)\n\n\n@gluon.jit\ndef consume_0",
    ),
    "the counter is not set back": ("        gl.atomic_xchg(counter, 0)\n", ""),
    "a phase is off": (
        "    phase = (block // STAGES) & 1\n", "    phase = ((block + 1) // STAGES) & 1\n",
    ),
}  # fmt: skip


def test_the_kernel_without_a_defect_is_right():
    assert [why_wrong(PROBLEM, CONFIG, seed) for seed in range(4)] == [None] * 4


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_machine_notices(defect):
    old, new = DEFECTS[defect]

    def change(text: str) -> str:
        assert text.count(old) == 1, f"{text.count(old)} times in the text"
        return text.replace(old, new)

    def noticed(seed: int) -> bool:
        try:
            # One program has all tiles, and uses each buffer again.
            one = dataclasses.replace(TARGET, sm_count=1)
            return why_wrong(PROBLEM, CONFIG, seed, change, one, patience_s=1.0) is not None
        except (AssertionError, RuntimeError):
            return True

    # Some depend on the order of events.
    assert any(noticed(seed) for seed in range(40))
