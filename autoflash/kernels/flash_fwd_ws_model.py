"""The written model of flash_fwd_ws's time: what orders candidates that haven't been timed.

One program fills an SM. Cycles of one block of keys are counted for the matrix unit and for the
softmax, of which a part stays in the open, by how many consumers share the SM and whether each
overlaps its own blocks. The factors were fitted to 237 timings on an H200 (docs/hopper-forward.md),
which they meet within 4 % in the mean, those of four consumers and of out in halves to 16 more.
"""

import math
from dataclasses import dataclass

from autoflash.dtypes import DTYPE_BYTES
from autoflash.kernels.flash_fwd_ws_space import (
    depth,
)
from autoflash.kernels.hopper_tiles import (
    ROWS,
    block_dv,
    group_heads,
    staged_columns,
    tile_count,
    tile_heads,
)
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

# Exponentials and other operations that an SM does per cycle.
_EXPONENTIALS = 16
_LANES = 128


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What the fit found."""

    matrix: float = 0.87  # over the plain count at the nominal clock
    elementwise: float = 8.1  # operations per score beside its exponential
    row: float = 5.0  # cycles per row and step: maxima, sums
    rescale: float = 2.5  # per number of the accumulator, where every step rescales
    step: float = 213.0  # cycles per step: barriers, the first instruction's latency
    # Share of the softmax that the matrix unit waits for, by consumers, overlapping or not.
    open_2: float = 0.363
    open_2_serial: float = 0.46
    open_3: float = 0.304
    open_3_serial: float = 0.306
    open_4: float = 0.235
    q_registers: float = 0.02  # at 64 two consumers gain this
    # What waiting for P v in the middle of a softmax and taking turns gain, with 2 and 3 consumers;
    # the former with 2 consumers above 64 alone.
    middle_2: float = 0.03
    middle_3: float = 0.03
    turns_2: float = -0.01
    turns_3: float = 0.01
    shallow: float = 0.06  # what a ring of 2 costs 3 consumers
    by_fma: float = 0.12
    tile_row: float = 7.8  # cycles to start and end a tile, for each of its rows
    launch: float = 2100.0  # cycles to start a program
    start: float = 11000.0  # cycles to start the first
    staged: float = 2.4  # bytes of out, over 32 a cycle, if it can't wait in a place of its own
    masked: float = 0.33  # scores of the blocks on the diagonal, over 16 a cycle
    tail: float = 0.14  # of the mean tile, per tile of a group that a program gets
    idle: float = 0.003  # for each choice that gained nothing where it was measured
    missed: float = 1.3  # keys and values that a wave doesn't find in L2 again


FACTORS = Factors()


def estimate_ms(problem: Problem, config: Config, target: Target) -> float:
    """Milliseconds of ``config``."""
    f = FACTORS
    rows, packed = config.integer("CONSUMERS") * ROWS, config.integer("PACK_HEADS")
    tiles = tile_count(config, problem)
    programs = min(tiles, target.sm_count)
    blocks = _key_blocks(problem, config)
    step = _step_cycles(problem, config, target)
    size = DTYPE_BYTES[problem.dtype]
    own = f.tile_row * rows
    waiting = block_dv(problem) - staged_columns(config, problem)
    own += f.staged * rows * waiting * size / 32
    if config["SCHEDULE"] == "grid":
        own += f.launch
    if problem.causal:
        own += f.masked * rows * (rows / packed + config.integer("BLOCK_N")) / 16
    tile = blocks * step + own
    turns = _turns(problem, config, tiles / programs, blocks)
    compute = (f.start + turns * tile) / (target.clock_ghz * 1e9)
    again = f.missed * _missed_bytes(problem, config, target) / (target.bandwidth_tbs * 1e12)
    seconds = math.sqrt(math.hypot(compute**2, again**2))
    return max(seconds, problem.min_bytes / (target.bandwidth_tbs * 1e12)) * 1e3


def _turns(problem: Problem, config: Config, share: float, blocks: float) -> float:
    """Mean tiles that the slowest program takes as long as; ``share`` is what each has to do."""
    if problem.causal and share <= 1:
        return -(-problem.seqlen_k // config.integer("BLOCK_N")) / max(1.0, blocks)
    if problem.causal:
        group = share * group_heads(config, problem) / tile_heads(config, problem)
        return share + FACTORS.tail / max(1.0, group)
    return float(math.ceil(share)) if share < 8 else share + 0.5


def _step_cycles(problem: Problem, config: Config, target: Target) -> float:
    """Cycles of one block of keys."""
    f = FACTORS
    consumers, keys = config.integer("CONSUMERS"), config.integer("BLOCK_N")
    flops = target.tflops * 1e12 / target.sm_count / (target.clock_ghz * 1e9)
    scores = consumers * ROWS * keys
    dim_v = block_dv(problem)
    matrix = f.matrix * 2 * scores * (depth(problem) + dim_v) / flops
    softmax = scores * (1 / _EXPONENTIALS + f.elementwise / _LANES) + f.row * consumers * ROWS
    if not config["RESCALE_ABOVE"]:
        softmax += f.rescale * consumers * ROWS * dim_v / _LANES
    if config["EXP2_BY_FMA"]:
        softmax *= 1 + f.by_fma
    share = {
        (2, True): f.open_2,
        (2, False): f.open_2_serial,
        (3, True): f.open_3,
        (3, False): f.open_3_serial,
    }.get((consumers, bool(config["OVERLAP"])), f.open_4)
    cycles = f.step + matrix + share * softmax
    if config["Q_IN_REGISTERS"] and consumers == 2:
        cycles *= 1 - f.q_registers
    two = consumers == 2
    if config["PV_WAIT"] == "middle" and (dim_v > 64 or not two):
        cycles *= 1 - (f.middle_2 if two else f.middle_3)
    if config["STAGES"] == 2 and not two:
        cycles *= 1 + f.shallow
    if config["PING_PONG"] != "none":
        cycles *= 1 - (f.turns_2 if two else f.turns_3)
    idle = (
        config["LOADER_REGISTERS"] != 24,
        config["SCHEDULE"] == "persistent",
        config["Q_IN_REGISTERS"] and consumers != 2,
    )
    return cycles * (1 + f.idle * sum(map(bool, idle)))


def _missed_bytes(problem: Problem, config: Config, target: Target) -> float:
    """Bytes of keys and values that come from memory because L2 can't keep a group's."""
    heads = group_heads(config, problem)
    sharing = max(1, problem.group // config.integer("PACK_HEADS"))
    pair = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    excess = heads / sharing * pair / (target.l2_bytes / 2) - 1
    # Row blocks of one head that run at the same time read the same keys.
    alone = min(1.0, heads / target.sm_count) / sharing
    seen = problem.visible_pairs / max(1, problem.seqlen_q * problem.seqlen_k)
    return tile_count(config, problem) * pair * seen * alone * max(0.0, min(1.0, excess))


def _key_blocks(problem: Problem, config: Config) -> float:
    """Mean number of key blocks that a tile walks."""
    keys = config.integer("BLOCK_N")
    rows = config.integer("CONSUMERS") * ROWS / config.integer("PACK_HEADS")
    blocks = -(-problem.seqlen_k // keys)
    pairs = problem.seqlen_q * problem.seqlen_k
    if not problem.causal or pairs == 0:
        return blocks
    return blocks * problem.visible_pairs / pairs + (rows / keys + 1) / 2
