"""What the GPU tests share: poisoned memory and the accuracy rule on autoflash.attention."""

import math
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.errors import OutOfResourcesError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import ALIGNED, Access, Kernel
from autoflash.problem import Problem
from autoflash.reference import error_allowance, exact_attention
from autoflash.runtime.choose import Choice, choose
from autoflash.runtime.launcher import Launcher
from autoflash.space import Config
from autoflash.target import Target, current_target


def run_seed() -> int:
    """A seed that differs from run to run, but not between the processes of one run."""
    return zlib.crc32(os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid())).encode())


def any_config_of(name: str) -> Callable[[Problem, Target, Access], Choice]:
    """A stand-in for ``choose``: a config of the kernel's space, drawn by problem and seed.

    Skips the test where the kernel serves nothing of it.
    """
    kernel = KERNELS[name]
    print(f"seed {run_seed()}")

    def draw(problem: Problem, target: Target, access: Access) -> Choice:
        # Where a test goes on to the gradients, they are served as always.
        if problem.op != kernel.op:
            return choose(problem, target, access)
        reason = kernel.serves(problem, target)
        if reason is None:
            lot = random.Random(f"{run_seed()} {problem.label()}")
            config = kernel.adapt(lot.choice(kernel.space.configs(problem, target)), access)
            if config is not None:
                print(f"{problem.label()}: {config}")
                return Choice(kernel=kernel, config=config, how="default", layer="test", why="")
        if target.capability != 90 and name == "flash_fwd_ws":
            pytest.skip(str(reason))
        return choose(problem, target, access)

    return draw


def loaded(
    kernel: Kernel, problem: Problem, configs: Iterable[Config]
) -> Iterator[tuple[Config, Launcher]]:
    """Those of ``configs`` that the tuner may pick: a space holds what takes more shared memory
    than it can know before compiling, and the tuner drops these once they are compiled."""
    for config in configs:
        try:
            yield config, Launcher(kernel, problem, config, ALIGNED, current_target())
        except OutOfResourcesError as error:
            print(f"left out: {error}")


def hopper_config(problem: Problem, **changes: bool | int | str) -> Config:
    """flash_fwd_ws's default with changes; skips the test on other GPUs."""
    kernel, target = KERNELS["flash_fwd_ws"], current_target()
    reason = kernel.serves(problem, target)
    if reason is not None:
        pytest.skip(reason)
    return Config(**{**kernel.default(problem, target), **changes})


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(s, device="cuda", dtype=dtype, generator=generator) for s in shapes]


def poison(elements: int) -> None:
    """Fill and free memory, so that an output that isn't written shows as NaN."""
    for size in (elements, elements * 2, elements * 4):
        torch.full((max(1, size),), math.nan, device="cuda", dtype=torch.float16)


def assert_accurate(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options: object) -> Tensor:
    """Runs attention after poisoning and holds out and LSE against fp64."""
    poison(q.numel())
    out, lse = autoflash.attention(q, k, v, causal=causal, return_lse=True, **options)
    exact_lse = assert_meets_rule(out, q, k, v, causal=causal)
    assert torch.equal(torch.isinf(lse), torch.isinf(exact_lse))
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=2e-3)
    return out


def assert_meets_rule(out: Tensor, q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Holds ``out`` to the accuracy rule; returns the LSE in fp64."""
    scale = q.shape[-1] ** -0.5
    exact, exact_lse = exact_attention(q, k, v, causal=causal, scale=scale)
    allowed = error_allowance(q, k, v, causal=causal, scale=scale, exact=exact)
    assert bool(torch.isfinite(out).all()), "out holds NaN or infinity"
    error = (out.double() - exact).abs().max().item() if out.numel() else 0.0
    assert error <= allowed, f"error {error:.2e}, allowed {allowed:.2e}"
    return exact_lse
