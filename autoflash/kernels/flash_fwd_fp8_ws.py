"""flash_fwd_fp8_ws: the fp8 forward for Hopper, in Gluon (templates/flash_fwd_fp8_ws.py.jinja).

flash_fwd_ws's structure with q, k and v in e4m3 and descales folded in. The matrix unit reads a
transposed v with permuted keys; one that comes by rows is brought there by a function of its own,
which is tuned, timed and served with the kernel. What it can't run flash_fwd_fp8 serves.
"""

from dataclasses import dataclass
from typing import Any

from autoflash.dtypes import FP8
from autoflash.fp8 import padded_keys
from autoflash.kernels import descales
from autoflash.kernels import flash_fwd_fp8_ws_model as model
from autoflash.kernels.flash_fwd_fp8_ws_space import (
    SPACE,
    pv_part,
    shared_parts,
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
    staged_columns,
    tile_count,
    widest,
)
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
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config
from autoflash.target import Target

# A tile's number plus that of programs is a 32-bit number.
_MAX_TILES = 2**30
_TURNED = "vt"
# Keys that a program of the first function turns, and its warps.
_TURN_KEYS = 128
_TURN_WARPS = 4


@dataclass(frozen=True, kw_only=True)
class FlashFwdFp8WsVariant(Variant):
    """``direct``: out is written from registers; ``dynamic``: tiles come from a counter;
    ``turned``: v comes by rows.

    ``schedule`` and ``group_mb`` reach the emitted file's launch alone, not the device code.
    """

    direct: bool
    dynamic: bool
    turned: bool
    schedule: str
    group_mb: int

    def template_context(self) -> dict[str, Any]:
        return {
            "direct": self.direct,
            "dynamic": self.dynamic,
            "turned": self.turned,
            "schedule": self.schedule,
            "group_mb": self.group_mb,
        }

    def slug(self, problem: Problem) -> str:
        parts = slug_parts(problem)
        parts += ["blocks"] if problem.scales == "block" else []
        parts += ["rows"] if self.turned else []
        parts += ["direct"] if self.direct else []
        return "_".join([*parts, self.schedule])


class FlashFwdFp8Ws(Kernel):
    """The declaration of flash_fwd_fp8_ws."""

    name = "flash_fwd_fp8_ws"
    template = "flash_fwd_fp8_ws.py.jinja"
    language = "gluon"
    op = "fwd"
    fp8 = True
    space = SPACE
    # Of the masked steps, with their values to be cleared; the main loop spills next to nothing.
    tolerable_spills = 384

    def serves(self, problem: Problem, target: Target) -> str | None:
        reason = why_not_served(problem, target) or why_too_long(problem)
        if reason is not None:
            return reason
        if problem.batch * problem.heads * -(-problem.seqlen_q // (2 * ROWS)) > _MAX_TILES:
            return f"more than {_MAX_TILES} tiles of {2 * ROWS} query rows: split the batch"
        if problem.v_layout == "rows" and _turns(problem) > MAX_GRID:
            return f"more than {MAX_GRID} blocks of {_TURN_KEYS} keys: split the batch"
        return None

    def variant(self, problem: Problem, config: Config) -> FlashFwdFp8WsVariant:
        return FlashFwdFp8WsVariant(
            direct=config["STAGING"] == "direct",
            dynamic=config["SCHEDULE"] == "dynamic",
            turned=problem.v_layout == "rows",
            schedule=str(config["SCHEDULE"]),
            group_mb=config.integer("GROUP_MB"),
        )

    def scratch(self, problem: Problem) -> tuple[Scratch, ...]:
        if problem.v_layout != "rows":
            return ()
        keys = padded_keys(problem.seqlen_k)
        shape = (problem.batch, problem.kv_heads, problem.head_dim_v, keys)
        return (Scratch(name=_TURNED, shape=shape, dtype=FP8),)

    def functions(self, problem: Problem, config: Config) -> tuple[Function, ...]:
        attention = Function(
            name=self.name,
            signature=_signature(problem, config),
            constexprs={
                "CONSUMERS": config["CONSUMERS"],
                "BLOCK_N": config["BLOCK_N"],
                "STAGES": config["STAGES"],
                "BLOCK_D": block_d(problem),
                "BLOCK_DV": block_dv(problem),
                "HEAD_DIM_V": problem.head_dim_v,
                "CAUSAL": problem.causal,
                "Q_IN_REGISTERS": config["Q_IN_REGISTERS"],
                "PV_PART": pv_part(config, problem),
                "PING_PONG": config["PING_PONG"],
                "STAGING": config["STAGING"],
                "EXP2_BY_FMA": config["EXP2_BY_FMA"],
                "BLOCK_SCALES": problem.scales == "block",
                "CONSUMER_REGISTERS": consumer_registers(config),
                "LOADER_REGISTERS": config["LOADER_REGISTERS"],
            },
            # Of the first consumer; the other parts bring their own warps.
            options={"num_warps": 4},
            bind=lambda call: _bind(call, config),
            grid=lambda problem, target: _grid(problem, config, target),
            results=frozenset({"out", "lse"}),
            language="gluon",
            divisible=descales.DIVISIBLE,
        )
        if problem.v_layout != "rows":
            return (attention,)
        rows, columns = (_TURN_KEYS, block_dv(problem)), (block_dv(problem), _TURN_KEYS)
        turn = Function(
            name=f"{self.name}_values",
            signature={
                "v_desc": _kind(FP8, (1, 1, *rows)),
                "vt_desc": _kind(FP8, (1, 1, *columns)),
                "heads": "i32",
                "seqlen_k": "i32",
            },
            constexprs={"WARPS": _TURN_WARPS},
            options={"num_warps": _TURN_WARPS},
            bind=_bind_turn,
            grid=lambda problem, _target: _turns(problem),
            results=frozenset({"out", "lse"}),
            language="gluon",
        )
        return (turn, attention)

    def adapt(self, config: Config, access: Access) -> Config | None:
        # There is no other way to load.
        return config if access.tma else None

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        parts = {name: size for name, size in shared_parts(config, problem).items() if size}
        shared = ", ".join(f"{name} {size / 1024:g} KiB" for name, size in parts.items())
        turns = ", consumers in turns" if config["PING_PONG"] != "none" else ""
        staging = {
            "own": "through a place of its own",
            "half": "by halves through a place of its own",
            "direct": "from registers",
        }
        turn = ["v is transposed first, by a function of its own"]
        return (turn if problem.v_layout == "rows" else []) + [
            f"1 warp loads, 2 look for NaN, with {config['LOADER_REGISTERS']} registers a thread",
            f"{config['CONSUMERS']} consumers of 4 warps and {ROWS} rows, "
            f"{consumer_registers(config)} registers",
            f"ring of {config['STAGES']} blocks of {config['BLOCK_N']} keys{turns}",
            f"tiles by {config['SCHEDULE']} schedule; out {staging[str(config['STAGING'])]}",
            f"shared memory: {shared}",
        ]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        values: dict[str, Any] = {
            "BLOCK_N": 128,
            "STAGES": 3,
            "SCHEDULE": "dynamic",
            "GROUP_MB": 16,
            "PV_PART": min(128, block_dv(problem)),
            "STAGING": "own",
            "LOADER_REGISTERS": 24,
            "Q_IN_REGISTERS": block_d(problem) <= 64 and not problem.causal,
            "EXP2_BY_FMA": 0,
            **_HOPPER[widest(problem)],
        }
        tries = []
        # Each gives up a little more than the one before.
        for change in _DEFAULT_STEPS:
            values = {**values, **change}
            tries.append(_fitted(values, problem, target))
        return list(dict.fromkeys(config for config in tries if config is not None))

    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        del problem, config, target
        # The consumers are given all registers of an SM.
        return 1

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        del blocks_per_sm
        return model.estimate_ms(problem, config, target)


_OUT_STRIDES = ("stride_ob", "stride_oh", "stride_om")
_SIZES = (
    "heads", "group", "n_heads", "group_heads", "seqlen_q", "seqlen_k", "n_tiles", "write_lse",
)  # fmt: skip
# By padded head dim.
_HOPPER: dict[int, dict[str, Any]] = {
    64: {"CONSUMERS": 3, "PING_PONG": "done"},
    128: {"CONSUMERS": 3, "PING_PONG": "done"},
    256: {
        "CONSUMERS": 2,
        "PING_PONG": "none",
        "STAGES": 2,
        "STAGING": "half",
        "LOADER_REGISTERS": 40,
    },
}
# What defaults() changes, in this order.
_DEFAULT_STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"STAGES": 2},
    {"STAGING": "half"},
    {"CONSUMERS": 2, "STAGING": "own"},
    {"SCHEDULE": "grid"},
    {"STAGING": "direct"},
    {"BLOCK_N": 64},
)


def _fitted(values: dict[str, Any], problem: Problem, target: Target) -> Config | None:
    """A feasible Config close to ``values``: sizes no larger than the problem, else None."""
    fitted = dict(values)
    fitted["BLOCK_N"] = min(values["BLOCK_N"], max(64, next_power_of_2(problem.seqlen_k)))
    if problem.seqlen_q <= 2 * ROWS:
        fitted["CONSUMERS"] = 2
    if tile_count(Config(**fitted), problem) <= target.sm_count:
        fitted |= {"SCHEDULE": "grid", "GROUP_MB": GROUP_SIZES[0]}
        fitted["STAGES"] = min(fitted["STAGES"], max(2, -(-problem.seqlen_k // fitted["BLOCK_N"])))
    # The smallest of the sizes that group the same heads.
    heads = group_heads(Config(**fitted), problem)
    for size in GROUP_SIZES:
        config = Config(**{**fitted, "GROUP_MB": size})
        if group_heads(config, problem) == heads:
            return config if SPACE.why_not(config, problem, target) is None else None
    return None


def _kind(dtype: str, block: tuple[int, ...]) -> str:
    return f"tensordesc<{TRITON_DTYPES[dtype]}{list(block)}>"


def _blocks(problem: Problem, config: Config) -> dict[str, tuple[int, ...]]:
    """Shapes of what one copy moves."""
    keys = config.integer("BLOCK_N")
    return {
        "q": (1, 1, ROWS, block_d(problem)),
        "k": (1, 1, keys, block_d(problem)),
        "v": (1, 1, block_dv(problem), keys),
        "out": (1, 1, ROWS, staged_columns(config, problem) or block_dv(problem)),
    }


def _signature(problem: Problem, config: Config) -> dict[str, str]:
    blocks = _blocks(problem, config)
    kinds = {f"{t}_desc": _kind(FP8, blocks[t]) for t in "qkv"}
    kinds |= dict.fromkeys(descales.POINTERS, "*fp32") | dict.fromkeys(descales.STRIDES, "i64")
    kinds |= dict.fromkeys(descales.SCALED, "i32")
    if config["STAGING"] == "direct":
        kinds["out_ptr"] = f"*{TRITON_DTYPES[problem.dtype_of_out]}"
        kinds |= dict.fromkeys(_OUT_STRIDES, "i64")
    else:
        kinds["out_desc"] = _kind(problem.dtype_of_out, blocks["out"])
    kinds["lse_ptr"] = "*fp32"
    if config["SCHEDULE"] == "dynamic":
        kinds["counter"] = "*i32"
    return {**kinds, "scale_log2": "fp32", **dict.fromkeys(_SIZES, "i32")}


def _bind(call: Call, config: Config) -> list[Argument]:
    problem, blocks = call.problem, _blocks(call.problem, config)
    arguments: list[Argument] = [_descriptor(t, call, blocks[t], FP8) for t in "qk"]
    if problem.v_layout == "rows":
        arguments.append(_turned(problem, blocks["v"]))
    else:
        arguments.append(_descriptor("v", call, blocks["v"], FP8))
    arguments += descales.pointers() + descales.strides(call) + descales.scaled(call)
    if config["STAGING"] == "direct":
        arguments += [Pointer(tensor="out"), *call.strides["out"]]
    else:
        arguments.append(_descriptor("out", call, blocks["out"], problem.dtype_of_out))
    arguments.append(Pointer(tensor="lse"))
    if config["SCHEDULE"] == "dynamic":
        arguments.append(Counter())
    arguments += [call.scale * LOG2_E, problem.heads, problem.group]
    arguments += [problem.batch * problem.heads, group_heads(config, problem)]
    arguments += [problem.seqlen_q, problem.seqlen_k, tile_count(config, problem)]
    return [*arguments, int("lse" in call.given)]


def _grid(problem: Problem, config: Config, target: Target) -> int:
    tiles = tile_count(config, problem)
    return min(tiles, target.sm_count) if config["SCHEDULE"] in PERSISTENT else tiles


def _turns(problem: Problem) -> int:
    return problem.batch * problem.kv_heads * -(-problem.seqlen_k // _TURN_KEYS)


def _bind_turn(call: Call) -> list[Argument]:
    problem, dim = call.problem, block_dv(call.problem)
    return [
        _descriptor("v", call, (1, 1, _TURN_KEYS, dim), FP8),
        _turned(problem, (1, 1, dim, _TURN_KEYS)),
        problem.kv_heads,
        problem.seqlen_k,
    ]


def _descriptor(tensor: str, call: Call, block: tuple[int, ...], dtype: str) -> Descriptor:
    shape = tensor_shape(tensor, call.problem)
    strides = (*copy_strides(tensor, call.problem, call.strides[tensor]), 1)
    return Descriptor(tensor=tensor, shape=shape, strides=strides, block=block, dtype=dtype)


def _turned(problem: Problem, block: tuple[int, ...]) -> Descriptor:
    """v as the first function leaves it."""
    dim, keys = problem.head_dim_v, padded_keys(problem.seqlen_k)
    shape = (problem.batch, problem.kv_heads, dim, keys)
    strides = (problem.kv_heads * dim * keys, dim * keys, keys, 1)
    return Descriptor(tensor=_TURNED, shape=shape, strides=strides, block=block, dtype=FP8)
