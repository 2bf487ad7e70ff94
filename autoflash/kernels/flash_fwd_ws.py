"""flash_fwd_ws: the forward kernel for Hopper (templates/flash_fwd_ws.py.jinja), in Gluon.

Warp-specialised as FlashAttention-3 is: one warp loads through the tensor copy engine, two or three
warpgroups compute 64 query rows each with the warpgroup matrix instructions of sm_90. Where it
can't run (other GPUs, rows that the copy engine can't read) flash_fwd serves.
"""

from dataclasses import dataclass
from typing import Any

from autoflash.kernels import flash_fwd_ws_model as model
from autoflash.kernels.flash_fwd_ws_space import (
    SPACE,
    depth,
    most_packed,
    why_not_served,
)
from autoflash.kernels.hopper_tiles import (
    GROUP_SIZES,
    PERSISTENT,
    ROWS,
    block_d,
    block_dv,
    consumer_registers,
    group_heads,
    shared_parts,
    staged_columns,
    tile_count,
    tile_heads,
    widest,
)
from autoflash.kernels.kernel import (
    LOG2_E,
    TRITON_DTYPES,
    Access,
    Argument,
    Call,
    Counter,
    Descriptor,
    OneFunction,
    Pointer,
    Variant,
    copy_strides,
    slug_parts,
    tensor_shape,
    why_too_long,
)
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Value
from autoflash.target import Target

# A tile's number plus that of programs is a 32-bit number.
_MAX_TILES = 2**30


@dataclass(frozen=True, kw_only=True)
class FlashFwdWsVariant(Variant):
    """``direct``: out is written from registers; ``dynamic``: tiles come from a counter.

    ``schedule`` and ``group_mb`` reach the emitted file's launch alone, not the device code.
    """

    direct: bool
    dynamic: bool
    schedule: str
    group_mb: int

    def template_context(self) -> dict[str, Any]:
        return {
            "direct": self.direct,
            "dynamic": self.dynamic,
            "schedule": self.schedule,
            "group_mb": self.group_mb,
        }

    def slug(self, problem: Problem) -> str:
        parts = slug_parts(problem)
        parts += ["direct"] if self.direct else []
        return "_".join([*parts, self.schedule])


class FlashFwdWs(OneFunction):
    """The declaration of flash_fwd_ws."""

    name = "flash_fwd_ws"
    template = "flash_fwd_ws.py.jinja"
    language = "gluon"
    op = "fwd"
    results = frozenset({"out", "lse"})
    space = SPACE
    # What Triton 3.9 spills of the masked loop at 256 (3.7: 8). Spills that slow the main loop make
    # ptxas serialize the products, which is looked for by itself.
    tolerable_spills = 128

    def serves(self, problem: Problem, target: Target) -> str | None:
        reason = why_not_served(problem, target) or why_too_long(problem)
        if reason is not None:
            return reason
        # No config has more tiles than the smallest tile leads to.
        if problem.batch * problem.heads * -(-problem.seqlen_q // (2 * ROWS)) > _MAX_TILES:
            return f"more than {_MAX_TILES} tiles of {2 * ROWS} query rows: split the batch"
        return None

    def variant(self, problem: Problem, config: Config) -> FlashFwdWsVariant:
        return FlashFwdWsVariant(
            direct=config["STAGING"] == "direct",
            dynamic=config["SCHEDULE"] == "dynamic",
            schedule=str(config["SCHEDULE"]),
            group_mb=config.integer("GROUP_MB"),
        )

    def example(self, problem: Problem) -> Problem:
        # Of the group what any PACK_HEADS may rely on.
        group = most_packed(problem)
        fields = {**problem.as_dict(), "batch": 4, "heads": 16, "kv_heads": 16 // group}
        return Problem(**{**fields, "seqlen_q": 4096, "seqlen_k": 4096})

    def constexprs(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "CONSUMERS": config["CONSUMERS"],
            "BLOCK_N": config["BLOCK_N"],
            "STAGES": config["STAGES"],
            "BLOCK_D": block_d(problem),
            "DEPTH": depth(problem),
            "BLOCK_DV": block_dv(problem),
            "HEAD_DIM_V": problem.head_dim_v,
            "PACK_HEADS": config["PACK_HEADS"],
            "CAUSAL": problem.causal,
            "OVERLAP": config["OVERLAP"],
            "PV_WAIT": config["PV_WAIT"],
            "PING_PONG": config["PING_PONG"],
            "Q_IN_REGISTERS": config["Q_IN_REGISTERS"],
            "STAGING": config["STAGING"],
            "EXP2_BY_FMA": config["EXP2_BY_FMA"],
            "RESCALE_ABOVE": config["RESCALE_ABOVE"],
            "CONSUMER_REGISTERS": consumer_registers(config),
            "LOADER_REGISTERS": config["LOADER_REGISTERS"],
        }

    def options(self, config: Config) -> dict[str, int]:
        del config
        # Of the first consumer; the other parts bring their own warps.
        return {"num_warps": 4}

    def signature(self, problem: Problem, config: Config) -> dict[str, str]:
        dtype = TRITON_DTYPES[problem.dtype]
        blocks = _blocks(problem, config)
        kinds = {f"{t}_desc": f"tensordesc<{dtype}{list(blocks[t])}>" for t in "qkv"}
        if config["STAGING"] == "direct":
            kinds |= {"out_ptr": f"*{dtype}", **dict.fromkeys(_OUT_STRIDES, "i64")}
        else:
            kinds["out_desc"] = f"tensordesc<{dtype}{list(blocks['out'])}>"
        kinds["lse_ptr"] = "*fp32"
        if config["SCHEDULE"] == "dynamic":
            kinds["counter"] = "*i32"
        return {**kinds, "scale_log2": "fp32", **dict.fromkeys(_SIZES, "i32")}

    def bind(self, call: Call, config: Config) -> list[Argument]:
        problem, strides = call.problem, call.strides
        arguments: list[Argument] = [_descriptor(t, call, config) for t in "qkv"]
        if config["STAGING"] == "direct":
            arguments += [Pointer(tensor="out"), *strides["out"]]
        else:
            arguments.append(_descriptor("out", call, config))
        arguments.append(Pointer(tensor="lse"))
        if config["SCHEDULE"] == "dynamic":
            arguments.append(Counter())
        arguments += [call.scale * LOG2_E, problem.heads, problem.group]
        arguments += [tile_heads(config, problem), group_heads(config, problem)]
        arguments += [problem.seqlen_q, problem.seqlen_k, tile_count(config, problem)]
        return [*arguments, int("lse" in call.given)]

    def grid(self, problem: Problem, config: Config, target: Target) -> int:
        tiles = tile_count(config, problem)
        return min(tiles, target.sm_count) if config["SCHEDULE"] in PERSISTENT else tiles

    def adapt(self, config: Config, access: Access) -> Config | None:
        # There is no other way to load.
        return config if access.tma else None

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        consumers, packed = config.integer("CONSUMERS"), config.integer("PACK_HEADS")
        parts = {name: size for name, size in shared_parts(config, problem).items() if size}
        shared = ", ".join(f"{name} {size / 1024:g} KiB" for name, size in parts.items())
        rows = f"{ROWS} rows" if packed == 1 else f"{ROWS // packed} rows of {packed} heads"
        order = "overlapped with the next scores" if config["OVERLAP"] else "one after the other"
        order += ", consumers in turns" if config["PING_PONG"] != "none" else ""
        staging = {
            "own": "through a place of its own",
            "half": "by halves through a place of its own",
            "query": "through q's place",
            "direct": "from registers",
        }
        return [
            f"1 warp loads, with {config['LOADER_REGISTERS']} registers per thread",
            f"{consumers} consumers of 4 warps and {rows}, {consumer_registers(config)} registers",
            f"ring of {config['STAGES']} blocks of {config['BLOCK_N']} keys; P v {order}",
            f"tiles by {config['SCHEDULE']} schedule; out {staging[str(config['STAGING'])]}",
            f"shared memory: {shared}",
        ]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        values = _preferred(problem)
        tries = [{**values, **_NARROW_STEPS}] if _gains_by_narrow_steps(problem) else []
        # Each gives up a little more than the one before.
        for change in _DEFAULT_STEPS:
            values = {**values, **change}
            tries.append(values)
        fitted = (_fitted(values, problem, target) for values in tries)
        return list(dict.fromkeys(config for config in fitted if config is not None))

    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        del problem, config, target
        # The consumers are given all registers of an SM.
        return 1

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        del blocks_per_sm
        return model.estimate_ms(problem, config, target)


_SIZES = (
    "heads", "group", "n_heads", "group_heads", "seqlen_q", "seqlen_k", "n_tiles", "write_lse",
)  # fmt: skip
_OUT_STRIDES = ("stride_ob", "stride_oh", "stride_om")


# What defaults() changes, in this order.
_DEFAULT_STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"STAGES": 2},
    {"STAGING": "direct"},
    {"CONSUMERS": 2, "Q_IN_REGISTERS": False, "PING_PONG": "none", "STAGING": "own"},
    {"SCHEDULE": "grid"},
    {"RESCALE_ABOVE": 0},
    {"PV_WAIT": "end"},
    {"STAGING": "direct"},
)

# Measured on an H200 with 16384 tokens (docs/hopper-forward.md), by padded head dim.
_HOPPER: dict[int, dict[str, Any]] = {
    64: {"CONSUMERS": 3, "BLOCK_N": 128, "STAGES": 3, "STAGING": "own", "PING_PONG": "done"},
    128: {"CONSUMERS": 2, "BLOCK_N": 128, "STAGES": 2, "STAGING": "own", "PING_PONG": "none"},
    256: {"CONSUMERS": 2, "BLOCK_N": 64, "STAGES": 2, "STAGING": "half", "PING_PONG": "none"},
}
_NARROW_STEPS: dict[str, Any] = {"CONSUMERS": 4, "BLOCK_N": 64, "STAGES": 4}
# Up to so many rows.
_FEW_ROWS = 8192


def _gains_by_narrow_steps(problem: Problem) -> bool:
    """Whether the diagonal hides more of them than they cost, and four consumers have rows."""
    wide = widest(problem)
    return wide == 64 and problem.causal and 3 * ROWS < problem.seqlen_q <= _FEW_ROWS


def _preferred(problem: Problem) -> dict[str, Any]:
    """What defaults() starts from."""
    wide = widest(problem)
    values = {
        "OVERLAP": True,
        "PV_WAIT": "middle",
        "Q_IN_REGISTERS": False,
        "EXP2_BY_FMA": 0,
        "RESCALE_ABOVE": 8,
        "LOADER_REGISTERS": 24,
        "SCHEDULE": "dynamic",
        "GROUP_MB": 16,
        "PACK_HEADS": 1,
        **_HOPPER[wide],
    }
    if problem.seqlen_q < 2 * ROWS:
        # Few rows fill a tile better side by side.
        values["PACK_HEADS"] = most_packed(problem)
    if block_dv(problem) < wide and values["STAGING"] == "half":
        values["STAGING"] = "own"
    return values


def _fitted(values: dict[str, Any], problem: Problem, target: Target) -> Config | None:
    """A feasible Config close to ``values``: sizes no larger than the problem, else None."""
    fitted = dict(values)
    fitted["BLOCK_N"] = min(values["BLOCK_N"], max(64, next_power_of_2(problem.seqlen_k)))
    if problem.seqlen_q * values["PACK_HEADS"] <= 2 * ROWS:
        fitted["CONSUMERS"] = 2
    if tile_count(Config(**fitted), problem) <= target.sm_count:
        fitted |= {"SCHEDULE": "grid"}
        fitted["STAGES"] = min(fitted["STAGES"], max(2, -(-problem.seqlen_k // fitted["BLOCK_N"])))
    # The smallest of the sizes that group the same heads.
    sizes = [s for s in GROUP_SIZES if s <= values["GROUP_MB"]]
    for size in sizes:
        for staging in (values["STAGING"], "own", "half", "query", "direct"):
            config = Config(**{**fitted, "GROUP_MB": size, "STAGING": staging})
            same = group_heads(config, problem) == group_heads(
                Config(**{**fitted, "GROUP_MB": sizes[-1]}), problem
            )
            alone = tile_count(config, problem) <= target.sm_count
            if (same or alone) and SPACE.why_not(config, problem, target) is None:
                return config
    return None


def _blocks(problem: Problem, config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of what one copy moves."""
    packed, keys = config.integer("PACK_HEADS"), config.integer("BLOCK_N")
    rows = (ROWS,) if packed == 1 else (ROWS // packed, packed)
    return {
        "q": (1, 1, *rows, block_d(problem)),
        "k": (1, 1, keys, block_d(problem)),
        "v": (1, 1, keys, block_dv(problem)),
        "out": (1, 1, *rows, staged_columns(config, problem) or block_dv(problem)),
    }


def _descriptor(tensor: str, call: Call, config: Config) -> Descriptor:
    batch, heads, rows, dim = tensor_shape(tensor, call.problem)
    by_batch, by_head, by_row = copy_strides(tensor, call.problem, call.strides[tensor])
    packed = config.integer("PACK_HEADS")
    shape: tuple[int, ...] = (batch, heads, rows, dim)
    strides: tuple[int, ...] = (by_batch, by_head, by_row, 1)
    if tensor in ("q", "out") and packed > 1:
        shape = (batch, heads // packed, rows, packed, dim)
        strides = (by_batch, packed * by_head, by_row, by_head, 1)
    return Descriptor(
        tensor=tensor, shape=shape, strides=strides, block=_blocks(call.problem, config)[tensor]
    )
