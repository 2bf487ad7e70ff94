"""flash_fwd_ws's search space: what may be tuned, and why a combination can't or shouldn't run."""

from autoflash.kernels.hopper_tiles import (
    GROUP_SIZES,
    PERSISTENT,
    ROWS,
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
    shared_parts,
    stages_output,
    widest,
)
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import Target

_PACKED = (1, 2, 4, 8)

# Registers that addresses, row statistics and loop state take beside what is counted; with less,
# every variant that we compiled spilled more than can be borne.
_OTHER_REGISTERS = 32


def depth(problem: Problem) -> int:
    """Columns of q and k that the products go over: those behind are padding. Half of block_d and a
    power of two, since a slice of shared memory can't have another size."""
    half = block_d(problem) // 2
    return half + min(half, max(16, next_power_of_2(problem.head_dim - half)))


def registers_needed(config: Config, problem: Problem) -> int:
    """Registers that a consumer's thread needs: both accumulators and what lives beside them."""
    keys = config.integer("BLOCK_N")
    need = ROWS * (block_dv(problem) + keys) // 128 + _OTHER_REGISTERS
    # 16-bit probabilities wait for the next step; a thread's share of 64 rows of q.
    need += keys // 4
    return need + (block_d(problem) // 4 if config["Q_IN_REGISTERS"] else 0)


def most_packed(problem: Problem) -> int:
    """The most query heads of a key/value head that fit side by side in a tile."""
    return max(p for p in _PACKED if problem.group % p == 0)


def why_not_served(problem: Problem, target: Target) -> str | None:
    """Why no config can run, as far as code and hardware go."""
    if target.capability != 90:
        return (
            f"{target.arch} has no warpgroup matrix instructions (sm_90 has): flash_fwd serves it"
        )
    if problem.dtype not in ("float16", "bfloat16"):
        return f"{problem.dtype} is not served on a GPU: use float16 or bfloat16"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)):
        if dim % 8:
            return (
                f"{name}={dim}: rows of q, k, v and out must be multiples of 16 bytes for the "
                "tensor copy engine: flash_fwd serves it"
            )
    return None


def _hardware(config: Config, problem: Problem, target: Target) -> str | None:
    del config
    return why_not_served(problem, target)


def _packs_group(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    packed, group = config.integer("PACK_HEADS"), problem.group
    if group % packed:
        return f"PACK_HEADS={packed} doesn't divide the {group} query heads of a key/value head"
    return None


def _packs_most(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    packed = config.integer("PACK_HEADS")
    if 1 < packed < most_packed(problem):
        return f"PACK_HEADS={packed} is between none and the most, which serve alike or better"
    return None


def _steps_wide(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    most = 3 if widest(problem) <= 64 else 2
    fits = config.integer("CONSUMERS") <= most
    if config["BLOCK_N"] == 64 and problem.seqlen_k > 64 and fits and widest(problem) <= 128:
        return "steps of 64 keys are 10 % slower than those of 128, for which there is room"
    return None


def _overlaps(config: Config, problem: Problem, target: Target) -> str | None:
    del problem, target
    consumers = config.integer("CONSUMERS")
    if consumers == 4 and config["PING_PONG"] != "done":
        return "four consumers out of turn get in each other's way: 4 to 10 % slower"
    if config["OVERLAP"]:
        return None
    if consumers != 3:
        return f"{consumers} consumers that don't overlap are 4 to 13 % slower"
    if config["PV_WAIT"] != "end":
        return "without overlap P v is waited for together with the scores"
    if config["PING_PONG"] != "done":
        return "consumers that don't overlap are best kept apart: in step they lose 5 %"
    return None


def _holds_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["Q_IN_REGISTERS"] and block_d(problem) > 64:
        return "q in registers gains 7 % at 64, but loses 6 % above, where it takes too many"
    return None


def _slices_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["Q_IN_REGISTERS"] and depth(problem) < block_d(problem):
        return f"of head_dim={problem.head_dim} q is read in slices, which registers don't allow"
    return None


def _lends_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["STAGING"] != "query":
        return None
    if block_d(problem) != block_dv(problem):
        return f"rows of out ({block_dv(problem)}) don't fit q's place ({block_d(problem)})"
    if config["Q_IN_REGISTERS"]:
        return "q's place is filled again before out is ready"
    return None


def _fills_ring(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    stages, keys = config.integer("STAGES"), config.integer("BLOCK_N")
    if stages * keys > 384:
        return f"a ring of {stages * keys} keys gains nothing over one of 384"
    blocks = -(-problem.seqlen_k // keys)
    if config["SCHEDULE"] == "grid" and stages > max(2, blocks):
        return f"a ring of {stages} stages for {blocks} blocks of keys"
    return None


def _needs_exponentials(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if not config["EXP2_BY_FMA"]:
        return None
    if widest(problem) > 64:
        return "above 64 the matrix unit is the bottleneck, not the exponential unit"
    if config["CONSUMERS"] != 2:
        return "more than two consumers keep the other units as busy as the exponential unit"
    return None


# Those that much depends on come first: enumeration then drops most beginnings early.
SPACE = SearchSpace(
    params=(
        Param(name="CONSUMERS", choices=(2, 3, 4), doc="warpgroups of 64 query rows each"),
        Param(name="PACK_HEADS", choices=_PACKED, doc="query heads side by side in a tile"),
        Param(name="BLOCK_N", choices=(64, 128), doc="keys of one step"),
        Param(name="STAGES", choices=(2, 3, 4), doc="depth of the ring of keys and values"),
        Param(name="OVERLAP", choices=(False, True), doc="next scores issued before this P v"),
        Param(name="Q_IN_REGISTERS", choices=(False, True), doc="queries read from registers"),
        Param(name="SCHEDULE", choices=("grid", *PERSISTENT), doc="how programs come by tiles"),
        Param(
            name="GROUP_MB",
            choices=GROUP_SIZES,
            doc="MiB of K and V side by side (L2)",
            compiled=False,
        ),
        Param(
            name="STAGING",
            choices=("own", "half", "query", "direct"),
            doc="where out is staged; half: by halves in a place of its own",
        ),
        Param(name="PV_WAIT", choices=("middle", "end"), doc="where in a softmax P v is awaited"),
        Param(
            name="PING_PONG",
            choices=("none", "done"),
            doc="a consumer's products wait for another's scores",
        ),
        Param(name="LOADER_REGISTERS", choices=(24, 40), doc="the rest is the consumers'"),
        Param(name="EXP2_BY_FMA", choices=(0, 8), doc="each so-many-th exponential by FMA"),
        Param(name="RESCALE_ABOVE", choices=(0, 8), doc="rescale when the maximum grew by more"),
    ),
    constraints=(
        Constraint(name="hardware", why_not=_hardware, reads=()),
        Constraint(name="packed heads", why_not=_packs_group, reads=("PACK_HEADS",)),
        advice("most heads", _packs_most, "PACK_HEADS"),
        advice("query rows", matches_queries, "CONSUMERS", "PACK_HEADS"),
        advice("keys", matches_keys, "BLOCK_N"),
        advice("steps", _steps_wide, "CONSUMERS", "BLOCK_N"),
        advice("queries", _holds_queries, "Q_IN_REGISTERS"),
        Constraint(name="slices of q", why_not=_slices_queries, reads=("Q_IN_REGISTERS",)),
        Constraint(
            name="registers",
            why_not=fits_registers(registers_needed),
            reads=("CONSUMERS", "BLOCK_N", "Q_IN_REGISTERS", "LOADER_REGISTERS"),
        ),
        advice("schedule", schedules, "CONSUMERS", "PACK_HEADS", "SCHEDULE"),
        advice("ring", _fills_ring, "STAGES", "BLOCK_N", "SCHEDULE"),
        advice("tile order", orders_tiles, "CONSUMERS", "PACK_HEADS", "GROUP_MB"),
        Constraint(
            name="shared memory",
            why_not=fits_shared(shared_parts),
            reads=("CONSUMERS", "BLOCK_N", "STAGES", "STAGING"),
        ),
        advice("staging", stages_output(shared_parts), "CONSUMERS", "BLOCK_N", "STAGES", "STAGING"),
        Constraint(name="halves of out", why_not=halves_output, reads=("STAGING",)),
        Constraint(
            name="q's place",
            why_not=_lends_queries,
            reads=("STAGING", "Q_IN_REGISTERS"),
        ),
        advice("overlap", _overlaps, "CONSUMERS", "OVERLAP", "PV_WAIT", "PING_PONG"),
        advice("loader registers", loader_registers, "SCHEDULE", "LOADER_REGISTERS"),
        advice("exponentials", _needs_exponentials, "CONSUMERS", "EXP2_BY_FMA"),
    ),
)
