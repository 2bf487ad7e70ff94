"""flash_fwd's search space: what may be tuned, and why a combination can't or shouldn't run."""

from autoflash.dtypes import DTYPE_BYTES
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import Target

MAX_REGISTERS = 255
# Registers that addresses, loop state and the probabilities' 16-bit copy take beside the two
# accumulators; below this margin every variant we compiled for sm_90 spilled heavily.
OTHER_REGISTERS = 31


def block_d(problem: Problem) -> int:
    return max(16, next_power_of_2(problem.head_dim))


def block_dv(problem: Problem) -> int:
    return max(16, next_power_of_2(problem.head_dim_v))


def accumulator_registers(config: Config, problem: Problem, target: Target) -> float:
    """32-bit registers per thread for the scores and the output accumulator."""
    threads = config.integer("num_warps") * target.warp_size
    return config.integer("BLOCK_M") * (block_dv(problem) + config.integer("BLOCK_N")) / threads


def shared_bytes(config: Config, problem: Problem, target: Target) -> int:
    """Shared memory that aligned operands take at least, as read off compiled binaries.

    NVIDIA keeps every stage of K and V; with one stage both use the same place. AMD, and sm_120's
    tensor copies, hold one stage less. Where the matrix unit reads both operands from shared memory
    (sm_90, sm_100) a query tile of 64 rows or more lies there too.
    """
    size = DTYPE_BYTES[problem.dtype]
    rows, keys, stages = (config.integer(n) for n in ("BLOCK_M", "BLOCK_N", "num_stages"))
    key, value = (keys * dim * size for dim in (block_d(problem), block_dv(problem)))
    if target.vendor != "nvidia" or (target.capability == 120 and config["LOAD"] == "tma"):
        stages -= 1
    query = 0
    if target.capability in (90, 100, 103) and rows >= 64:
        query = rows * block_d(problem) * size
    return query + (stages * (key + value) if stages > 1 else max(key, value))


def scratch_bytes(config: Config, problem: Problem, target: Target) -> int:
    """Shared memory that Triton may take beside the operands to change layouts: a safe guess."""
    if target.capability in (90, 100, 103):
        return 2048
    # Queries pass through it once, probabilities and the accumulator in parts.
    keys = config.integer("BLOCK_N")
    row = max(2 * block_d(problem), block_dv(problem) + 2 * keys)
    return config.integer("BLOCK_M") * row + 1024


def _fits_shared(config: Config, problem: Problem, target: Target) -> str | None:
    need = shared_bytes(config, problem, target)
    if need > target.shared_memory:
        return f"needs {need} bytes of shared memory, {target.name} has {target.shared_memory}"
    return None


def _fits_registers(config: Config, problem: Problem, target: Target) -> str | None:
    need = accumulator_registers(config, problem, target) + OTHER_REGISTERS
    # AMD's CDNA threads have 512 registers, half of them accumulators.
    limit = MAX_REGISTERS if target.vendor == "nvidia" else 512
    cap = config.integer("maxnreg") or limit
    if need > cap:
        return f"accumulators need about {need:.0f} registers per thread, the limit is {cap}"
    return None


def _rows_per_warp(config: Config, problem: Problem, target: Target) -> str | None:
    del problem, target
    rows, warps = config.integer("BLOCK_M"), config.integer("num_warps")
    if warps * 16 > max(rows, 64):
        return f"{warps} warps need {warps * 16} query rows, so that a row stays in one warp"
    return None


def matches_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    rows = config.integer("BLOCK_M")
    most = max(16, next_power_of_2(problem.seqlen_q))
    if rows > most:
        return f"BLOCK_M={rows} is more than the {problem.seqlen_q} query rows"
    if rows < 64 <= most:
        return f"BLOCK_M={rows} leaves the matrix unit's 64-row instruction partly empty"
    return None


def matches_keys(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    keys = config.integer("BLOCK_N")
    if keys > max(32, next_power_of_2(problem.seqlen_k)):
        return f"BLOCK_N={keys} is more than the {problem.seqlen_k} keys"
    return None


def why_no_tma(config: Config, problem: Problem, target: Target) -> str | None:
    if config["LOAD"] != "tma":
        return None
    if not target.has_tma:
        return f"{target.arch} has no tensor copy engine (sm_90 and newer have)"
    size = DTYPE_BYTES[problem.dtype]
    if problem.head_dim * size % 16 or problem.head_dim_v * size % 16:
        return "rows of q, k and v must be multiples of 16 bytes"
    return None


def _has_diagonal(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["DIAGONAL_FIRST"] and not problem.causal:
        return "there is no diagonal without a causal mask"
    return None


def has_heads(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    group = config.integer("GROUP_HEADS")
    if group > next_power_of_2(problem.batch * problem.heads):
        return (
            f"GROUP_HEADS={group} is more than the {problem.batch * problem.heads} heads there are"
        )
    return None


def register_cap_helps(config: Config, problem: Problem, target: Target) -> str | None:
    del problem
    cap = config.integer("maxnreg")
    if cap and target.vendor != "nvidia":
        return "a register cap is NVIDIA's"
    # 65536 registers: 168 lets a third program of 4 warps onto an SM, 128 a second one of 8 warps.
    if cap == 168 and config.integer("num_warps") != 4:
        return "168 registers make room for a program more only with 4 warps"
    return None


SPACE = SearchSpace(
    params=(
        Param(name="BLOCK_M", choices=(16, 32, 64, 128, 256), doc="query rows of a program"),
        Param(name="BLOCK_N", choices=(32, 64, 128), doc="keys of one step"),
        Param(name="num_warps", choices=(4, 8), doc="warps of a program"),
        Param(name="num_stages", choices=(1, 2, 3, 4), doc="depth of the load pipeline"),
        Param(name="LOAD", choices=("pointer", "tma"), doc="how q, k and v are loaded"),
        Param(name="GROUP_HEADS", choices=(1, 8, 32), doc="heads that run side by side (L2)"),
        Param(name="DIAGONAL_FIRST", choices=(False, True), doc="masked key blocks first"),
        Param(name="maxnreg", choices=(0, 128, 168), doc="cap on registers; 0 is none"),
    ),
    constraints=(
        Constraint(name="query rows", why_not=matches_queries),
        Constraint(name="keys", why_not=matches_keys),
        Constraint(name="rows per warp", why_not=_rows_per_warp),
        Constraint(name="load path", why_not=why_no_tma),
        Constraint(name="loop order", why_not=_has_diagonal),
        Constraint(name="tile order", why_not=has_heads),
        Constraint(name="register cap", why_not=register_cap_helps),
        Constraint(name="registers", why_not=_fits_registers),
        Constraint(name="shared memory", why_not=_fits_shared),
    ),
)
