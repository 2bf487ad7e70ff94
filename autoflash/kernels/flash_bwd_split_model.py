"""The written model of flash_bwd_split's time: what orders candidates that haven't been timed.

Seven products per block of rows and keys, and what the softmax leaves in the open. Not fitted yet:
the factors give the rates that a first study of the design had on an H200 (about 450 TFLOP/s at
128).
"""

from autoflash.kernels.flash_bwd_split_space import ROWS, group_heads, keys_owned, paired
from autoflash.kernels.flash_fwd_ws_space import block_d
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

_EXPONENTIALS = 16
_LANES = 128
_ELEMENTWISE = 9.0
# Share of the softmax that the matrix unit waits for.
_OPEN = 0.5
# Of a pair the one waits for the other.
_PAIR = 1.15
# Cycles per step; cycles to start and end a program.
_STEP = 350.0
_TILE = 4000.0
# What a ring that holds only what is in use, and an order that leaves L2, cost.
_SHALLOW = 0.3
_UNGROUPED = 0.15


def estimate_ms(problem: Problem, config: Config, target: Target) -> float:
    """Milliseconds of the whole chain."""
    rows, keys = config.integer("DKDV_BLOCK_M"), keys_owned(problem)
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    dkdv = _step(problem, target, 4, rows * keys) * (_PAIR if paired(problem) else 1.0)
    dkdv *= 1 + _SHALLOW * (config["DKDV_STAGES"] == 1)
    dkdv *= -(-problem.seqlen_q // rows) * problem.group
    dq = _step(problem, target, 3, ROWS * config.integer("DQ_BLOCK_N"))
    dq *= 1 + _SHALLOW * (config.integer("DQ_SLOTS") <= 2)
    dq *= -(-problem.seqlen_k // config.integer("DQ_BLOCK_N"))
    cycles = _part(problem, target, dkdv, kv_heads * -(-problem.seqlen_k // keys))
    cycles += _part(problem, target, dq, heads * -(-problem.seqlen_q // ROWS))
    one = problem.seqlen_q * problem.head_dim * 4
    if problem.causal and group_heads(config, problem, heads) * one > 0.75 * target.l2_bytes:
        cycles *= 1 + _UNGROUPED
    compute = cycles / (target.clock_ghz * 1e9)
    # out and dout go by once more before.
    around = heads * problem.seqlen_q * problem.head_dim * 4 / (target.bandwidth_tbs * 1e12)
    return (around + max(compute, problem.min_bytes / (target.bandwidth_tbs * 1e12))) * 1e3


def _step(problem: Problem, target: Target, products: int, scores: int) -> float:
    """Cycles of one step of a program."""
    flops = target.tflops * 1e12 / target.sm_count / (target.clock_ghz * 1e9)
    softmax = scores * (1 / _EXPONENTIALS + _ELEMENTWISE / _LANES)
    return products * 2 * scores * block_d(problem) / flops + _STEP + _OPEN * softmax


def _part(problem: Problem, target: Target, walk: float, tiles: int) -> float:
    """Cycles of one function, whose programs each walk a whole length in ``walk`` cycles."""
    pairs = problem.seqlen_q * problem.seqlen_k
    if problem.causal and pairs:
        walk *= min(1.0, problem.visible_pairs / pairs + 96 / max(1, problem.seqlen_k))
    turns = tiles / target.sm_count
    turns = float(-(-tiles // target.sm_count)) if turns < 4 else turns + 0.5
    return turns * (walk + _TILE)
