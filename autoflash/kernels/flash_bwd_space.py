"""flash_bwd's search space: what may be tuned, and why a combination can't or shouldn't run."""

from autoflash.dtypes import DTYPE_BYTES
from autoflash.kernels.flash_fwd_space import (
    MAX_REGISTERS,
    OTHER_REGISTERS,
    block_d,
    block_dv,
    why_no_tma,
)
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import Target

# The parts that are tuned each for itself, by the prefix of their Params.
PARTS = ("DKDV", "DQ")
# Targets whose matrix unit reads both operands from shared memory.
_FROM_SHARED = (90, 100, 103)


def owned(config: Config, part: str) -> int:
    """Keys (DKDV) or rows (DQ) that a program of ``part`` owns."""
    return config.integer("DKDV_BLOCK_N" if part == "DKDV" else "DQ_BLOCK_M")


def walked(config: Config, part: str) -> int:
    """Rows (DKDV) or keys (DQ) of one step of ``part``."""
    return config.integer("DKDV_BLOCK_M" if part == "DKDV" else "DQ_BLOCK_N")


def accumulator_registers(config: Config, part: str, problem: Problem, target: Target) -> float:
    """32-bit registers per thread for what a program sums up, the scores and dP."""
    threads = config.integer(f"{part}_WARPS") * target.warp_size
    dims = block_d(problem) + (block_dv(problem) if part == "DKDV" else 0)
    return owned(config, part) * (dims + 2 * walked(config, part)) / threads


def shared_bytes(config: Config, part: str, problem: Problem, target: Target) -> int:
    """Shared memory that aligned operands take at least, as read off compiled binaries."""
    row = (block_d(problem) + block_dv(problem)) * DTYPE_BYTES[problem.dtype]
    stages = config.integer(f"{part}_STAGES")
    if target.vendor != "nvidia":
        stages -= 1
    own = owned(config, part) * row if target.capability in _FROM_SHARED else 0
    return own + max(1, stages) * walked(config, part) * row


def scratch_bytes(config: Config, part: str, problem: Problem, target: Target) -> int:
    """Shared memory that Triton may take beside the operands to change layouts: a safe guess."""
    row = max(block_d(problem), block_dv(problem))
    if target.capability in _FROM_SHARED:
        return owned(config, part) * walked(config, part) * DTYPE_BYTES[problem.dtype] + 4096
    # What a program owns passes through it once, P and dS in parts, and the sums at the end.
    return owned(config, part) * max(2 * row, 2 * walked(config, part)) + 4096


def _matches_lengths(part: str, config: Config, problem: Problem) -> str | None:
    kinds = {"M": ("query rows", problem.seqlen_q), "N": ("keys", problem.seqlen_k)}
    for letter, (noun, length) in kinds.items():
        name = f"{part}_BLOCK_{letter}"
        least = 32 if letter == "N" else 16
        if config.integer(name) > max(least, next_power_of_2(length)):
            return f"{name}={config[name]} is more than the {length} {noun}"
    return None


def _warps_have_rows(part: str, config: Config) -> str | None:
    warps, rows = config.integer(f"{part}_WARPS"), owned(config, part)
    if warps * 16 > max(2 * rows, 64):
        return f"{part}: {warps} warps would share the {rows} rows of a program more than in pairs"
    return None


def _fits_registers(part: str, config: Config, problem: Problem, target: Target) -> str | None:
    need = accumulator_registers(config, part, problem, target) + OTHER_REGISTERS
    # AMD's CDNA threads have 512 registers, half of them accumulators.
    limit = MAX_REGISTERS if target.vendor == "nvidia" else 512
    if need > limit:
        return f"{part}: accumulators need about {need:.0f} registers per thread, not {limit}"
    return None


def _fits_shared(part: str, config: Config, problem: Problem, target: Target) -> str | None:
    need = shared_bytes(config, part, problem, target)
    if need > target.shared_memory:
        have = f"{target.name} has {target.shared_memory}"
        return f"{part}: needs {need} bytes of shared memory, {have}"
    return None


def _has_heads(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    group, heads = config.integer("GROUP_HEADS"), problem.batch * problem.heads
    if group > next_power_of_2(heads):
        return f"GROUP_HEADS={group} is more than the {heads} heads there are"
    return None


def _params(part: str) -> tuple[Param, ...]:
    own, step = ("keys", "query rows") if part == "DKDV" else ("query rows", "keys")
    doc_m, doc_n = (
        ("of one step", "of a program") if part == "DKDV" else ("of a program", "of one step")
    )
    rows, keys = (step, own) if part == "DKDV" else (own, step)
    return (
        Param(name=f"{part}_BLOCK_M", choices=(16, 32, 64, 128), doc=f"{rows} {doc_m}"),
        Param(name=f"{part}_BLOCK_N", choices=(32, 64, 128), doc=f"{keys} {doc_n}"),
        Param(name=f"{part}_WARPS", choices=(4, 8), doc="warps of a program"),
        Param(name=f"{part}_STAGES", choices=(1, 2, 3), doc="depth of the load pipeline"),
    )


def _constraints(part: str) -> tuple[Constraint, ...]:
    tile = (f"{part}_BLOCK_M", f"{part}_BLOCK_N")
    warps, stages = f"{part}_WARPS", f"{part}_STAGES"
    return (
        Constraint(
            name=f"{part} lengths",
            why_not=lambda config, problem, _: _matches_lengths(part, config, problem),
            reads=tile,
        ),
        Constraint(
            name=f"{part} rows per warp",
            why_not=lambda config, _problem, _target: _warps_have_rows(part, config),
            reads=(*tile, warps),
        ),
        Constraint(
            name=f"{part} registers",
            why_not=lambda *given: _fits_registers(part, *given),
            reads=(*tile, warps),
        ),
        Constraint(
            name=f"{part} shared memory",
            why_not=lambda *given: _fits_shared(part, *given),
            reads=(*tile, stages),
        ),
    )


SPACE = SearchSpace(
    params=(
        *(param for part in PARTS for param in _params(part)),
        Param(name="GROUP_HEADS", choices=(1, 8, 32), doc="heads that run side by side (L2)"),
        Param(name="LOAD", choices=("pointer", "tma"), doc="how what is walked is loaded"),
    ),
    constraints=(
        *(constraint for part in PARTS for constraint in _constraints(part)),
        Constraint(name="load path", why_not=why_no_tma, reads=("LOAD",)),
        Constraint(name="tile order", why_not=_has_heads, reads=("GROUP_HEADS",)),
    ),
)
