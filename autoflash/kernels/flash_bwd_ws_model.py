"""The written model of flash_bwd_ws's time: what orders candidates that haven't been timed.

Five products per block of rows and keys, of which the matrix unit does so many at a time, what the
softmax and the exchange of dS leave in the open, and what comes from memory because too many heads
run side by side. Fitted to 170 timings on an H200 (bf16, head dims 64 and 128;
6 % off in the mean, and its first is within 2.5 % of the best in each of 12 problems).
"""

from autoflash.kernels.flash_bwd_ws_space import KEYS, group_heads, tile_count
from autoflash.kernels.hopper_tiles import block_d
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

_EXPONENTIALS = 16
_LANES = 128
# Operations per score beside its exponential: masks, products, rounding, the exchange of dS.
_ELEMENTWISE = 10.0
# Share of them that the matrix unit waits for, by whether the consumers take turns and whether dP
# is issued early.
_OPEN = {(False, False): 0.73, (False, True): 0.73, (True, False): 0.63, (True, True): 0.62}
# Cycles per step: barriers, the first instruction's latency.
_STEP = 820.0
# Cycles to start and end a program's tile, and more of those to start a program for each.
_TILE = 4100.0
_PROGRAM = 5300.0
# What a ring of one stage costs, and half of dq's columns where half of its rows would do.
_SHALLOW = 0.55
_COLUMNS = 0.064


def estimate_ms(problem: Problem, config: Config, target: Target) -> float:
    """Milliseconds of the whole chain."""
    rows = config.integer("BLOCK_M")
    clock = target.clock_ghz * 1e9
    flops = target.tflops * 1e12 / target.sm_count / clock
    matrix = 5 * 2 * rows * KEYS * block_d(problem) / flops
    scores = rows * KEYS * (1 / _EXPONENTIALS + _ELEMENTWISE / _LANES)
    step = matrix + _STEP + scores * _OPEN[bool(config["TURNS"]), bool(config["DP_EARLY"])]
    if config["STAGES"] == 1:
        step *= 1 + _SHALLOW
    if rows == KEYS and config["DQ_SPLIT"] == "columns":
        step *= 1 + _COLUMNS
    steps: float = -(-problem.seqlen_q // rows) * problem.group
    pairs = problem.seqlen_q * problem.seqlen_k
    if problem.causal and pairs:
        steps = steps * problem.visible_pairs / pairs + (KEYS / rows + 1) / 2 * problem.group
    # q, dout and the sums of dq, read and written, of the heads that run side by side should stay
    # in L2; else each block comes from memory once for all tiles that want it at the same time.
    heads = group_heads(config, problem)
    if heads * problem.group * problem.seqlen_q * problem.head_dim * 8 > 0.75 * target.l2_bytes:
        together = max(1.0, target.sm_count / heads)
        moved = rows * problem.head_dim * 12 * target.sm_count / together
        step = max(step, moved / (target.bandwidth_tbs * 1e12) * clock)
    tiles = tile_count(problem)
    turns = tiles / target.sm_count
    turns = float(-(-tiles // target.sm_count)) if turns < 4 else turns + 0.5
    edge = _TILE + (_PROGRAM if config["SCHEDULE"] == "grid" else 0.0)
    compute = turns * (steps * step + edge) / clock
    # out, dout and the sums of dq go by once more each before and after.
    row = problem.head_dim * (3 * 2 + 2 * 4)
    around = problem.batch * problem.heads * problem.seqlen_q * row / (target.bandwidth_tbs * 1e12)
    return (around + max(compute, problem.min_bytes / (target.bandwidth_tbs * 1e12))) * 1e3
