"""flash_bwd: the portable backward (templates/flash_bwd.py.jinja), a chain of three functions.

FlashAttention-2's backward without its atomics: delta first, then a program per block of keys and
key/value head for dk and dv, then one per block of rows and query head for dq. Seven products
where five would do, but no two programs share a sum: bitwise repeatable, and memory O(N). Runs on
every GPU that Triton serves.
"""

from dataclasses import dataclass
from typing import Any

from autoflash.kernels import flash_bwd_model as model
from autoflash.kernels.flash_bwd_space import (
    PARTS,
    SPACE,
    scratch_bytes,
    shared_bytes,
    walked,
)
from autoflash.kernels.flash_fwd import tile_descriptor
from autoflash.kernels.flash_fwd_space import block_d, block_dv, why_no_tma
from autoflash.kernels.kernel import (
    LOG2_E,
    MAX_GRID,
    TRITON_DTYPES,
    Access,
    Argument,
    Call,
    Function,
    Kernel,
    Pointer,
    Scratch,
    Variant,
    slug_parts,
    why_too_long,
)
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Value
from autoflash.target import Target

# A load of memory's speed whatever it is: not worth a Param.
_DELTA_ROWS = 32


@dataclass(frozen=True, kw_only=True)
class FlashBwdVariant(Variant):
    """``tma``: what is walked comes through tensor descriptors instead of pointers."""

    tma: bool

    def template_context(self) -> dict[str, Any]:
        return {"tma": self.tma}

    def slug(self, problem: Problem) -> str:
        return "_".join([*slug_parts(problem), *(["tma"] if self.tma else [])])


class FlashBwd(Kernel):
    """The declaration of flash_bwd."""

    name = "flash_bwd"
    template = "flash_bwd.py.jinja"
    language = "triton"
    op = "bwd"
    space = SPACE
    # dk and dv fill the registers of most tiles; a few bytes more lie in L1.
    tolerable_spills = 128

    def serves(self, problem: Problem, target: Target) -> str | None:
        if problem.dtype == "float32":
            return "float32 is not served on a GPU: use float16 or bfloat16"
        if target.vendor == "nvidia" and target.capability < 80:
            return f"{target.arch} is older than sm_80"
        reason = why_too_long(problem)
        if reason is not None:
            return reason
        # Even the smallest programs must fit the grid's first dimension.
        rows = problem.batch * problem.heads * -(-problem.seqlen_q // 16)
        keys = problem.batch * problem.kv_heads * -(-problem.seqlen_k // 32)
        if max(rows, keys) > MAX_GRID:
            return f"more than {MAX_GRID} blocks of 16 query rows or 32 keys: split the batch"
        return None

    def variant(self, problem: Problem, config: Config) -> FlashBwdVariant:
        del problem
        return FlashBwdVariant(tma=config["LOAD"] == "tma")

    def scratch(self, problem: Problem) -> tuple[Scratch, ...]:
        # lse in base 2 and delta of each row, in four numbers (templates/flash_bwd.py.jinja).
        shape = (problem.batch, problem.heads, problem.seqlen_q, 4)
        return (Scratch(name="statistics", shape=shape, dtype="float32"),)

    def functions(self, problem: Problem, config: Config) -> tuple[Function, ...]:
        pointer = f"*{TRITON_DTYPES[problem.dtype]}"
        return (
            _delta(problem, pointer),
            _dkdv(problem, config, pointer),
            _dq(problem, config, pointer),
        )

    def adapt(self, config: Config, access: Access) -> Config:
        if config["LOAD"] == "tma" and not access.tma:
            return Config(**{**config, "LOAD": "pointer"})
        return config

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        del problem
        c = config
        load = "tensor copies" if c["LOAD"] == "tma" else "asynchronous loads by pointer"
        return [
            f"delta, lse: {_DELTA_ROWS} query rows a program",
            f"dk, dv: {c['DKDV_WARPS']} warps for {c['DKDV_BLOCK_N']} keys, "
            f"{c['DKDV_BLOCK_M']} query rows a step, {c['DKDV_STAGES']} stages of {load}",
            f"dq: {c['DQ_WARPS']} warps for {c['DQ_BLOCK_M']} query rows, "
            f"{c['DQ_BLOCK_N']} keys a step, {c['DQ_STAGES']} stages of {load}",
        ]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        values = _preferred(problem, target)
        found: dict[Config, None] = {}
        # Each gives up a little more than the one before.
        for change in _DEFAULT_STEPS:
            values |= {n: min(values[n], most) for n, most in change.items()}
            config = Config(**_shrunk(values, problem))
            fits = all(
                shared_bytes(config, part, problem, target)
                + scratch_bytes(config, part, problem, target)
                <= target.shared_memory
                for part in PARTS
            )
            last = change is _DEFAULT_STEPS[-1]
            if (fits or last) and self.space.why_not(config, problem, target) is None:
                found[config] = None
        return list(found)

    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        return min(model.blocks_per_sm(config, part, problem, target) for part in PARTS)

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        return model.estimate_ms(problem, config, target, blocks_per_sm)


def _strides(*tensors: str) -> dict[str, str]:
    rows = {"k": "n", "v": "n", "dk": "n", "dv": "n"}
    return {f"stride_{t}{axis}": "i64" for t in tensors for axis in f"bh{rows.get(t, 'm')}"}


def _delta(problem: Problem, pointer: str) -> Function:
    def bind(call: Call) -> list[Argument]:
        tensors = [Pointer(tensor=name) for name in ("out", "dout", "dlse", "lse", "statistics")]
        strides = [*call.strides["out"], *call.strides["dout"]]
        sizes = [call.problem.heads, call.problem.seqlen_q, int("dlse" in call.given)]
        return [*tensors, *strides, *sizes]

    def grid(problem: Problem, target: Target) -> int:
        del target
        return problem.batch * problem.heads * -(-problem.seqlen_q // _DELTA_ROWS)

    return Function(
        name="flash_bwd_delta",
        signature={
            "out_ptr": pointer, "dout_ptr": pointer,
            **{f"{t}_ptr": "*fp32" for t in ("dlse", "lse", "statistics")},
            **_strides("o", "do"), "heads": "i32", "seqlen_q": "i32", "has_dlse": "i32",
        },
        constexprs={
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_DV": block_dv(problem),
            "BLOCK_M": _DELTA_ROWS,
        },
        options={"num_warps": 4, "num_stages": 1},
        bind=bind,
        grid=grid,
        results=frozenset({"dq", "dk", "dv"}),
    )  # fmt: skip


def _dkdv(problem: Problem, config: Config, pointer: str) -> Function:
    def grid(problem: Problem, target: Target) -> int:
        del target
        blocks = -(-problem.seqlen_k // config.integer("DKDV_BLOCK_N"))
        return problem.batch * problem.kv_heads * blocks

    def bind(call: Call) -> list[Argument]:
        return [*_descriptors(call, blocks), *_arguments(call, ("dk", "dv"), call.problem.kv_heads)]

    blocks = _walked_blocks(problem, config, "DKDV", ("q", "dout"))

    return Function(
        name="flash_bwd_dkdv",
        signature=_signature(pointer, blocks, ("dk", "dv"), "kv_heads"),
        constexprs=_constexprs(problem, config, "DKDV"),
        options=_options(config, "DKDV"),
        bind=bind,
        grid=grid,
        results=frozenset({"dk", "dv"}),
    )


def _dq(problem: Problem, config: Config, pointer: str) -> Function:
    def grid(problem: Problem, target: Target) -> int:
        del target
        blocks = -(-problem.seqlen_q // config.integer("DQ_BLOCK_M"))
        return problem.batch * problem.heads * blocks

    def bind(call: Call) -> list[Argument]:
        return [*_descriptors(call, blocks), *_arguments(call, ("dq",), call.problem.heads)]

    blocks = _walked_blocks(problem, config, "DQ", ("k", "v"))

    return Function(
        name="flash_bwd_dq",
        signature=_signature(pointer, blocks, ("dq",), "heads"),
        constexprs=_constexprs(problem, config, "DQ"),
        options=_options(config, "DQ"),
        bind=bind,
        grid=grid,
        results=frozenset({"dq"}),
    )


_INPUTS = ("q", "k", "v", "dout")


_Blocks = dict[str, tuple[int, int, int, int]]


def _walked_blocks(
    problem: Problem, config: Config, part: str, tensors: tuple[str, str]
) -> _Blocks:
    """What comes through descriptors, if anything does, with the block of one load."""
    if config["LOAD"] != "tma":
        return {}
    one, other = tensors
    step = walked(config, part)
    return {one: (1, 1, step, block_d(problem)), other: (1, 1, step, block_dv(problem))}


def _descriptors(call: Call, blocks: _Blocks) -> list[Argument]:
    return [tile_descriptor(t, call.problem, call.strides[t], b) for t, b in blocks.items()]


def _signature(
    pointer: str, blocks: _Blocks, outputs: tuple[str, ...], heads: str
) -> dict[str, str]:
    """Of flash_bwd_dkdv and flash_bwd_dq, which count in key/value and in query heads."""
    kinds = {f"{t}_desc": f"tensordesc<{pointer[1:]}{list(b)}>" for t, b in blocks.items()}
    kinds |= {f"{t}_ptr": pointer for t in _INPUTS} | {"statistics_ptr": "*fp32"}
    kinds |= {f"{t}_ptr": pointer for t in outputs}
    kinds |= _strides("q", "k", "v", "do", *outputs) | {"scale": "fp32", "scale_log2": "fp32"}
    sizes = (heads, "group", "batch_heads", "seqlen_q", "seqlen_k")
    return kinds | dict.fromkeys(sizes, "i32")


def _arguments(call: Call, outputs: tuple[str, ...], heads: int) -> list[Argument]:
    p = call.problem
    arguments: list[Argument] = [
        Pointer(tensor=name) for name in (*_INPUTS, "statistics", *outputs)
    ]
    for name in (*_INPUTS, *outputs):
        arguments += call.strides[name]
    arguments += [call.scale, call.scale * LOG2_E]
    return [*arguments, heads, p.group, p.batch * heads, p.seqlen_q, p.seqlen_k]


def _constexprs(problem: Problem, config: Config, part: str) -> dict[str, Value]:
    return {
        "HEAD_DIM": problem.head_dim,
        "HEAD_DIM_V": problem.head_dim_v,
        "BLOCK_D": block_d(problem),
        "BLOCK_DV": block_dv(problem),
        "CAUSAL": problem.causal,
        # tf32 would miss the accuracy rule; 16-bit operands ignore this.
        "DOT_PRECISION": "ieee",
        "BLOCK_M": config[f"{part}_BLOCK_M"],
        "BLOCK_N": config[f"{part}_BLOCK_N"],
        "GROUP_HEADS": config["GROUP_HEADS"],
    }


def _options(config: Config, part: str) -> dict[str, int]:
    return {
        "num_warps": config.integer(f"{part}_WARPS"),
        "num_stages": config.integer(f"{part}_STAGES"),
    }


# The most that defaults() keeps, step by step.
_DEFAULT_STEPS: tuple[dict[str, int], ...] = (
    {},
    {"DKDV_STAGES": 2, "DQ_STAGES": 2},
    {"DKDV_BLOCK_M": 32, "DQ_BLOCK_N": 32},
    {"DKDV_STAGES": 1, "DQ_STAGES": 1},
    {"DKDV_BLOCK_N": 64, "DQ_BLOCK_M": 64},
    {"DKDV_BLOCK_N": 32, "DQ_BLOCK_M": 32},
    {"DKDV_BLOCK_M": 16, "DQ_BLOCK_M": 16},
)

# What defaults() starts from, by padded head dim: BLOCK_M, BLOCK_N, warps and stages of DKDV and of
# DQ. On sm_90 up to 128 the fastest, or within 6 % of them, of 30 each that were timed on an H200;
# the others are the largest tiles whose binaries spill little (Triton 3.6 and 3.7), not timed yet.
_Tile = tuple[int, int, int, int]
_TILES: dict[str, dict[int, tuple[_Tile, _Tile]]] = {
    "sm_90": {
        64: ((64, 64, 4, 3), (64, 64, 4, 2)),
        128: ((64, 64, 4, 2), (64, 64, 4, 2)),
        256: ((16, 64, 8, 2), (64, 32, 8, 2)),
    },
    "sm_100": {
        64: ((64, 128, 8, 1), (128, 64, 8, 2)),
        128: ((64, 128, 8, 1), (128, 64, 8, 2)),
        256: ((32, 64, 8, 1), (64, 32, 8, 1)),
    },
    "nvidia": {
        64: ((32, 64, 4, 2), (64, 32, 4, 2)),
        128: ((32, 64, 8, 2), (64, 32, 4, 2)),
        256: ((16, 64, 8, 1), (32, 32, 4, 1)),
    },
    "amd": {
        64: ((16, 64, 4, 1), (64, 32, 4, 2)),
        128: ((16, 64, 8, 1), (64, 32, 4, 2)),
        256: ((16, 64, 8, 1), (32, 32, 4, 1)),
    },
}


def _preferred(problem: Problem, target: Target) -> dict[str, Any]:
    wide = max(64, block_d(problem), block_dv(problem))
    names = ("BLOCK_M", "BLOCK_N", "WARPS", "STAGES")
    arch = "sm_100" if target.arch == "sm_103" else target.arch
    tiles = _TILES.get(arch, _TILES[target.vendor])[wide]
    # Addresses take registers of their own: on sm_90 tensor copies spill half as much.
    tma = arch == "sm_90" and why_no_tma(Config(LOAD="tma"), problem, target) is None
    values: dict[str, Any] = {"LOAD": "tma" if tma else "pointer"}
    values["GROUP_HEADS"] = 8 if problem.causal else 1
    for part, tile in zip(PARTS, tiles, strict=True):
        values |= {f"{part}_{name}": value for name, value in zip(names, tile, strict=True)}
    return values


def _shrunk(values: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """``values`` with tiles no larger than the problem, and warps no more than these can feed."""
    rows = max(16, next_power_of_2(problem.seqlen_q))
    keys = max(32, next_power_of_2(problem.seqlen_k))
    shrunk = dict(values)
    for part in PARTS:
        shrunk[f"{part}_BLOCK_M"] = min(values[f"{part}_BLOCK_M"], rows)
        shrunk[f"{part}_BLOCK_N"] = min(values[f"{part}_BLOCK_N"], keys)
        own = shrunk["DKDV_BLOCK_N" if part == "DKDV" else "DQ_BLOCK_M"]
        if own <= 32:
            shrunk[f"{part}_WARPS"] = 4
    if values["GROUP_HEADS"] > next_power_of_2(problem.batch * problem.heads):
        shrunk["GROUP_HEADS"] = 1
    return shrunk
