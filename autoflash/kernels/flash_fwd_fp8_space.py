"""flash_fwd_fp8's search space: what may be tuned, and why a combination can't or shouldn't run."""

from autoflash.dtypes import DTYPE_BYTES, FP8
from autoflash.kernels.flash_fwd_space import (
    MAX_REGISTERS,
    OTHER_REGISTERS,
    block_dv,
    has_heads,
    matches_keys,
    matches_queries,
    register_cap_helps,
)
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import Target


def block_d(problem: Problem) -> int:
    """head_dim as tiles have it: an fp8 matrix instruction takes 32 elements at a time."""
    return max(32 if problem.dtype == FP8 else 16, next_power_of_2(problem.head_dim))


def accumulator_registers(config: Config, problem: Problem, target: Target) -> float:
    """32-bit registers per thread for the scores, the output accumulator and, where the tensor
    cores drop bits of fp8 sums (sm_90), the sum over one block of keys."""
    threads = config.integer("num_warps") * target.warp_size
    accumulators = 2 if target.capability == 90 and problem.dtype == FP8 else 1
    columns = accumulators * block_dv(problem) + config.integer("BLOCK_N")
    return config.integer("BLOCK_M") * columns / threads


def shared_bytes(config: Config, problem: Problem, target: Target) -> int:
    """Shared memory that aligned operands take at least.

    NVIDIA keeps every stage of K and V as they are loaded; with one stage both use the same place.
    AMD holds one stage less, and one alone of what becomes e4m3fnuz. Where the matrix unit reads
    both operands from shared memory (sm_90, sm_100) a query tile of 64 rows or more lies there too,
    and a v by rows is transposed by way of registers, so that one stage of it does.
    """
    rows, keys, stages = (config.integer(n) for n in ("BLOCK_M", "BLOCK_N", "num_stages"))
    shared_operands = target.capability in (90, 100, 103)
    key, value = keys * block_d(problem), keys * block_dv(problem)
    if target.vendor != "nvidia":
        stages = 1 if config["FNUZ"] else stages - 1
    query = 0
    if shared_operands and rows >= 64:
        query = rows * block_d(problem) * DTYPE_BYTES[problem.dtype]
    if stages < 2:
        return query + max(key, value)
    turned = shared_operands and problem.dtype == FP8 and problem.v_layout == "rows"
    return query + stages * key + (value if turned else stages * value)


def needs_fnuz(problem: Problem, target: Target) -> bool:
    """Whether the matrix unit takes e4m3fnuz in place of e4m3fn (MI300)."""
    return target.arch in ("gfx940", "gfx941", "gfx942") and problem.dtype == FP8


def _is_its_e4m3(config: Config, problem: Problem, target: Target) -> str | None:
    if config["FNUZ"] != needs_fnuz(problem, target):
        takes = "e4m3fn" if config["FNUZ"] else "e4m3fnuz"
        return f"the matrix unit of {target.arch} takes {takes} here"
    return None


def _fits_shared(config: Config, problem: Problem, target: Target) -> str | None:
    need = shared_bytes(config, problem, target)
    if need > target.shared_memory:
        return f"needs {need} bytes of shared memory, {target.name} has {target.shared_memory}"
    return None


def _fits_registers(config: Config, problem: Problem, target: Target) -> str | None:
    need = accumulator_registers(config, problem, target) + OTHER_REGISTERS
    # AMD's CDNA threads have 512 registers, half of them accumulators.
    limit = MAX_REGISTERS if target.vendor == "nvidia" else 512
    cap = config.integer("maxnreg") or limit
    if need > cap:
        return f"accumulators need about {need:.0f} registers per thread, the limit is {cap}"
    return None


def may_share_rows(rows: int, problem: Problem) -> bool:
    """Whether two warps may share each of so many ``rows``: where their accumulators don't fit in
    the registers of one."""
    return rows == 64 and block_dv(problem) == 256


def _rows_per_warp(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    rows, warps = config.integer("BLOCK_M"), config.integer("num_warps")
    if warps * 16 > max(rows, 64) and not may_share_rows(rows, problem):
        return f"{warps} warps need {warps * 16} query rows, so that a row stays in one warp"
    return None


SPACE = SearchSpace(
    params=(
        # A tile lies in one block of 128 rows or keys: each has one scale.
        Param(name="BLOCK_M", choices=(16, 32, 64, 128), doc="query rows of a program"),
        Param(name="BLOCK_N", choices=(32, 64, 128), doc="keys of one step"),
        Param(name="num_warps", choices=(4, 8), doc="warps of a program"),
        Param(name="num_stages", choices=(1, 2, 3, 4), doc="depth of the load pipeline"),
        Param(name="GROUP_HEADS", choices=(1, 8, 32), doc="heads that run side by side (L2)"),
        Param(name="FNUZ", choices=(False, True), doc="e4m3fnuz for the matrix unit (MI300)"),
        Param(name="maxnreg", choices=(0, 128, 168), doc="cap on registers; 0 is none"),
    ),
    constraints=(
        Constraint(name="query rows", why_not=matches_queries),
        Constraint(name="keys", why_not=matches_keys),
        Constraint(name="rows per warp", why_not=_rows_per_warp),
        Constraint(name="matrix unit", why_not=_is_its_e4m3),
        Constraint(name="tile order", why_not=has_heads),
        Constraint(name="register cap", why_not=register_cap_helps),
        Constraint(name="registers", why_not=_fits_registers),
        Constraint(name="shared memory", why_not=_fits_shared),
    ),
)
