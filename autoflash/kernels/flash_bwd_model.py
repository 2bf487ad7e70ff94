"""The written model of flash_bwd's time: what orders candidates that haven't been timed.

Cycles of one step are counted for the matrix units, shared memory and the other pipelines, as in
flash_fwd_model, whose fitted factors it borrows: no backward has been fitted yet. The whole is
scaled to the rate that plain Triton had in a first study on an H200 (about 340 TFLOP/s at 128),
since kernels that serve the same problems are ranked in one list.
"""

from autoflash.dtypes import DTYPE_BYTES
from autoflash.kernels.flash_bwd_space import (
    accumulator_registers,
    owned,
    shared_bytes,
    walked,
)
from autoflash.kernels.flash_fwd_model import FACTORS
from autoflash.kernels.flash_fwd_space import MAX_REGISTERS, OTHER_REGISTERS, block_d, block_dv
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

# Bytes that shared memory delivers, exponentials and other operations that an SM does, per cycle.
_SHARED_BYTES = 128
_EXPONENTIALS = 16
_LANES = 128
# Operations per score beside its exponential: those of the softmax, and dS and its rounding.
_ELEMENTWISE = 1.5 * FACTORS.elementwise
_SCALE = 1.3


def blocks_per_sm(config: Config, part: str, problem: Problem, target: Target) -> int:
    """Resident programs of a part per SM, guessed before compiling."""
    threads = config.integer(f"{part}_WARPS") * target.warp_size
    registers = accumulator_registers(config, part, problem, target) + 2 * OTHER_REGISTERS
    by_registers = int(65536 / (threads * min(registers, MAX_REGISTERS)))
    by_shared = target.shared_memory // max(1, shared_bytes(config, part, problem, target))
    return max(1, min(by_registers, by_shared, target.threads_per_sm // threads))


def estimate_ms(problem: Problem, config: Config, target: Target, blocks_per_sm: int) -> float:
    """Milliseconds of the whole chain; ``blocks_per_sm`` bounds what is resident of each part."""
    clock = target.clock_ghz * 1e9
    cycles = sum(
        _part_cycles(problem, config, part, target, blocks_per_sm) for part in ("DKDV", "DQ")
    )
    order = FACTORS.overgrouped if config["GROUP_HEADS"] == 32 else 0.0
    order += FACTORS.ungrouped if problem.causal and config["GROUP_HEADS"] == 1 else 0.0
    # delta: out and dout are read once.
    row = block_dv(problem) * 2 * DTYPE_BYTES[problem.dtype] + 8
    delta = problem.batch * problem.heads * problem.seqlen_q * row / (target.bandwidth_tbs * 1e12)
    compute = _SCALE * cycles / clock * (1 + order)
    return (delta + max(compute, problem.min_bytes / (target.bandwidth_tbs * 1e12))) * 1e3


def _part_cycles(
    problem: Problem, config: Config, part: str, target: Target, most_blocks: int
) -> float:
    own, step = owned(config, part), walked(config, part)
    blocks = min(most_blocks, blocks_per_sm(config, part, problem, target))
    if part == "DKDV":
        length, other, heads = problem.seqlen_k, problem.seqlen_q, problem.batch * problem.kv_heads
    else:
        length, other, heads = problem.seqlen_q, problem.seqlen_k, problem.batch * problem.heads
    steps: float = -(-other // step) * (problem.group if part == "DKDV" else 1)
    pairs = problem.seqlen_q * problem.seqlen_k
    if problem.causal and pairs:
        steps = steps * problem.visible_pairs / pairs + (own / step + 1) / 2
    tiles = -(-length // own) * heads
    slots = target.sm_count * blocks
    waves = -(-tiles // slots) if tiles < 4 * slots else tiles / slots + 0.5
    dims = block_d(problem) + block_dv(problem)
    tile = FACTORS.tile + FACTORS.edge * own * dims * DTYPE_BYTES[problem.dtype] / 32
    return waves * (steps * _step_cycles(problem, config, part, target, blocks) * blocks + tile)


def _step_cycles(problem: Problem, config: Config, part: str, target: Target, blocks: int) -> float:
    """Cycles of one step of one program."""
    own, step = owned(config, part), walked(config, part)
    flops = target.tflops * 1e12 / target.sm_count / (target.clock_ghz * 1e9)
    dim, dim_v = block_d(problem), block_dv(problem)
    # A matrix instruction does 64 rows, filled or not, and reads its operands for each 16 deep.
    groups = max(1.0, own / 64)
    reads = FACTORS.operands * groups * 32 / _SHARED_BYTES
    scores = sum(
        max(128 * groups * step * d / flops, reads * d / 16 * (64 + step)) for d in (dim, dim_v)
    )
    sums = sum(
        max(128 * groups * step * d / flops, reads * step / 16 * d)
        for d in ((dim, dim_v) if part == "DKDV" else (dim,))
    )
    softmax = own * step * (FACTORS.exponential / _EXPONENTIALS + _ELEMENTWISE / _LANES)
    softmax += FACTORS.pointer * step * (dim + dim_v) * DTYPE_BYTES[problem.dtype] / 16 / _LANES
    strands = max(1.0, blocks * config.integer(f"{part}_WARPS") / 4)
    hidden = FACTORS.overlap * (1 - 1 / strands)
    waiting = FACTORS.no_pipeline / blocks if config.integer(f"{part}_STAGES") < 2 else 0.0
    return scores + sums + softmax * (1 - hidden) + waiting
