"""Kernels with one fault each, for AUTOFLASH_TEST_KERNELS: what a tune must survive.

Each is flash_fwd with one config, but for its fault. None is ever served: ``adapt`` says that it
can't run any tensors. The model believes in all of them, so that they are tried first.
"""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoflash.kernels.flash_fwd import FlashFwd, FlashFwdVariant
from autoflash.kernels.kernel import Access, Argument, Call
from autoflash.problem import Problem
from autoflash.space import Config, Param, SearchSpace
from autoflash.target import Target

# The problem that the tests tune: the planted kernels serve what shares its code.
PROBLEM = Problem(
    batch=1, heads=4, kv_heads=2, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64,
    dtype="float16", causal=True,
)  # fmt: skip
CONFIG = Config(
    BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2, LOAD="pointer", GROUP_HEADS=1,
    DIAGONAL_FIRST=False, maxnreg=0,
)  # fmt: skip


def only(config: Config) -> SearchSpace:
    """The space of this one config."""
    params = (Param(name=name, choices=(value,), doc="fixed") for name, value in config.items())
    return SearchSpace(params=tuple(params), constraints=())


@dataclass(frozen=True, kw_only=True)
class PlantedVariant(FlashFwdVariant):
    """``harmless`` is the number of launches before the fault shows, where it depends on that."""

    name: str
    plant: str
    harmless: int

    def template_context(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Planted(FlashFwd):
    """The kernel ``name`` with the fault ``plant``.

    Its device function has one more argument: an int32 that is zero when the process starts, for
    faults that depend on the number of launches.
    """

    plant: str
    template = "planted.py.jinja"
    template_folder = Path(__file__).parent
    space = only(CONFIG)
    # Launches after which it does what it is planted for.
    harmless_launches = 0

    def serves(self, problem: Problem, target: Target) -> str | None:
        code = (problem.dtype, problem.head_dim, problem.head_dim_v, problem.causal)
        if code != (PROBLEM.dtype, PROBLEM.head_dim, PROBLEM.head_dim_v, PROBLEM.causal):
            return "planted for another problem"
        if target.vendor != "nvidia":
            return "planted for NVIDIA's GPUs"
        return super().serves(problem, target)

    def variant(self, problem: Problem, config: Config) -> PlantedVariant:
        harmless = self.harmless_launches
        return PlantedVariant(tma=False, name=self.name, plant=self.plant, harmless=harmless)

    def signature(self, problem: Problem, config: Config) -> dict[str, str]:
        return {**super().signature(problem, config), "launches": "*i32"}

    def bind(self, call: Call, config: Config) -> list[Argument]:
        return [*super().bind(call, config), _launches(self.name).data_ptr()]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        return self.space.configs(problem, target)

    def adapt(self, config: Config, access: Access) -> None:
        return None

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        return 1e-3 * super().estimate_ms(problem, config, target, blocks_per_sm)


@functools.cache
def _launches(name: str) -> torch.Tensor:
    """How often the kernel was launched in this process."""
    return torch.zeros(1, dtype=torch.int32, device="cuda")


class Loop(Planted):
    """Never ends."""

    name = "planted_loop"
    plant = "loop"


class LateWrite(Planted):
    """Right, until the 20th launch writes far outside of any buffer."""

    name = "planted_late_write"
    plant = "late_write"
    harmless_launches = 19


class Abort(Planted):
    """Takes the compiler's process with it."""

    name = "planted_abort"
    plant = "abort"


class OffByOne(Planted):
    """Hides the diagonal, and would win: it does nothing more once all checks have launched it."""

    name = "planted_off_by_one"
    plant = "off_by_one"
    # Three ragged problems and the full one.
    harmless_launches = 4


class Shared(Planted):
    """Ten stages of 128 keys and values: some 300 KB of shared memory."""

    name = "planted_shared"
    plant = "shared"
    space = only(Config(**{**CONFIG, "BLOCK_N": 128, "num_stages": 10}))


KERNELS = (Loop(), LateWrite(), Abort(), OffByOne(), Shared())
