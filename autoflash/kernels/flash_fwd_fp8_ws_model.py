"""The written model of flash_fwd_fp8_ws's time: what orders candidates that haven't been timed.

As flash_fwd_ws's, with twice the matrix rate: the softmax, which is as long as in 16 bits, then
decides more. The factors are fitted to 537 trials on an H200 (head dims 64, 128 and 256, 4k and
16k; root mean square error 4 %), those of _details to 213 of what the kernel is now.
"""

import math

from autoflash.kernels.hopper_tiles import ROWS, block_d, block_dv, group_heads, tile_count, widest
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

# Exponentials and other operations that an SM does per cycle.
_EXPONENTIALS = 16
_LANES = 128
_ELEMENTWISE = 5.9
_MATRIX = 0.77
_RATE = 2.0
# Cycles per row and step, per row of a tile, to start a program, to start the first.
_ROW = 3.0
_TILE_ROW = 20.0
_LAUNCH = 2100.0
_START = 9000.0
_RESCALE = 2.3
# Share of the softmax that the matrix unit waits for, by consumers.
_OPEN = {2: 0.62, 3: 0.46}


def estimate_ms(problem: Problem, config: Config, target: Target) -> float:
    """Milliseconds of ``config``, and of turning v if that comes by rows."""
    consumers, keys = config.integer("CONSUMERS"), config.integer("BLOCK_N")
    rows, tiles = consumers * ROWS, tile_count(config, problem)
    flops = _RATE * target.tflops * 1e12 / target.sm_count / (target.clock_ghz * 1e9)
    scores = rows * keys
    matrix = _MATRIX * 2 * scores * (block_d(problem) + block_dv(problem)) / flops
    softmax = scores * (1 / _EXPONENTIALS + _ELEMENTWISE / _LANES) + _ROW * rows
    softmax += _RESCALE * rows * block_dv(problem) / _LANES
    step = matrix + _OPEN[consumers] * softmax
    step *= _details(problem, config)
    blocks = -(-problem.seqlen_k // keys) + 0.0
    pairs = problem.seqlen_q * problem.seqlen_k
    if problem.causal and pairs:
        blocks = blocks * problem.visible_pairs / pairs + (rows / keys + 1) / 2
    own = _TILE_ROW * rows + (_LAUNCH if config["SCHEDULE"] == "grid" else 0.0)
    if config["STAGING"] == "direct":
        own += 0.08 * rows * block_dv(problem)
    share = tiles / min(tiles, target.sm_count)
    turns = float(math.ceil(share)) if share < 8 and not problem.causal else share + 0.5
    if problem.causal:
        turns += 0.14 * problem.batch * problem.heads / max(1, group_heads(config, problem)) / 8
    seconds = (_START + turns * (blocks * step + own)) / (target.clock_ghz * 1e9)
    least = problem.min_bytes
    if problem.v_layout == "rows":
        moved = 2 * problem.batch * problem.kv_heads * problem.seqlen_k * problem.head_dim_v
        seconds += moved / (0.7 * target.bandwidth_tbs * 1e12) + 3e-6
        least += moved
    return max(seconds, least / (target.bandwidth_tbs * 1e12)) * 1e3


def _details(problem: Problem, config: Config) -> float:
    """What choices of a few percent do to a step."""
    dims = widest(problem)
    factor = 1.0
    if config["CONSUMERS"] == 3:
        factor *= 1.04 if config["STAGES"] == 2 and dims == 128 else 1.0
        factor *= 1.0 if config["PING_PONG"] == "none" else 0.965
    elif config["PING_PONG"] != "none":
        factor *= 1.03
    if config["Q_IN_REGISTERS"] and not problem.causal:
        factor *= 0.98
    if config.integer("PV_PART") < min(128, block_dv(problem)):
        factor *= 1.01
    # The warps that look for NaN, and the loader at 256 dims, want more than 24.
    if (config.integer("LOADER_REGISTERS") > 24) != (dims == 256):
        factor *= 1.01
    if config["STAGING"] == "half" and dims < 256:
        factor *= 1.03
    if config["SCHEDULE"] == "persistent":
        factor *= 1.015
    if config["EXP2_BY_FMA"]:
        factor *= 1.04
    if config.integer("GROUP_MB") > 32:
        factor *= 1.01
    return factor
