"""The written model of flash_fwd's time: what orders candidates that haven't been timed.

Cycles of one key block on one SM are counted for the matrix units, shared memory, the exponential
unit and the other pipelines, and overlapped as far as independent warpgroups allow. The factors
were fitted to 2082 trials timed on an H200 (docs/flash_fwd.md); rates and sizes are the Target's.
"""

from dataclasses import dataclass

from autoflash.dtypes import DTYPE_BYTES
from autoflash.kernels.flash_fwd_space import (
    MAX_REGISTERS,
    OTHER_REGISTERS,
    accumulator_registers,
    block_d,
    block_dv,
    shared_bytes,
)
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

# Bytes that shared memory delivers, exponentials and other operations that an SM does, per cycle.
_SHARED_BYTES = 128
_EXPONENTIALS = 16
_LANES = 128


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What the fit found; 1.0 would be the plain count."""

    operands: float = 0.73  # shared-memory reads of the matrix instructions
    exponential: float = 0.7
    elementwise: float = 4.4  # operations per score beside its exponential
    row: float = 1.9  # cycles per row and step: maxima, sums, rescaling
    pointer: float = 14.0  # operations per 16-byte load by pointer
    overlap: float = 0.58  # share of the softmax that other warpgroups can hide
    no_pipeline: float = 90.0  # cycles that a single stage waits for its load
    tile: float = 3500.0  # cycles to start and end a program
    edge: float = 2.7  # bytes of q and out, over 32 a cycle
    masked: float = 2.7  # scores of the masked block, over 16 a cycle; half if it comes first
    ungrouped: float = 0.047  # causal: heads one after the other
    overgrouped: float = 0.045  # 32 heads at a time don't fit in L2
    diagonal_last: float = 0.02
    # The H200's shipped records are this much slower than the trials of the fit, so that kernels
    # with models of their own can be compared.
    sustained: float = 1.08


FACTORS = Factors()


def estimate_blocks_per_sm(problem: Problem, config: Config, target: Target) -> int:
    """Resident programs per SM, guessed before compiling."""
    registers = accumulator_registers(config, problem, target)
    return blocks_that_fit(config, target, registers, shared_bytes(config, problem, target))


def blocks_that_fit(config: Config, target: Target, registers: float, shared: int) -> int:
    """Programs per SM whose accumulators take so many ``registers`` per thread, and which need
    ``shared`` bytes of shared memory."""
    threads = config.integer("num_warps") * target.warp_size
    registers = min(registers + 2 * OTHER_REGISTERS, config.integer("maxnreg") or MAX_REGISTERS)
    by_registers = int(65536 / (threads * registers))
    by_shared = target.shared_memory // max(1, shared)
    return max(1, min(by_registers, by_shared, target.threads_per_sm // threads))


def estimate_ms(
    problem: Problem, config: Config, target: Target, blocks_per_sm: int, more: float = 0.0
) -> float:
    """Milliseconds of ``config`` with ``blocks_per_sm`` programs resident on an SM, each of which
    does ``more`` elementwise operations for a block of keys than this kernel."""
    rows = config.integer("BLOCK_M")
    clock = target.clock_ghz * 1e9
    step = _step_cycles(problem, config, target, blocks_per_sm, more)
    edge = block_d(problem) * DTYPE_BYTES[problem.dtype]
    edge += block_dv(problem) * DTYPE_BYTES[problem.dtype_of_out]
    tile = FACTORS.tile + FACTORS.edge * rows * edge / 32
    if problem.causal:
        masked = FACTORS.masked * rows * config.integer("BLOCK_N") / 16
        tile += masked / 2 if config["DIAGONAL_FIRST"] else masked
    tiles = -(-problem.seqlen_q // rows) * problem.batch * problem.heads
    slots = target.sm_count * blocks_per_sm
    waves = -(-tiles // slots) if tiles < 4 * slots else tiles / slots + 0.5
    per_wave = _key_blocks(problem, config) * step * blocks_per_sm + tile
    compute = waves * per_wave / clock * _order_factor(problem, config) * FACTORS.sustained
    return max(compute, problem.min_bytes / (target.bandwidth_tbs * 1e12)) * 1e3


def _step_cycles(
    problem: Problem, config: Config, target: Target, blocks_per_sm: int, more: float
) -> float:
    """Cycles of one block of keys, per program."""
    rows, keys = config.integer("BLOCK_M"), config.integer("BLOCK_N")
    # Operands of 8 bits go through the matrix unit twice as fast as those of 16.
    size = DTYPE_BYTES[problem.dtype]
    flops = target.tflops * (2 / size) * 1e12 / target.sm_count / (target.clock_ghz * 1e9)
    # A matrix instruction does 64 rows, filled or not, and reads its operands for each 16 deep.
    groups = max(1.0, rows / 64)
    reads = FACTORS.operands * groups * 16 * size / _SHARED_BYTES
    dim, dim_v = block_d(problem), block_dv(problem)
    scores = max(128 * groups * keys * dim / flops, reads * dim / 16 * (64 + keys))
    values = max(128 * groups * keys * dim_v / flops, reads * keys / 16 * dim_v)
    softmax = rows * keys * (FACTORS.exponential / _EXPONENTIALS + FACTORS.elementwise / _LANES)
    softmax += FACTORS.row * rows + more / _LANES
    if config["LOAD"] == "pointer":
        loads = keys * _dims(problem) * DTYPE_BYTES[problem.dtype_of_kv] / 16
        softmax += FACTORS.pointer * loads / _LANES
    strands = max(1.0, blocks_per_sm * config.integer("num_warps") / 4)
    hidden = FACTORS.overlap * (1 - 1 / strands)
    waiting = FACTORS.no_pipeline / blocks_per_sm if config.integer("num_stages") < 2 else 0.0
    return scores + values + softmax * (1 - hidden) + waiting


def _order_factor(problem: Problem, config: Config) -> float:
    """What the order of tiles and loops costs."""
    factor = 1.0 + (FACTORS.overgrouped if config["GROUP_HEADS"] == 32 else 0.0)
    if problem.causal:
        factor += FACTORS.ungrouped if config["GROUP_HEADS"] == 1 else 0.0
        factor += 0.0 if config["DIAGONAL_FIRST"] else FACTORS.diagonal_last
    return factor


def _key_blocks(problem: Problem, config: Config) -> float:
    """Mean number of key blocks that a row block walks."""
    rows, keys = config.integer("BLOCK_M"), config.integer("BLOCK_N")
    blocks = -(-problem.seqlen_k // keys)
    pairs = problem.seqlen_q * problem.seqlen_k
    if not problem.causal or pairs == 0:
        return blocks
    return blocks * problem.visible_pairs / pairs + (rows / keys + 1) / 2


def _dims(problem: Problem) -> int:
    return block_d(problem) + block_dv(problem)
