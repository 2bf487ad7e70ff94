"""flash_bwd_ws and flash_bwd_split compile for sm_90, without a GPU: what the tuner may pick fits,
and its products wait for nothing that they need not.

By default a sample runs, whose seed is printed; AUTOFLASH_TEST_SEED chooses another one. The others
are marked full.
"""

import dataclasses
import os
import random
import re

import pytest

from autoflash.kernels import KERNELS, flash_bwd_split_space, flash_bwd_ws_space
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Problem
from autoflash.runtime.compiler import compile_config
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.ptxas import why_serialized
from autoflash.tuning.resources import Resources, resources_of

SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
SAMPLE, PER_PROBLEM = 8, 8
H100 = NAMED_TARGETS["h100"]
PROBLEM = Problem.parse({"batch": 4, "heads": 16, "seqlen": 4096, "head_dim": 128, "op": "bwd"})
DIMS = {"flash_bwd_ws": (40, 64, 96, 128), "flash_bwd_split": (64, 128, 192, 256)}


def cases() -> list[tuple[str, Problem, Config]]:
    """The default and some of what the tuner may pick, for each head dim and mask."""
    found = []
    for index, name in enumerate(DIMS):
        lot = random.Random(SEED + index)
        for dim in DIMS[name]:
            for causal in (False, True):
                dims = {"head_dim": dim, "head_dim_v": dim, "causal": causal}
                problem = dataclasses.replace(
                    PROBLEM, **dims, dtype=lot.choice(("float16", "bfloat16"))
                )
                configs = KERNELS[name].space.configs(problem, H100)
                picked = [KERNELS[name].default(problem, H100), *lot.sample(configs, PER_PROBLEM)]
                found += [(name, problem, config) for config in picked]
    return found


CASES = cases()
BY_DEFAULT = set(random.Random(SEED).sample(range(len(CASES)), SAMPLE))


def shared(name: str, problem: Problem, config: Config) -> list[dict[str, int]]:
    """What the space reckons with, of each function for Hopper."""
    if name == "flash_bwd_ws":
        return [flash_bwd_ws_space.shared_parts(config, problem)]
    return [
        flash_bwd_split_space.dkdv_shared(config, problem),
        flash_bwd_split_space.dq_shared(config, problem),
    ]


@pytest.mark.parametrize(
    "index",
    [
        pytest.param(index, marks=() if index in BY_DEFAULT else pytest.mark.full)
        for index in range(len(CASES))
    ],
)
def test_what_the_tuner_may_pick_compiles_well(index):
    name, problem, config = CASES[index]
    print(f"AUTOFLASH_TEST_SEED={SEED}: {name}, {problem.label()}, {config}")
    kernel = KERNELS[name]
    compiled = compile_config(kernel, problem, config, ALIGNED, H100)
    each = [resources_of(binary) for binary in compiled]
    assert Resources.most(each).why_not(H100) is None
    assert Resources.most(each).spills <= kernel.tolerable_spills
    assert [reason for reason in map(why_serialized, compiled) if reason] == []
    languages = [function.language for function in kernel.functions(problem, config)]
    hopper = [r for r, language in zip(each, languages, strict=True) if language == "gluon"]
    # But for some of the last KiB.
    for resources, parts in zip(hopper, shared(name, problem, config), strict=True):
        slack = resources.shared_bytes - sum(parts.values()) + parts["barriers"]
        assert 0 < slack <= parts["barriers"]


def test_dq_is_added_up_by_the_copy_engine():
    kernel = KERNELS["flash_bwd_ws"]
    # Without a counter of tiles, which is an atomic.
    config = Config(**{**kernel.default(PROBLEM, H100), "SCHEDULE": "grid"})
    _, main, _ = compile_config(kernel, PROBLEM, config, ALIGNED, H100)
    assert re.search(r"cp\.reduce\.async\.bulk\.tensor\.2d\S*\.add", main.asm["ptx"])
    assert not re.search(r"\b(atom|red)\.", main.asm["ptx"])
    split = KERNELS["flash_bwd_split"]
    for binary in compile_config(split, PROBLEM, split.default(PROBLEM, H100), ALIGNED, H100):
        assert "cp.reduce" not in binary.asm["ptx"]
