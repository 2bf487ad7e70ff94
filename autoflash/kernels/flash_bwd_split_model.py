"""The written model of flash_bwd_split's time: what orders candidates that haven't been timed.

Seven products per block of rows and keys, and what the softmax leaves in the open. Fitted to 362
timings on an H200 (bf16, head dims 64, 128 and 256; 5 % off in the mean, and its first is within
3 % of the best in each of 19 problems).
"""

from autoflash.kernels.flash_bwd_split_space import ROWS, group_heads, keys_owned, paired
from autoflash.kernels.hopper_tiles import block_d
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

_EXPONENTIALS = 16
_LANES = 128
_ELEMENTWISE = 9.0
# Share of the softmax that the matrix unit waits for.
_OPEN = 0.17
# Of a pair the one waits for the other.
_PAIR = 1.147
# Cycles per step; cycles to start and end a program.
_STEP = 420.0
_TILE = 6700.0
# What a ring costs that holds only what is in use; the same of dq with one place more; dP early.
_SHALLOW = 0.27
_SHALLOW_DQ = 0.54
_TIGHT_DQ = 0.24
_EARLY = 0.09
# What an order that leaves L2 costs.
_UNGROUPED = 0.02


def estimate_ms(problem: Problem, config: Config, target: Target) -> float:
    """Milliseconds of the whole chain."""
    rows, keys = config.integer("DKDV_BLOCK_M"), keys_owned(problem)
    heads, kv_heads = problem.batch * problem.heads, problem.batch * problem.kv_heads
    dkdv = _step(problem, target, 4, rows * keys) * (_PAIR if paired(problem) else 1.0)
    dkdv *= 1 + _SHALLOW * (config["DKDV_STAGES"] == 1) + _EARLY * bool(config["DP_EARLY"])
    dkdv *= -(-problem.seqlen_q // rows) * problem.group
    dq = _step(problem, target, 3, ROWS * config.integer("DQ_BLOCK_N"))
    dq *= 1 + {2: _SHALLOW_DQ, 3: _TIGHT_DQ}.get(config.integer("DQ_SLOTS"), 0.0)
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
