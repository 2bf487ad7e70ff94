"""The accuracy rule for configs that the tuner may pick: a sample by default, seed printed."""

import random

import pytest
import torch

from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.runtime.launcher import Launcher
from autoflash.space import Config
from autoflash.target import current_target
from autoflash.tuning.check import FullProblem, check_cases, run_poisoned, why_wrong
from tests.gpu.support import loaded, run_seed

SHAPES = [
    # head_dim, head_dim_v, group, rows, keys, batch
    (64, 64, 1, 2048, 2048, 12),
    (128, 128, 4, 1000, 1000, 4),
    (128, 96, 1, 777, 900, 32),
    (192, 128, 2, 640, 500, 16),
    (256, 256, 1, 1024, 1024, 12),
    (96, 96, 8, 130, 1100, 8),
    (40, 72, 3, 333, 333, 2),
    (80, 80, 1, 40, 40, 2),
    (8, 8, 1, 17, 17, 2),
]
# Bitwise: more often where warps and programs wait for each other.
REPEATS = {"flash_fwd": 20, "flash_fwd_ws": 200}
SEED = run_seed()


def problems() -> list[Problem]:
    return [
        Problem(
            batch=batch, heads=2 * group, kv_heads=2, seqlen_q=rows, seqlen_k=keys,
            head_dim=dim, head_dim_v=dim_v, dtype=dtype, causal=causal,
        )
        for dim, dim_v, group, rows, keys, batch in SHAPES
        for dtype in ("float16", "bfloat16")
        for causal in (False, True)
    ]  # fmt: skip


def check(launcher: Launcher, problem: Problem, config: Config) -> None:
    for case in check_cases(problem):
        assert why_wrong(launcher, case) is None, (problem.label(), config)
    full = FullProblem(problem)
    assert full.why_wrong(launcher) is None, (problem.label(), config)
    first, first_lse = run_poisoned(launcher, problem, full.q, full.k, full.v)
    for _ in range(REPEATS[launcher.source.kernel]):
        again, again_lse = run_poisoned(launcher, problem, full.q, full.k, full.v)
        assert torch.equal(first, again), "not bitwise repeatable"
        assert torch.equal(first_lse, again_lse), "not bitwise repeatable"


def configs_of(kernel: Kernel, problem: Problem) -> list[Config]:
    reason = kernel.serves(problem, current_target())
    if reason is not None:
        pytest.skip(reason)
    return kernel.space.configs(problem, current_target())


NAMES = [k.name for k in KERNELS.values() if k.op == "fwd" and not k.fp8]
EACH = pytest.mark.parametrize("name", NAMES)


@EACH
@pytest.mark.parametrize("index", range(len(problems())))
def test_a_config_of_each_problem_meets_the_accuracy_rule(name: str, index: int) -> None:
    problem = problems()[index]
    seed = SEED + index
    print(f"seed {seed}")
    configs = configs_of(KERNELS[name], problem)
    drawn = random.Random(seed).sample(configs, min(20, len(configs)))
    config, launcher = next(loaded(KERNELS[name], problem, drawn))
    check(launcher, problem, config)


@pytest.mark.full
@EACH
@pytest.mark.parametrize("index", range(len(problems())))
def test_every_config_meets_the_accuracy_rule(name: str, index: int) -> None:
    problem = problems()[index]
    for config, launcher in loaded(KERNELS[name], problem, configs_of(KERNELS[name], problem)):
        check(launcher, problem, config)
