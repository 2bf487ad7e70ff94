"""flash_bwd_split's search space: what may be tuned, and why not every combination."""

from autoflash.dtypes import DTYPE_BYTES
from autoflash.kernels.flash_bwd_ws_space import (
    CONSUMER_REGISTERS,
    GROUP_SIZES,
    padded_rows,
)
from autoflash.kernels.hopper_tiles import block_d
from autoflash.problem import Problem
from autoflash.space import Config, Constraint, Param, SearchSpace
from autoflash.target import Target

# Rows of a program of dq: two consumers with 64 each.
ROWS = 128
# With wider heads a consumer's registers hold dk or dv, not both.
_WIDEST_OF_ONE = 128
_OTHER_REGISTERS = 40
# What may be asked for on paper: some of them are never needed at once.
_PAPER_REGISTERS = 264
_OTHER_SHARED = 2048


def paired(problem: Problem) -> bool:
    """Whether one consumer sums up dv and the other dk, for the same 64 keys."""
    return block_d(problem) > _WIDEST_OF_ONE


def keys_owned(problem: Problem) -> int:
    """Keys of a program of dk and dv."""
    return 64 if paired(problem) else 128


def dkdv_registers(config: Config, problem: Problem) -> int:
    """Registers of a thread of dk and dv: sums, scores and dP, 16-bit P and dS, the rest."""
    rows = config.integer("DKDV_BLOCK_M")
    sums = block_d(problem) // 2 if paired(problem) else block_d(problem)
    scores = rows // 2 if paired(problem) else rows
    return sums + scores + rows // 4 + _OTHER_REGISTERS


def dq_registers(config: Config, problem: Problem) -> int:
    """Registers of a thread of dq: sums, scores and dP, 16-bit dS, the rest."""
    keys = config.integer("DQ_BLOCK_N")
    return block_d(problem) // 2 + keys + keys // 4 + _OTHER_REGISTERS


def dkdv_shared(config: Config, problem: Problem) -> dict[str, int]:
    """Bytes of shared memory of a program of dk and dv, by what they hold."""
    row = block_d(problem) * DTYPE_BYTES[problem.dtype]
    rows, stages = config.integer("DKDV_BLOCK_M"), config.integer("DKDV_STAGES")
    handed = stages * 64 * rows * DTYPE_BYTES[problem.dtype] if paired(problem) else 0
    return {
        "k, v": 2 * keys_owned(problem) * row,
        "q, dout": 2 * stages * rows * row,
        "statistics": 2 * stages * rows * 4,
        "P": handed,
        "barriers": _OTHER_SHARED,
    }


def dq_shared(config: Config, problem: Problem) -> dict[str, int]:
    """Bytes of shared memory of a program of dq, by what they hold."""
    row = block_d(problem) * DTYPE_BYTES[problem.dtype]
    ring = config.integer("DQ_SLOTS") * config.integer("DQ_BLOCK_N")
    return {"q, dout": 2 * ROWS * row, "k, v": ring * row, "barriers": _OTHER_SHARED}


def group_heads(config: Config, problem: Problem, heads: int) -> int:
    """Of ``heads`` those that run side by side: whose tensors of one length fit in GROUP_MB."""
    per_head = problem.batch * problem.heads // max(1, heads)
    one = per_head * problem.seqlen_q * problem.head_dim * 2 * DTYPE_BYTES[problem.dtype]
    fit = max(1, (config.integer("GROUP_MB") << 20) // max(1, one))
    return min(fit, heads)


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
    if problem.head_dim % 8:
        return (
            f"head_dim={problem.head_dim}: it must be a multiple of 8 (16 bytes, for the tensor "
            "copy engine): flash_bwd serves it"
        )
    if problem.batch * problem.heads * padded_rows(problem) >= 2**31:
        return "more than 2^31 query rows: flash_bwd serves it"
    return None


def _hardware(config: Config, problem: Problem, target: Target) -> str | None:
    del config
    return why_not_served(problem, target)


def _fits_registers(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    needs = {"dk, dv": dkdv_registers(config, problem), "dq": dq_registers(config, problem)}
    for part, need in needs.items():
        if need > _PAPER_REGISTERS:
            return f"{part}: about {need} registers per thread, of {CONSUMER_REGISTERS}"
    if paired(problem) and config["DQ_BLOCK_N"] != 32:
        return f"dq: steps of {config['DQ_BLOCK_N']} keys spill 336 bytes with such wide heads"
    return None


def _fits_shared(config: Config, problem: Problem, target: Target) -> str | None:
    parts = {"dk, dv": dkdv_shared(config, problem), "dq": dq_shared(config, problem)}
    for part, sizes in parts.items():
        need = sum(sizes.values())
        if need > target.shared_memory:
            have = f"{target.name} has {target.shared_memory}"
            return f"{part}: needs {need} bytes of shared memory, {have}"
    return None


def _issues(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    if config["DP_EARLY"] and paired(problem):
        return "of a pair of consumers one computes P and the other dP: there is no order to choose"
    return None


def _matches_keys(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    keys = config.integer("DQ_BLOCK_N")
    if keys > max(32, 1 << (problem.seqlen_k - 1).bit_length()):
        return f"DQ_BLOCK_N={keys} is more than the {problem.seqlen_k} keys"
    return None


def _orders_tiles(config: Config, problem: Problem, target: Target) -> str | None:
    size = config.integer("GROUP_MB")
    if size == GROUP_SIZES[0]:
        return None
    smaller = Config(**{**config, "GROUP_MB": GROUP_SIZES[GROUP_SIZES.index(size) - 1]})
    every = [problem.batch * problem.heads, problem.batch * problem.kv_heads]
    found = [group_heads(config, problem, heads) for heads in every]
    if found == [group_heads(smaller, problem, heads) for heads in every]:
        return f"GROUP_MB={size} groups {found[0]} heads, as {smaller['GROUP_MB']} does"
    del target
    return None


SPACE = SearchSpace(
    params=(
        Param(name="DKDV_BLOCK_M", choices=(64, 128), doc="query rows of one step of dk and dv"),
        Param(name="DKDV_STAGES", choices=(1, 2, 3), doc="depth of its ring of q and dout"),
        Param(name="DP_EARLY", choices=(False, True), doc="its dP issued before the exponentials"),
        Param(name="DQ_BLOCK_N", choices=(32, 64, 128), doc="keys of one step of dq"),
        Param(name="DQ_SLOTS", choices=(2, 3, 4, 6), doc="blocks of k or v in its ring"),
        Param(
            name="GROUP_MB",
            choices=GROUP_SIZES,
            doc="MiB side by side (L2)",
            compiled=False,
        ),
    ),
    constraints=(
        Constraint(name="hardware", why_not=_hardware, reads=()),
        Constraint(name="order of products", why_not=_issues, reads=("DP_EARLY",)),
        Constraint(name="registers", why_not=_fits_registers, reads=("DKDV_BLOCK_M", "DQ_BLOCK_N")),
        Constraint(
            name="shared memory",
            why_not=_fits_shared,
            reads=("DKDV_BLOCK_M", "DKDV_STAGES", "DQ_BLOCK_N", "DQ_SLOTS"),
        ),
        Constraint(name="keys", why_not=_matches_keys, reads=("DQ_BLOCK_N",), advice=True),
        Constraint(name="tile order", why_not=_orders_tiles, reads=("GROUP_MB",), advice=True),
    ),
)
