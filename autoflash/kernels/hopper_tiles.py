"""What the warp-specialised forwards for Hopper share: tiles, what they take, and what their spaces
have against a config."""

from collections.abc import Callable

from autoflash.dtypes import DTYPE_BYTES
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Constraint
from autoflash.target import Target

# Rows of a consumer: what one matrix instruction of a warpgroup computes.
ROWS = 64
PERSISTENT = ("persistent", "dynamic")
GROUP_SIZES = (1, 8, 16, 32, 64)

# Registers of a thread times warpgroups that a launch of CONSUMERS is given: the register file
# divided by the threads, rounded down to eights as the hardware does.
_REGISTER_POOL = {2: 504, 3: 512, 4: 480}
# Barriers, the mail of dynamic schedules, alignment.
_OTHER_SHARED = 1024

# A Constraint's predicate, and what says how much shared memory holds what.
WhyNot = Callable[[Config, Problem, Target], str | None]
Parts = Callable[[Config, Problem], dict[str, int]]


def block_d(problem: Problem) -> int:
    return max(64, next_power_of_2(problem.head_dim))


def block_dv(problem: Problem) -> int:
    return max(64, next_power_of_2(problem.head_dim_v))


def widest(problem: Problem) -> int:
    """The larger of both padded head dims."""
    return max(block_d(problem), block_dv(problem))


def consumer_registers(config: Config) -> int:
    """Registers of a consumer's thread: what the loader leaves, in eights."""
    consumers = config.integer("CONSUMERS")
    left = _REGISTER_POOL[consumers] - config.integer("LOADER_REGISTERS")
    return left // consumers // 8 * 8


def staged_columns(config: Config, problem: Problem) -> int:
    """Columns of out that have a place of their own in shared memory."""
    share = {"own": 1, "half": 2}.get(str(config["STAGING"]))
    return block_dv(problem) // share if share else 0


def shared_parts(config: Config, problem: Problem) -> dict[str, int]:
    """Bytes of shared memory by what they hold."""
    size, out_size = DTYPE_BYTES[problem.dtype], DTYPE_BYTES[problem.dtype_of_out]
    rows = config.integer("CONSUMERS") * ROWS
    ring = config.integer("STAGES") * config.integer("BLOCK_N")
    return {
        "q": rows * block_d(problem) * size,
        "k": ring * block_d(problem) * size,
        "v": ring * block_dv(problem) * size,
        "out": rows * staged_columns(config, problem) * out_size,
        "barriers": _OTHER_SHARED,
    }


def packed_heads(config: Config) -> int:
    """Query heads side by side in a tile; one where a kernel has no Param for it."""
    return config.integer("PACK_HEADS") if "PACK_HEADS" in config else 1


def tile_heads(config: Config, problem: Problem) -> int:
    """Heads as the tiles count them: PACK_HEADS query heads are one."""
    return problem.batch * problem.heads // packed_heads(config)


def tile_count(config: Config, problem: Problem) -> int:
    """Tiles of the whole problem."""
    rows = config.integer("CONSUMERS") * ROWS // packed_heads(config)
    return tile_heads(config, problem) * -(-problem.seqlen_q // rows)


def group_heads(config: Config, problem: Problem) -> int:
    """Heads that run side by side: those whose keys and values fit in GROUP_MB together."""
    pair = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * DTYPE_BYTES[problem.dtype]
    fit = max(1, (config.integer("GROUP_MB") << 20) // max(1, pair))
    sharing = max(1, problem.group // packed_heads(config))
    return min(fit * sharing, tile_heads(config, problem))


def matches_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    consumers, packed = config.integer("CONSUMERS"), packed_heads(config)
    if consumers > 2 and problem.seqlen_q * packed <= (consumers - 1) * ROWS:
        return f"{consumers} consumers of {ROWS} rows for {problem.seqlen_q * packed} rows"
    return None


def matches_keys(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    keys = config.integer("BLOCK_N")
    if keys > max(64, next_power_of_2(problem.seqlen_k)):
        return f"BLOCK_N={keys} is more than the {problem.seqlen_k} keys"
    return None


def fits_registers(needed: Callable[[Config, Problem], int]) -> WhyNot:
    """A constraint: a consumer has the registers that it is said to need."""

    def why_not(config: Config, problem: Problem, target: Target) -> str | None:
        del target
        need, have = needed(config, problem), consumer_registers(config)
        if need > have:
            return f"a consumer needs about {need} registers per thread and has {have}"
        return None

    return why_not


def fits_shared(parts: Parts) -> WhyNot:
    """A constraint: what ``parts`` says fits."""

    def why_not(config: Config, problem: Problem, target: Target) -> str | None:
        need = sum(parts(config, problem).values())
        if need > target.shared_memory:
            return f"needs {need} bytes of shared memory, {target.name} has {target.shared_memory}"
        return None

    return why_not


def stages_output(parts: Parts, *, alike: tuple[str, ...] = ()) -> WhyNot:
    """A constraint: out is staged in a place of its own where ``parts`` leaves room for that; the
    ways ``alike`` are never refused."""

    def why_not(config: Config, problem: Problem, target: Target) -> str | None:
        if config["STAGING"] in alike:
            return None
        for better in ("own", "half"):
            if config["STAGING"] == better:
                return None
            other = Config(**{**config, "STAGING": better})
            fits = sum(parts(other, problem).values()) <= target.shared_memory
            if fits and halves_output(other, problem, target) is None:
                faster = "which is 2 to 4 % faster (16 bits)"
                return f"out has room of its own (STAGING={better}), {faster}"
        return None

    return why_not


def halves_output(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["STAGING"] == "half" and block_dv(problem) < 128:
        return f"half of {block_dv(problem)} columns is too narrow to be copied"
    return None


def schedules(config: Config, problem: Problem, target: Target) -> str | None:
    schedule, tiles = config["SCHEDULE"], tile_count(config, problem)
    if schedule in PERSISTENT and tiles <= target.sm_count:
        return f"{tiles} tiles: each of the {target.sm_count} SMs has one at most"
    if schedule == "persistent" and problem.causal:
        return "causal tiles differ in length: dealt out in advance they lose 10 to 30 %"
    return None


def orders_tiles(config: Config, problem: Problem, target: Target) -> str | None:
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


def loader_registers(config: Config, problem: Problem, target: Target) -> str | None:
    del problem, target
    registers = config.integer("LOADER_REGISTERS")
    if registers > 24 and config["SCHEDULE"] != "dynamic":
        return f"{registers} registers are more than a loader without a counter needs"
    return None


def advice(name: str, why_not: WhyNot, *reads: str) -> Constraint:
    """A Constraint on what would run, but isn't worth trying."""
    return Constraint(name=name, why_not=why_not, reads=reads, advice=True)
