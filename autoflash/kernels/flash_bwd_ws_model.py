"""The written model of flash_bwd_ws's time: what orders candidates that haven't been timed.

Five products per block of rows and keys, of which the matrix unit does so many at a time, and what
the softmax and the exchange of dS leave in the open. Not fitted yet: the factors give the rates
that a first study of the design had on an H200 (550 TFLOP/s at 128, 467 at 64).
"""

from autoflash.kernels.flash_bwd_ws_space import KEYS, group_heads, tile_count
from autoflash.kernels.flash_fwd_ws_space import block_d
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

_EXPONENTIALS = 16
_LANES = 128
# Operations per score beside its exponential: masks, products, rounding, the exchange of dS.
_ELEMENTWISE = 10.0
# Share of them that the matrix unit waits for, without and with turns.
_OPEN = 0.5
_IN_TURNS = 0.45
# Cycles per step: barriers, the first instruction's latency; cycles to start and end a program.
_STEP = 350.0
_TILE = 4000.0
# What a ring of one stage, and an order that leaves L2, cost.
_SHALLOW = 0.3
_UNGROUPED = 0.15


def estimate_ms(problem: Problem, config: Config, target: Target) -> float:
    """Milliseconds of the whole chain."""
    rows = config.integer("BLOCK_M")
    flops = target.tflops * 1e12 / target.sm_count / (target.clock_ghz * 1e9)
    matrix = 5 * 2 * rows * KEYS * block_d(problem) / flops
    scores = rows * KEYS * (1 / _EXPONENTIALS + _ELEMENTWISE / _LANES)
    step = matrix + _STEP + scores * (_IN_TURNS if config["TURNS"] else _OPEN)
    if config["STAGES"] == 1:
        step *= 1 + _SHALLOW
    steps: float = -(-problem.seqlen_q // rows) * problem.group
    pairs = problem.seqlen_q * problem.seqlen_k
    if problem.causal and pairs:
        steps = steps * problem.visible_pairs / pairs + (KEYS / rows + 1) / 2 * problem.group
        # What runs side by side should stay in L2: q and dout, and the sums of dq.
        one = problem.group * problem.seqlen_q * problem.head_dim * 8
        if group_heads(config, problem) * one > 0.75 * target.l2_bytes:
            step *= 1 + _UNGROUPED
    tiles = tile_count(problem)
    turns = tiles / target.sm_count
    turns = float(-(-tiles // target.sm_count)) if turns < 4 else turns + 0.5
    compute = turns * (steps * step + _TILE) / (target.clock_ghz * 1e9)
    # out, dout and the sums of dq go by once more each before and after.
    row = problem.head_dim * (3 * 2 + 2 * 4)
    around = problem.batch * problem.heads * problem.seqlen_q * row / (target.bandwidth_tbs * 1e12)
    return (around + max(compute, problem.min_bytes / (target.bandwidth_tbs * 1e12))) * 1e3
