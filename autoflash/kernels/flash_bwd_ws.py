"""flash_bwd_ws: the warp-specialised backward for Hopper (templates/flash_bwd_ws.py.jinja).

FlashAttention-3's way in Gluon, a chain of three functions: row statistics and zeroed sums; dk, dv
and the sums of dq in one pass, five products per block, the sums by the copy engine's additions; dq
rounded. The order of the additions differs from run to run: where results must repeat bit for bit,
or where not all of them are asked for, flash_bwd serves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoflash.kernels import flash_bwd_ws_model as model
from autoflash.kernels.flash_bwd_ws_space import (
    CONSUMER_REGISTERS,
    CONSUMERS,
    KEYS,
    LOADER_REGISTERS,
    SPACE,
    dq_part,
    group_heads,
    grouped,
    lead_rows,
    padded_rows,
    shared_parts,
    tile_count,
    why_not_served,
    why_not_spread,
)
from autoflash.kernels.hopper_tiles import block_d
from autoflash.kernels.kernel import (
    LOG2_E,
    MAX_GRID,
    TRITON_DTYPES,
    Access,
    Argument,
    Call,
    Counter,
    Descriptor,
    Function,
    Kernel,
    Pointer,
    Scratch,
    Variant,
    copy_strides,
    slug_parts,
    tensor_shape,
    why_too_long,
)
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.target import Target

_RESULTS = frozenset({"dq", "dk", "dv"})
# Loads and stores at memory's speed whatever they are: not worth Params.
_PREPARE_ROWS = 32
_CONVERT_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class FlashBwdWsVariant(Variant):
    """``dynamic``: tiles come from a counter. The order of tiles is the emitted file's own."""

    dynamic: bool
    group_mb: int

    def template_context(self) -> dict[str, Any]:
        return {"dynamic": self.dynamic, "group_mb": self.group_mb}

    def slug(self, problem: Problem) -> str:
        return "_".join([*slug_parts(problem), *(["dynamic"] if self.dynamic else [])])


class FlashBwdWs(Kernel):
    """The declaration of flash_bwd_ws."""

    name = "flash_bwd_ws"
    template = "flash_bwd_ws.py.jinja"
    language = "gluon"
    op = "bwd"
    space = SPACE
    # Numbers that don't change in the loop are what spills: they are read again once a step.
    tolerable_spills = 512

    def serves(self, problem: Problem, target: Target) -> str | None:
        reason = why_not_served(problem, target) or why_too_long(problem)
        if reason is not None:
            return reason
        if tile_count(problem) > MAX_GRID:
            return f"more than {MAX_GRID} blocks of {KEYS} keys: split the batch"
        return None

    def variant(self, problem: Problem, config: Config) -> FlashBwdWsVariant:
        del problem
        return FlashBwdWsVariant(
            dynamic=config["SCHEDULE"] == "dynamic", group_mb=config.integer("GROUP_MB")
        )

    def scratch(self, problem: Problem) -> tuple[Scratch, ...]:
        heads = (problem.batch, problem.heads)
        statistics = (*heads, padded_rows(problem))
        sums = (*statistics, problem.head_dim)
        return (
            Scratch(name="lse2", shape=statistics, dtype="float32"),
            Scratch(name="minus_delta", shape=statistics, dtype="float32"),
            Scratch(name="sums", shape=sums, dtype="float32"),
        )

    def functions(self, problem: Problem, config: Config) -> tuple[Function, ...]:
        prepare = row_statistics("flash_bwd_ws_prepare", problem, sums=True)
        return (prepare, _main(problem, config), _convert(problem))

    def adapt(self, config: Config, access: Access) -> Config | None:
        # There is no other way to load, no part that could be left out, and no order of additions.
        return config if access.tma and access.whole and not access.repeatable else None

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        parts = shared_parts(config, problem).items()
        shared = ", ".join(f"{name} {size / 1024:g} KiB" for name, size in parts)
        order = "before" if config["DP_EARLY"] else "after"
        turns = ", in turns" if config["TURNS"] else ""
        start = "where its keys are" if config["SPREAD"] else "at the first row"
        return [
            f"1 warp loads, with {LOADER_REGISTERS} registers per thread",
            f"{CONSUMERS} consumers of 4 warps and 64 keys, {CONSUMER_REGISTERS} registers{turns}",
            f"ring of {config['STAGES']} blocks of {config['BLOCK_M']} query rows; "
            f"dP issued {order} the exponentials; dq split by {config['DQ_SPLIT']}; "
            f"a tile starts {start}; "
            f"tiles by {config['SCHEDULE']} schedule",
            f"shared memory: {shared}",
        ]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        found: dict[Config, None] = {}
        # At 128 it takes registers that the loop needs (-5 %); at 64 it is worth 4 to 7 %.
        spread = block_d(problem) == 64 and why_not_spread(problem) is None
        schedule = "dynamic" if tile_count(problem) > target.sm_count else "grid"
        for tried in _TRIES[block_d(problem)]:
            values = {**tried, "SCHEDULE": schedule, "SPREAD": spread}
            config = grouped(values, lambda config: group_heads(config, problem))
            if SPACE.why_not(config, problem, target, advice=False) is None:
                found[config] = None
        return list(found)

    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        del problem, config, target
        # The consumers are given all registers of an SM.
        return 1

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        del blocks_per_sm
        return model.estimate_ms(problem, config, target)


def _tried(**changes: Any) -> dict[str, Any]:
    base = {"BLOCK_M": 64, "STAGES": 2, "DQ_SPLIT": "columns", "DP_EARLY": False, "TURNS": True}
    return {**base, **changes}


# What defaults() tries, by padded head dim, each with fewer registers or less shared memory.
_TRIES = {
    64: (
        _tried(BLOCK_M=128, DQ_SPLIT="rows", DP_EARLY=True),
        _tried(BLOCK_M=128, DQ_SPLIT="rows", TURNS=False),
        _tried(),
        _tried(STAGES=1),
    ),
    128: (_tried(), _tried(TURNS=False), _tried(STAGES=1)),
}


def row_statistics(name: str, problem: Problem, *, sums: bool) -> Function:
    """The first function of both forms: -delta, lse in base 2, and zeros for the sums if there are
    any (templates/shared/row_statistics.py.jinja)."""
    pointer = f"*{TRITON_DTYPES[problem.dtype]}"
    flat = ("dlse", "lse", "lse2", "minus_delta", *(("sums",) if sums else ()))

    def bind(call: Call) -> list[Argument]:
        tensors = [Pointer(tensor=name) for name in ("out", "dout", *flat)]
        p = call.problem
        strides = [*call.strides["out"], *call.strides["dout"]]
        sizes = [p.heads, p.seqlen_q, padded_rows(p), lead_rows(p), int("dlse" in call.given)]
        return [*tensors, *strides, *sizes]

    def grid(problem: Problem, target: Target) -> int:
        del target
        return problem.batch * problem.heads * -(-padded_rows(problem) // _PREPARE_ROWS)

    strides = [f"stride_{t}{axis}" for t in ("o", "do") for axis in "bhm"]
    sizes = ("heads", "seqlen_q", "padded", "lead", "has_dlse")
    width = {"HEAD_DIM": problem.head_dim, "BLOCK_D": block_d(problem)} if sums else {}
    return Function(
        name=name,
        signature={
            "out_ptr": pointer, "dout_ptr": pointer, **{f"{t}_ptr": "*fp32" for t in flat},
            **dict.fromkeys(strides, "i64"), **dict.fromkeys(sizes, "i32"),
        },
        constexprs={
            **width,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_DV": block_d(problem),
            "BLOCK_M": _PREPARE_ROWS,
        },
        options={"num_warps": 4, "num_stages": 1},
        bind=bind,
        grid=grid,
        results=_RESULTS,
    )  # fmt: skip


def _main(problem: Problem, config: Config) -> Function:
    blocks = _blocks(problem, config)
    sizes = (
        "kv_heads", "group", "batch_heads", "group_heads", "seqlen_q", "seqlen_k", "padded", "lead",
        "n_tiles",
    )  # fmt: skip

    dynamic = config["SCHEDULE"] == "dynamic"
    counter = {"counter": "*i32"} if dynamic else {}

    def bind(call: Call) -> list[Argument]:
        p = call.problem
        arguments: list[Argument] = [copied(name, call, b) for name, b in blocks.items()]
        arguments += [Counter()] if dynamic else []
        arguments += [call.scale, call.scale * LOG2_E, p.kv_heads, p.group]
        arguments += [p.batch * p.kv_heads, group_heads(config, p)]
        return [*arguments, p.seqlen_q, p.seqlen_k, padded_rows(p), lead_rows(p), tile_count(p)]

    def grid(problem: Problem, target: Target) -> int:
        tiles = tile_count(problem)
        return min(tiles, target.sm_count) if dynamic else tiles

    return Function(
        name="flash_bwd_ws",
        signature={
            **descriptor_types(problem, blocks),
            **counter,
            "scale": "fp32",
            "scale_log2": "fp32",
            **dict.fromkeys(sizes, "i32"),
        },
        constexprs={
            "CONSUMERS": CONSUMERS,
            "BLOCK_M": config["BLOCK_M"],
            "STAGES": config["STAGES"],
            "BLOCK_D": block_d(problem),
            "CAUSAL": problem.causal,
            "SPREAD": config["SPREAD"],
            "DQ_SPLIT": config["DQ_SPLIT"],
            "DP_EARLY": config["DP_EARLY"],
            "TURNS": config["TURNS"],
            "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
            "LOADER_REGISTERS": LOADER_REGISTERS,
        },
        # Of the first consumer; the other parts bring their own warps.
        options={"num_warps": 4},
        bind=bind,
        grid=grid,
        results=_RESULTS,
        language="gluon",
    )


def _convert(problem: Problem) -> Function:
    def bind(call: Call) -> list[Argument]:
        tensors = [Pointer(tensor="sums"), Pointer(tensor="dq")]
        p = call.problem
        return [
            *tensors,
            *call.strides["dq"],
            call.scale,
            p.heads,
            p.seqlen_q,
            padded_rows(p),
            lead_rows(p),
        ]

    def grid(problem: Problem, target: Target) -> int:
        del target
        return problem.batch * problem.heads * -(-problem.seqlen_q // _CONVERT_ROWS)

    return Function(
        name="flash_bwd_ws_convert",
        signature={
            "sums_ptr": "*fp32", "dq_ptr": f"*{TRITON_DTYPES[problem.dtype]}",
            **{f"stride_dq{axis}": "i64" for axis in "bhm"},
            "scale": "fp32", "heads": "i32", "seqlen_q": "i32", "padded": "i32", "lead": "i32",
        },
        constexprs={
            "HEAD_DIM": problem.head_dim, "BLOCK_D": block_d(problem), "BLOCK_M": _CONVERT_ROWS,
        },
        options={"num_warps": 4, "num_stages": 1},
        bind=bind,
        grid=grid,
        results=frozenset({"dq"}),
    )  # fmt: skip


# What holds fp32 whatever the problem's dtype.
_SUMS = ("lse2", "minus_delta", "sums")


def _blocks(problem: Problem, config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of what one copy moves, in the order of the function's descriptors."""
    rows, wide = config.integer("BLOCK_M"), block_d(problem)
    step, own = (1, 1, rows, wide), (1, 1, KEYS // CONSUMERS, wide)
    return {
        "q": step, "k": own, "v": own, "dout": step, "lse2": (rows,), "minus_delta": (rows,),
        "sums": dq_part(config, problem), "dk": own, "dv": own,
    }  # fmt: skip


def descriptor_types(problem: Problem, blocks: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Names and types of the arguments by which ``blocks`` of tensors or scratch are copied."""
    dtype = TRITON_DTYPES[problem.dtype]
    return {
        f"{name}_desc": f"tensordesc<{'fp32' if name in _SUMS else dtype}{list(block)}>"
        for name, block in blocks.items()
    }


def copied(tensor: str, call: Call, block: tuple[int, ...]) -> Descriptor:
    """The descriptor by which blocks of a tensor, or of scratch, are copied."""
    p = call.problem
    if tensor in _SUMS:
        # Of all heads in a row: one number says where a block begins, and none begins before the
        # first, where the copy engine can't add.
        shape = (p.batch * p.heads * padded_rows(p), p.head_dim)[: len(block)]
        strides = (p.head_dim, 1)[-len(block) :]
        return Descriptor(tensor=tensor, shape=shape, strides=strides, block=block, dtype="float32")
    strides = (*copy_strides(tensor, p, call.strides[tensor]), 1)
    return Descriptor(tensor=tensor, shape=tensor_shape(tensor, p), strides=strides, block=block)
