"""flash_fwd_ws compiles for sm_90, without a GPU: what the tuner may pick neither spills much nor
waits for each product.

By default a sample runs, whose seed is printed; AUTOFLASH_TEST_SEED chooses another one. The others
are marked full.
"""

import ast
import dataclasses
import itertools
import os
import random
import re

import pytest
import triton
from triton.experimental.gluon._runtime import GluonASTSource

from autoflash.codegen.render import render
from autoflash.codegen.source_cache import load
from autoflash.kernels import KERNELS
from autoflash.kernels.hopper_tiles import shared_parts
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Problem
from autoflash.runtime import compiler
from autoflash.runtime.compiler import compile_function, gpu_target
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.ptxas import why_serialized
from autoflash.tuning.resources import resources_of

SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
SAMPLE = 10
PER_PROBLEM = 12

KERNEL = KERNELS["flash_fwd_ws"]
H100 = NAMED_TARGETS["h100"]
PROBLEM = Problem.parse({"batch": 4, "heads": 16, "seqlen": 4096, "head_dim": 128})
SHAPES = ((64, 64), (128, 128), (256, 256), (72, 40), (192, 128))
PROBLEMS = [
    dataclasses.replace(
        PROBLEM, head_dim=dim, head_dim_v=dim_v, causal=causal, dtype=dtype, kv_heads=16 // group
    )
    for (dim, dim_v), causal, (dtype, group) in itertools.product(
        SHAPES, (False, True), (("bfloat16", 1), ("float16", 8))
    )
]


def compile_config(*arguments):
    """The one binary of a kernel with one function."""
    (compiled,) = compiler.compile_config(*arguments)
    return compiled


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
def test_what_the_tuner_may_pick_compiles_well(index):
    problem, config = CASES[index]
    print(f"AUTOFLASH_TEST_SEED={SEED}: {problem.label()}, {config}")
    compiled = compile_config(KERNEL, problem, config, ALIGNED, H100)
    assert compiled.metadata.target == gpu_target(H100)
    resources = resources_of(compiled)
    assert resources.why_not(H100) is None
    assert resources.spills <= KERNEL.tolerable_spills
    assert why_serialized(compiled) is None
    # What the space reckons with is what the binary takes, but for some of the last KiB.
    parts = shared_parts(config, problem)
    assert 0 < resources.shared_bytes - sum(parts.values()) + parts["barriers"] <= 1024
    check_code(problem, config, compiled.asm["ptx"])


def check_code(problem: Problem, config: Config, ptx: str) -> None:
    """The instructions that the decisions lead to."""
    products = set(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16\.f32", ptx))
    dim_v = KERNEL.constexprs(problem, config)["BLOCK_DV"]
    assert products == {str(config["BLOCK_N"]), str(dim_v)}
    # Queries and output of packed heads have a dimension more than keys and values.
    loads = set(re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.shared", ptx))
    stores = set(re.findall(r"cp\.async\.bulk\.tensor\.(\d)d\.global", ptx))
    rank = "4" if config["PACK_HEADS"] == 1 else "5"
    assert loads == {"4", rank}
    assert stores == (set() if config["STAGING"] == "direct" else {rank})
    assert bool(re.search(r"\batom\.", ptx)) == (config["SCHEDULE"] == "dynamic")
    dealt = set(re.findall(r"setmaxnreg\.\S+\s+(\d+)", ptx))
    constexprs = KERNEL.constexprs(problem, config)
    assert {str(constexprs[f"{part}_REGISTERS"]) for part in ("CONSUMER", "LOADER")} <= dealt


def test_the_sample_is_as_large_as_it_says():
    assert len(BY_DEFAULT) == SAMPLE
    assert len(CASES) > 200


@pytest.mark.parametrize(
    "changes", [{"GROUP_MB": 64}, {"SCHEDULE": "grid"}], ids=lambda changes: next(iter(changes))
)
def test_what_only_changes_the_launch_compiles_to_the_same_binary(changes):
    config = Config(**{**KERNEL.default(PROBLEM, H100), "SCHEDULE": "persistent"})
    other = Config(**{**config, **changes})
    assert render(KERNEL, PROBLEM, other).text != render(KERNEL, PROBLEM, config).text
    one, two = (compile_config(KERNEL, PROBLEM, c, ALIGNED, H100) for c in (config, other))
    assert one.hash == two.hash


@pytest.mark.parametrize("schedule", ["persistent", "dynamic"])
def test_the_emitted_file_launches_what_it_holds(schedule, monkeypatch):
    """Its run() is called with a launch that compiles instead, as Triton's would on a GPU."""
    import torch

    problem = dataclasses.replace(PROBLEM, kv_heads=4, causal=schedule == "dynamic")
    config = Config(**{**KERNEL.default(problem, H100), "SCHEDULE": schedule, "PACK_HEADS": 4})
    source = render(KERNEL, problem, config)
    module = load(source)
    seen = {}

    class Launch:
        def __getitem__(self, grid):
            def launch(*arguments, **others):
                seen.update(grid=grid, arguments=arguments, others=others)

            return launch

    function = module.flash_fwd_ws
    monkeypatch.setattr(module, "flash_fwd_ws", Launch())
    monkeypatch.setattr(
        torch.cuda, "get_device_properties",
        lambda index: type("Properties", (), {"multi_processor_count": 132}),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    q, k, v = (torch.zeros(4, h, 512, 128, dtype=torch.bfloat16) for h in (16, 4, 4))
    module.run(q, k, v)
    assert seen["grid"] == (min(132, 4 * 4 * 16),)
    signature = KERNEL.signature(problem, config)
    assert len(seen["arguments"]) == len(signature)
    given = dict(zip(signature, seen["arguments"], strict=True))
    sizes = ("heads", "group", "n_heads", "group_heads", "seqlen_q", "seqlen_k", "n_tiles")
    assert [given[name] for name in sizes] == [16, 4, 16, 16, 512, 512, 256]
    others = {**KERNEL.constexprs(problem, config), **KERNEL.options(config)}
    assert seen["others"] == others
    # Triton's own types of the descriptors are those that we compile with.
    # It takes whole numbers that are one for constants.
    ones = {name: 1 for name, value in given.items() if isinstance(value, int) and value == 1}
    kinds = {}
    for name, kind in signature.items():
        if name.endswith("_desc"):
            host = given[name]
            kinds[name] = f"tensordesc<bf16{list(host.block_shape)},{host.layout!r}>"
        else:
            kinds[name] = "constexpr" if name in ones else kind
    constexprs = {**KERNEL.constexprs(problem, config), **ones}
    order = list(function.arg_names)
    all_kinds = kinds | dict.fromkeys(KERNEL.constexprs(problem, config), "constexpr")
    values = {(order.index(name),): value for name, value in constexprs.items()}
    triton.compile(
        GluonASTSource(function, all_kinds, values, {}), target=gpu_target(H100),
        options=KERNEL.options(config),
    )  # fmt: skip


def test_another_dtype_or_alignment_is_another_binary():
    config = KERNEL.default(PROBLEM, H100)
    half = dataclasses.replace(PROBLEM, dtype="float16")
    source = render(KERNEL, PROBLEM, config)
    assert ast.parse(source.text)
    (function,) = KERNEL.functions(PROBLEM, config)
    one = compile_function(source, KERNEL, function, ALIGNED, H100)
    two = compile_config(KERNEL, half, config, ALIGNED, H100)
    assert one.hash != two.hash
