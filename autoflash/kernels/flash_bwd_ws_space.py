"""flash_bwd_ws's search space: what may be tuned, and why a combination can't or shouldn't run."""

from collections.abc import Callable, Mapping

from autoflash.dtypes import DTYPE_BYTES
from autoflash.kernels.hopper_tiles import block_d
from autoflash.problem import Problem
from autoflash.space import Config, Constraint, Param, SearchSpace, Value
from autoflash.target import Target

# Keys of a program: two consumers with 64 each, which is what one matrix instruction computes.
KEYS = 128
CONSUMERS = 2
CONSUMER_REGISTERS = 240
LOADER_REGISTERS = 24
# Rows of statistics that lie behind each head's, so that no block reads the next head's.
MOST_ROWS = 128
# As many numbers of fp32 are 16 bytes.
_ALIGNED_ROWS = 4
GROUP_SIZES = (1, 8, 16, 24, 32, 64)
_GROUP_MB = 16
# Registers of a consumer that may be asked for on paper: some of them are never needed at once.
_PAPER_REGISTERS = 256
_OTHER_REGISTERS = 32
# Barriers and alignment.
_OTHER_SHARED = 2048


def lead_rows(problem: Problem) -> int:
    """Numbers before a head's row statistics, so that blocks of them that start where some tile's
    keys begin to be seen lie at multiples of 16 bytes, as the tensor copy engine wants it."""
    return (problem.seqlen_k - problem.seqlen_q) % _ALIGNED_ROWS if problem.causal else 0


def padded_rows(problem: Problem) -> int:
    """Numbers of a head's row statistics, with those before and behind its rows."""
    most = problem.seqlen_q + MOST_ROWS + _ALIGNED_ROWS - 1
    return -(-most // _ALIGNED_ROWS) * _ALIGNED_ROWS


def dq_part(config: Config, problem: Problem) -> tuple[int, int]:
    """Rows and columns of a step's dq that one consumer computes."""
    if config["DQ_SPLIT"] == "columns":
        return config.integer("BLOCK_M"), block_d(problem) // CONSUMERS
    return config.integer("BLOCK_M") // CONSUMERS, block_d(problem)


def registers_needed(config: Config, problem: Problem) -> int:
    """Registers of a consumer's thread: dk and dv, scores and dP, its part of dq, the rest."""
    rows, columns = dq_part(config, problem)
    need = block_d(problem) + config.integer("BLOCK_M") + rows * columns // 128
    return need + _OTHER_REGISTERS


def shared_parts(config: Config, problem: Problem) -> dict[str, int]:
    """Bytes of shared memory by what they hold."""
    size = DTYPE_BYTES[problem.dtype]
    rows, stages = config.integer("BLOCK_M"), config.integer("STAGES")
    part_rows, part_columns = dq_part(config, problem)
    return {
        # Two places for k: the next tile's, and this one's for its last dq.
        "k, v": 3 * KEYS * block_d(problem) * size,
        "q, dout": 2 * stages * rows * block_d(problem) * size,
        "statistics": 2 * stages * rows * 4,
        "dS": 2 * KEYS * rows * size,
        "dq": CONSUMERS * part_rows * part_columns * 4,
        "barriers": _OTHER_SHARED,
    }


def tile_count(problem: Problem) -> int:
    """Tiles of KEYS keys of one key/value head."""
    return problem.batch * problem.kv_heads * -(-problem.seqlen_k // KEYS)


def group_heads(config: Config, problem: Problem) -> int:
    """Key/value heads that run side by side: those whose q, dout and sums fit in GROUP_MB."""
    row = problem.head_dim * (2 * DTYPE_BYTES[problem.dtype] + 4)
    one = max(1, problem.group * problem.seqlen_q * row)
    fit = max(1, (config.integer("GROUP_MB") << 20) // one)
    return min(fit, problem.batch * problem.kv_heads)


def grouped(values: Mapping[str, Value], heads_of: Callable[[Config], object]) -> Config:
    """``values`` with the least GROUP_MB that groups as many heads as the preferred one."""
    wanted = heads_of(Config(**values, GROUP_MB=_GROUP_MB))
    configs = (Config(**values, GROUP_MB=size) for size in GROUP_SIZES)
    return next(config for config in configs if heads_of(config) == wanted)


def why_not_served(problem: Problem, target: Target) -> str | None:
    """Why no config can run."""
    if target.capability != 90:
        return (
            f"{target.arch} has no warpgroup matrix instructions (sm_90 has): flash_bwd serves it"
        )
    if problem.dtype not in ("float16", "bfloat16"):
        return f"{problem.dtype} is not served on a GPU: use float16 or bfloat16"
    if problem.head_dim != problem.head_dim_v:
        dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
        return f"{dims}: they must be equal here: flash_bwd serves it"
    if problem.head_dim % 8 or problem.head_dim > 128:
        return (
            f"head_dim={problem.head_dim}: it must be a multiple of 8 (16 bytes, for the tensor "
            "copy engine), and up to 128, for dk and dv to fit in registers: flash_bwd serves it"
        )
    if problem.batch * problem.heads * padded_rows(problem) >= 2**31:
        return "more than 2^31 query rows: flash_bwd serves it"
    return None


def _hardware(config: Config, problem: Problem, target: Target) -> str | None:
    del config
    return why_not_served(problem, target)


def _splits_rows(config: Config, problem: Problem, target: Target) -> str | None:
    del problem, target
    if config["DQ_SPLIT"] == "rows" and config.integer("BLOCK_M") < 64 * CONSUMERS:
        return f"{config['BLOCK_M']} rows can't be split: a matrix instruction computes 64"
    return None


def why_not_spread(problem: Problem) -> str | None:
    """Why tiles can't start at rows of their own, or needn't."""
    if problem.causal:
        return "with a causal mask each tile starts where its keys are anyway"
    if problem.seqlen_k <= KEYS:
        return f"{problem.seqlen_k} keys: a head has one tile"
    return None


def _spreads(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    return why_not_spread(problem) if config["SPREAD"] else None


def _fits_registers(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    need = registers_needed(config, problem)
    if need > _PAPER_REGISTERS:
        return f"a consumer needs about {need} registers per thread and has {CONSUMER_REGISTERS}"
    return None


def _fits_shared(config: Config, problem: Problem, target: Target) -> str | None:
    need = sum(shared_parts(config, problem).values())
    if need > target.shared_memory:
        return f"needs {need} bytes of shared memory, {target.name} has {target.shared_memory}"
    return None


def _schedules(config: Config, problem: Problem, target: Target) -> str | None:
    tiles = tile_count(problem)
    if config["SCHEDULE"] == "dynamic" and tiles <= target.sm_count:
        return f"{tiles} tiles: each of the {target.sm_count} SMs has one at most"
    return None


def _orders_tiles(config: Config, problem: Problem, target: Target) -> str | None:
    size = config.integer("GROUP_MB")
    if size == GROUP_SIZES[0]:
        return None
    if tile_count(problem) <= target.sm_count:
        return f"GROUP_MB={size}: all tiles run side by side"
    smaller = Config(**{**config, "GROUP_MB": GROUP_SIZES[GROUP_SIZES.index(size) - 1]})
    heads = group_heads(config, problem)
    if heads == group_heads(smaller, problem):
        return f"GROUP_MB={size} groups {heads} heads, as {smaller['GROUP_MB']} does"
    return None


SPACE = SearchSpace(
    params=(
        Param(name="BLOCK_M", choices=(64, 128), doc="query rows of one step"),
        Param(name="STAGES", choices=(1, 2, 3), doc="depth of the ring of q and dout"),
        Param(name="DQ_SPLIT", choices=("columns", "rows"), doc="how consumers share dq"),
        Param(name="DP_EARLY", choices=(False, True), doc="dP issued before the exponentials"),
        Param(name="TURNS", choices=(False, True), doc="consumers take turns at the matrix unit"),
        Param(
            name="SPREAD",
            choices=(False, True),
            doc="each tile of a head starts at other rows, so that their sums don't meet",
            before=False,
        ),
        Param(name="SCHEDULE", choices=("grid", "dynamic"), doc="how programs come by tiles"),
        Param(
            name="GROUP_MB",
            choices=GROUP_SIZES,
            doc="MiB of q, dout, dq side by side (L2)",
            compiled=False,
        ),
    ),
    constraints=(
        Constraint(name="hardware", why_not=_hardware, reads=()),
        Constraint(name="rows of dq", why_not=_splits_rows, reads=("BLOCK_M", "DQ_SPLIT")),
        Constraint(name="order of rows", why_not=_spreads, reads=("SPREAD",)),
        Constraint(name="registers", why_not=_fits_registers, reads=("BLOCK_M", "DQ_SPLIT")),
        Constraint(
            name="shared memory", why_not=_fits_shared, reads=("BLOCK_M", "STAGES", "DQ_SPLIT")
        ),
        Constraint(name="schedule", why_not=_schedules, reads=("SCHEDULE",), advice=True),
        Constraint(name="tile order", why_not=_orders_tiles, reads=("GROUP_MB",), advice=True),
    ),
)
