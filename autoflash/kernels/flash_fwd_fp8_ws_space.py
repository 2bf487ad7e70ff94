"""flash_fwd_fp8_ws's search space: what may be tuned, and what can't or shouldn't run."""

from collections.abc import Callable

from autoflash.dtypes import DTYPE_BYTES, FP8
from autoflash.kernels.flash_fwd_ws_space import (
    GROUP_SIZES,
    PERSISTENT,
    ROWS,
    block_d,
    block_dv,
    consumer_registers,
)
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import Target

# Registers that addresses, row statistics, scales and loop state take beside what is counted; with
# less some variants spill in the main loop, and one was serialized.
_OTHER_REGISTERS = 32
# Barriers, the mail, alignment.
_OTHER_SHARED = 1024


def registers_needed(config: Config, problem: Problem) -> int:
    """Registers that a consumer's thread needs: both accumulators and what lives beside them."""
    keys = config.integer("BLOCK_N")
    need = ROWS * (block_dv(problem) + keys) // 128 + _OTHER_REGISTERS
    # Packed probabilities wait for the next step.
    return need + (keys // 8 if config["OVERLAP"] else 0)


def staged_columns(config: Config, problem: Problem) -> int:
    """Columns of out that have a place in shared memory."""
    share = {"own": 1, "half": 2}.get(str(config["STAGING"]))
    return block_dv(problem) // share if share else 0


def shared_parts(config: Config, problem: Problem) -> dict[str, int]:
    """Bytes of shared memory by what they hold."""
    rows = config.integer("CONSUMERS") * ROWS
    ring = config.integer("STAGES") * config.integer("BLOCK_N")
    return {
        "q": rows * block_d(problem),
        "k": ring * block_d(problem),
        "v": ring * block_dv(problem),
        "first": 2 * 4 * block_dv(problem),
        "out": rows * staged_columns(config, problem) * DTYPE_BYTES[problem.dtype_of_out],
        "barriers": _OTHER_SHARED,
    }


def tile_count(config: Config, problem: Problem) -> int:
    """Tiles of the whole problem."""
    rows = config.integer("CONSUMERS") * ROWS
    return problem.batch * problem.heads * -(-problem.seqlen_q // rows)


def group_heads(config: Config, problem: Problem) -> int:
    """Heads that run side by side: those whose keys and values fit in GROUP_MB together."""
    pair = problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    fit = max(1, (config.integer("GROUP_MB") << 20) // max(1, pair))
    return min(fit * problem.group, problem.batch * problem.heads)


def why_not_served(problem: Problem, target: Target) -> str | None:
    """Why no config can run, as far as code and hardware go."""
    if target.capability != 90:
        return f"{target.arch} has no warpgroup matrix instructions (sm_90 has)"
    if problem.dtype != FP8:
        return f"q in {problem.dtype}: the matrix unit takes operands of one kind"
    if problem.v_layout == "columns":
        return "v by columns: the matrix unit wants its keys permuted"
    if problem.head_dim % 16:
        return f"head_dim={problem.head_dim}: rows must be multiples of 16 bytes to be copied"
    # Rows of out, and of v where those are what is given.
    least = 16 if problem.v_layout == "rows" else 8
    if problem.head_dim_v % least:
        return f"head_dim_v={problem.head_dim_v}: rows must be multiples of 16 bytes to be copied"
    return None


def _hardware(config: Config, problem: Problem, target: Target) -> str | None:
    del config
    return why_not_served(problem, target)


def _matches_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["CONSUMERS"] == 3 and problem.seqlen_q <= 2 * ROWS:
        return f"3 consumers of {ROWS} rows for {problem.seqlen_q} rows"
    return None


def _matches_keys(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config.integer("BLOCK_N") > max(64, next_power_of_2(problem.seqlen_k)):
        return f"BLOCK_N={config['BLOCK_N']} is more than the {problem.seqlen_k} keys"
    return None


def _fits_registers(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    need, have = registers_needed(config, problem), consumer_registers(config)
    if need > have:
        return f"a consumer needs about {need} registers per thread and has {have}"
    return None


def _halves_output(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["STAGING"] == "half" and block_dv(problem) < 128:
        return f"half of {block_dv(problem)} columns is too narrow to be copied"
    return None


def _stages_output(config: Config, problem: Problem, target: Target) -> str | None:
    for better in ("own", "half"):
        if config["STAGING"] == better:
            return None
        other = Config(**{**config, "STAGING": better})
        fits = sum(shared_parts(other, problem).values()) <= target.shared_memory
        if fits and _halves_output(other, problem, target) is None:
            return f"out has room of its own (STAGING={better})"
    return None


def _fits_shared(config: Config, problem: Problem, target: Target) -> str | None:
    need = sum(shared_parts(config, problem).values())
    if need > target.shared_memory:
        return f"needs {need} bytes of shared memory, {target.name} has {target.shared_memory}"
    return None


def _fills_ring(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    stages, keys = config.integer("STAGES"), config.integer("BLOCK_N")
    if stages * keys > 512:
        return f"a ring of {stages * keys} keys gains nothing over one of 512"
    blocks = -(-problem.seqlen_k // keys)
    if config["SCHEDULE"] == "grid" and stages > max(2, blocks):
        return f"a ring of {stages} stages for {blocks} blocks of keys"
    return None


def _schedules(config: Config, problem: Problem, target: Target) -> str | None:
    schedule, tiles = config["SCHEDULE"], tile_count(config, problem)
    if schedule in PERSISTENT and tiles <= target.sm_count:
        return f"{tiles} tiles: each of the {target.sm_count} SMs has one at most"
    if schedule == "persistent" and problem.causal:
        return "causal tiles differ in length: dealt out in advance they lose 10 to 30 %"
    return None


def _orders_tiles(config: Config, problem: Problem, target: Target) -> str | None:
    size = config.integer("GROUP_MB")
    if size == GROUP_SIZES[0]:
        return None
    if tile_count(config, problem) <= target.sm_count:
        return f"GROUP_MB={size}: all tiles run side by side"
    smaller = Config(**{**config, "GROUP_MB": GROUP_SIZES[GROUP_SIZES.index(size) - 1]})
    heads = group_heads(config, problem)
    if heads == group_heads(smaller, problem):
        return f"GROUP_MB={size} groups {heads} heads, as {smaller['GROUP_MB']} does"
    return None


def _loader_registers(config: Config, problem: Problem, target: Target) -> str | None:
    del problem, target
    registers = config.integer("LOADER_REGISTERS")
    if registers > 24 and config["SCHEDULE"] != "dynamic":
        return f"{registers} registers are more than a loader without a counter needs"
    return None


def _advice(
    name: str, why_not: Callable[[Config, Problem, Target], str | None], *reads: str
) -> Constraint:
    return Constraint(name=name, why_not=why_not, reads=reads, advice=True)


SPACE = SearchSpace(
    params=(
        Param(name="CONSUMERS", choices=(2, 3), doc="warpgroups of 64 query rows each"),
        Param(name="BLOCK_N", choices=(64, 128), doc="keys of one step"),
        Param(name="STAGES", choices=(2, 3, 4), doc="depth of the ring of keys and values"),
        Param(name="OVERLAP", choices=(False, True), doc="P v computed during the next softmax"),
        Param(name="SCHEDULE", choices=("grid", *PERSISTENT), doc="how programs come by tiles"),
        Param(
            name="GROUP_MB",
            choices=GROUP_SIZES,
            doc="MiB of K and V side by side (L2)",
            compiled=False,
        ),
        Param(
            name="STAGING",
            choices=("own", "half", "direct"),
            doc="where out is staged; half: by halves in a place of its own",
        ),
        Param(
            name="PING_PONG",
            choices=("none", "done"),
            doc="a consumer's products wait for another's scores",
        ),
        Param(name="LOADER_REGISTERS", choices=(24, 40), doc="the rest is the consumers'"),
        Param(
            name="LATE_RESCALE",
            choices=(False, True),
            doc="rescale only when the maximum grew by more than 2^0.75",
        ),
    ),
    constraints=(
        Constraint(name="hardware", why_not=_hardware, reads=()),
        _advice("query rows", _matches_queries, "CONSUMERS"),
        _advice("keys", _matches_keys, "BLOCK_N"),
        Constraint(
            name="registers",
            why_not=_fits_registers,
            reads=("CONSUMERS", "BLOCK_N", "OVERLAP", "LOADER_REGISTERS"),
        ),
        _advice("schedule", _schedules, "CONSUMERS", "SCHEDULE"),
        _advice("ring", _fills_ring, "STAGES", "BLOCK_N", "SCHEDULE"),
        _advice("tile order", _orders_tiles, "CONSUMERS", "GROUP_MB"),
        Constraint(
            name="shared memory",
            why_not=_fits_shared,
            reads=("CONSUMERS", "BLOCK_N", "STAGES", "STAGING"),
        ),
        _advice("staging", _stages_output, "CONSUMERS", "BLOCK_N", "STAGES", "STAGING"),
        Constraint(name="halves of out", why_not=_halves_output, reads=("STAGING",)),
        _advice("loader registers", _loader_registers, "SCHEDULE", "LOADER_REGISTERS"),
    ),
)
