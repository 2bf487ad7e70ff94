"""flash_fwd_fp8_ws's search space: what may be tuned, and what can't or shouldn't run."""

from autoflash.dtypes import FP8
from autoflash.kernels import hopper_tiles
from autoflash.kernels.hopper_tiles import (
    GROUP_SIZES,
    PERSISTENT,
    advice,
    block_d,
    block_dv,
    fits_registers,
    fits_shared,
    halves_output,
    loader_registers,
    matches_keys,
    matches_queries,
    orders_tiles,
    schedules,
    stages_output,
    widest,
)
from autoflash.problem import Problem
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import Target

# Registers that addresses, row statistics, scales and loop state take beside what is counted, which
# isn't all needed at once.
_OTHER_REGISTERS = 16


def registers_needed(config: Config, problem: Problem) -> int:
    """Registers that a consumer's thread needs: its accumulator, scores or packed probabilities and
    their product with v, and what lives beside them."""
    scores = config.integer("BLOCK_N") // 2
    product = scores // 4 + pv_part(config, problem) // 2
    queries = block_d(problem) // 8 if config["Q_IN_REGISTERS"] else 0
    return block_dv(problem) // 2 + max(scores, product) + queries + _OTHER_REGISTERS


def pv_part(config: Config, problem: Problem) -> int:
    """Columns of P v that are computed before they are added to the accumulator."""
    return min(config.integer("PV_PART"), block_dv(problem))


def shared_parts(config: Config, problem: Problem) -> dict[str, int]:
    """Bytes of shared memory by what they hold."""
    # The first NaN of each dim in 16 bits, of each stage and each consumer's tile.
    places = config.integer("STAGES") + config.integer("CONSUMERS")
    return {**hopper_tiles.shared_parts(config, problem), "first": 2 * places * block_dv(problem)}


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


def _fills_ring(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    stages, keys = config.integer("STAGES"), config.integer("BLOCK_N")
    if stages * keys > 512:
        return f"a ring of {stages * keys} keys gains nothing over one of 512"
    blocks = -(-problem.seqlen_k // keys)
    if config["SCHEDULE"] == "grid" and stages > max(2, blocks):
        return f"a ring of {stages} stages for {blocks} blocks of keys"
    return None


def _divides_product(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    columns, part = block_dv(problem), pv_part(config, problem)
    if columns > 2 * part:
        return f"PV_PART={part}: {columns} columns are more than two parts"
    return None


def _holds_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["Q_IN_REGISTERS"] and block_d(problem) > 64:
        return "more than 64 dims of q spill, and cost 10 %"
    return None


def _needs_exponentials(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["EXP2_BY_FMA"] and widest(problem) < 256:
        return "three consumers keep the other units as busy as the exponential unit"
    return None


def _loader_registers(config: Config, problem: Problem, target: Target) -> str | None:
    # Of 256 dims the warps that look for NaN have more to hold.
    return None if widest(problem) == 256 else loader_registers(config, problem, target)


def _matches_columns(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config.integer("PV_PART") > block_dv(problem):
        return f"PV_PART={config['PV_PART']} is more than the {block_dv(problem)} columns"
    return None


SPACE = SearchSpace(
    params=(
        Param(name="CONSUMERS", choices=(2, 3), doc="warpgroups of 64 query rows each"),
        Param(name="BLOCK_N", choices=(64, 128), doc="keys of one step"),
        Param(name="STAGES", choices=(2, 3, 4), doc="depth of the ring of keys and values"),
        Param(name="Q_IN_REGISTERS", choices=(False, True), doc="queries read from registers"),
        Param(
            name="PV_PART",
            choices=(64, 128),
            doc="columns of P v that are computed before they are added to out",
        ),
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
        Param(name="EXP2_BY_FMA", choices=(0, 8), doc="each so-many-th exponential by FMA"),
        Param(name="LOADER_REGISTERS", choices=(24, 40), doc="the rest is the consumers'"),
    ),
    constraints=(
        Constraint(name="hardware", why_not=_hardware, reads=()),
        advice("query rows", matches_queries, "CONSUMERS"),
        advice("keys", matches_keys, "BLOCK_N"),
        Constraint(
            name="registers",
            why_not=fits_registers(registers_needed),
            reads=("CONSUMERS", "BLOCK_N", "Q_IN_REGISTERS", "PV_PART", "LOADER_REGISTERS"),
        ),
        Constraint(name="parts of P v", why_not=_divides_product, reads=("PV_PART",)),
        advice("columns of P v", _matches_columns, "PV_PART"),
        advice("schedule", schedules, "CONSUMERS", "SCHEDULE"),
        advice("ring", _fills_ring, "STAGES", "BLOCK_N", "SCHEDULE"),
        advice("tile order", orders_tiles, "CONSUMERS", "GROUP_MB"),
        Constraint(
            name="shared memory",
            why_not=fits_shared(shared_parts),
            reads=("CONSUMERS", "BLOCK_N", "STAGES", "STAGING"),
        ),
        advice("queries", _holds_queries, "Q_IN_REGISTERS"),
        # By halves is as fast as whole here, and faster with a mask.
        advice(
            "staging",
            stages_output(shared_parts, alike=("own", "half")),
            "CONSUMERS",
            "BLOCK_N",
            "STAGES",
            "STAGING",
        ),
        Constraint(name="halves of out", why_not=halves_output, reads=("STAGING",)),
        advice("exponentials", _needs_exponentials, "EXP2_BY_FMA"),
        advice("loader registers", _loader_registers, "SCHEDULE", "LOADER_REGISTERS"),
    ),
)
