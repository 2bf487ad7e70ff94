"""flash_fwd_fp8_ws compiles for sm_90, without a GPU: what the tuner may pick neither spills much
nor waits for each product, and its products are those of e4m3.

By default a sample runs, whose seed is printed; AUTOFLASH_TEST_SEED chooses another one. The others
are marked full.
"""

import dataclasses
import itertools
import os
import random
import re

import pytest

from autoflash.dtypes import FP8
from autoflash.kernels import KERNELS
from autoflash.kernels.flash_fwd_fp8_ws_space import (
    pv_part,
    shared_parts,
)
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Problem
from autoflash.runtime.compiler import compile_config
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.ptxas import why_serialized
from autoflash.tuning.resources import resources_of

SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
SAMPLE = 5
PER_PROBLEM = 8

KERNEL = KERNELS["flash_fwd_fp8_ws"]
H100 = NAMED_TARGETS["h100"]
PROBLEM = Problem(
    batch=4, heads=16, kv_heads=4, seqlen_q=4096, seqlen_k=4096, head_dim=128, head_dim_v=128,
    dtype=FP8, scales="head", v_layout="permuted",
)  # fmt: skip
PROBLEMS = [
    dataclasses.replace(
        PROBLEM,
        head_dim=dim,
        head_dim_v=dim_v,
        causal=causal,
        scales=scales,
        v_layout=layout,
        out_dtype="float16" if causal else "",
    )
    for (dim, dim_v), causal, (scales, layout) in itertools.product(
        ((64, 64), (128, 128), (256, 256), (80, 48)),
        (False, True),
        (("head", "permuted"), ("block", "rows")),
    )
]


def cases() -> list[tuple[Problem, Config]]:
    """A default and some of what the tuner may pick, for each problem."""
    found = []
    for index, problem in enumerate(PROBLEMS):
        lot = random.Random(SEED + index)
        configs = KERNEL.space.configs(problem, H100)
        picked = lot.sample(configs, min(PER_PROBLEM, len(configs)))
        found += [(problem, config) for config in [KERNEL.default(problem, H100), *picked]]
    return found


CASES = cases()
BY_DEFAULT = set(random.Random(SEED).sample(range(len(CASES)), SAMPLE))


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=() if index in BY_DEFAULT else pytest.mark.full)
        for index in range(len(CASES))
    ],
)
def test_what_the_tuner_may_pick_compiles_well(index: int) -> None:
    problem, config = CASES[index]
    print(f"AUTOFLASH_TEST_SEED={SEED}: {problem.label()}, {config}")
    *turn, attention = compile_config(KERNEL, problem, config, ALIGNED, H100)
    resources = resources_of(attention)
    assert resources.why_not(H100) is None
    assert resources.spills <= KERNEL.tolerable_spills
    assert why_serialized(attention) is None
    # What the space reckons with is what the binary takes, but for some of the last KiB.
    parts = shared_parts(config, problem)
    assert 0 < resources.shared_bytes - sum(parts.values()) + parts["barriers"] <= 1024
    products = re.findall(
        r"wgmma\.mma_async\S*\.m64n(\d+)k32\.f32\.e4m3\.e4m3", attention.asm["ptx"]
    )
    assert set(products) == {str(config["BLOCK_N"]), str(pv_part(config, problem))}
    assert "cvt.rn.satfinite.e4m3x2.f32" in attention.asm["ptx"]
    assert len(turn) == (problem.v_layout == "rows")
    for compiled in turn:
        assert resources_of(compiled).spills == 0
        assert "ldmatrix.sync.aligned.m8n8.x4.trans" in compiled.asm["ptx"]
