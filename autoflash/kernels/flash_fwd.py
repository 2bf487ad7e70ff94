"""flash_fwd: the portable forward kernel (templates/flash_fwd.py.jinja).

FlashAttention-2's parallelism: one program per block of query rows and head, a loop over the keys
with online softmax. Runs on every GPU that Triton serves; on sm_90 and newer it can load through
tensor descriptors (TMA).
"""

from dataclasses import dataclass
from typing import Any

from autoflash.kernels import flash_fwd_model as model
from autoflash.kernels.flash_fwd_space import (
    SPACE,
    block_d,
    block_dv,
    scratch_bytes,
    shared_bytes,
)
from autoflash.kernels.kernel import (
    LOG2_E,
    MAX_GRID,
    TRITON_DTYPES,
    Access,
    Argument,
    Call,
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


@dataclass(frozen=True, kw_only=True)
class FlashFwdVariant(Variant):
    """``tma``: q, k and v come through tensor descriptors instead of pointers."""

    tma: bool

    def template_context(self) -> dict[str, Any]:
        return {"tma": self.tma}

    def slug(self, problem: Problem) -> str:
        parts = slug_parts(problem)
        parts += ["tma"] if self.tma else []
        return "_".join(parts)


class FlashFwd(OneFunction):
    """The declaration of flash_fwd."""

    name = "flash_fwd"
    template = "flash_fwd.py.jinja"
    language = "triton"
    op = "fwd"
    results = frozenset({"out", "lse"})
    space = SPACE

    def serves(self, problem: Problem, target: Target) -> str | None:
        if problem.dtype == "float32":
            return "float32 is not served on a GPU: use float16 or bfloat16"
        if target.vendor == "nvidia" and target.capability < 80:
            return f"{target.arch} is older than sm_80"
        return why_too_many(problem)

    def variant(self, problem: Problem, config: Config) -> FlashFwdVariant:
        return FlashFwdVariant(tma=config["LOAD"] == "tma")

    def constexprs(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": block_d(problem),
            "BLOCK_DV": block_dv(problem),
            "CAUSAL": problem.causal,
            # tf32 would miss the accuracy rule; 16-bit operands ignore this.
            "DOT_PRECISION": "ieee",
            "BLOCK_M": config["BLOCK_M"],
            "BLOCK_N": config["BLOCK_N"],
            "GROUP_HEADS": config["GROUP_HEADS"],
            "DIAGONAL_FIRST": config["DIAGONAL_FIRST"],
        }

    def options(self, config: Config) -> dict[str, int]:
        return launch_options(config)

    def signature(self, problem: Problem, config: Config) -> dict[str, str]:
        dtype = TRITON_DTYPES[problem.dtype]
        pointer = f"*{dtype}"
        if config["LOAD"] == "tma":
            blocks = _descriptor_blocks(problem, config)
            inputs = {f"{t}_desc": f"tensordesc<{dtype}{list(blocks[t])}>" for t in "qkv"}
            inputs["v_ptr"] = pointer
        else:
            inputs = {f"{t}_ptr": pointer for t in "qkv"}
            inputs |= {f"stride_{t}{axis}": "i64" for t in ("q", "k") for axis in _axes(t)}
        inputs |= {f"stride_v{axis}": "i64" for axis in _axes("v")}
        outputs = {"out_ptr": pointer, "lse_ptr": "*fp32"}
        outputs |= {f"stride_o{axis}": "i64" for axis in "bhm"}
        sizes = {"scale_log2": "fp32", "heads": "i32", "group": "i32", "batch_heads": "i32"}
        lengths = {"seqlen_q": "i32", "seqlen_k": "i32", "write_lse": "i32"}
        return inputs | outputs | sizes | lengths

    def bind(self, call: Call, config: Config) -> list[Argument]:
        problem, strides = call.problem, call.strides
        arguments: list[Argument] = []
        if config["LOAD"] == "tma":
            blocks = _descriptor_blocks(problem, config)
            arguments += [tile_descriptor(t, problem, strides[t], blocks[t]) for t in "qkv"]
            arguments += [Pointer(tensor="v")]
        else:
            arguments += [Pointer(tensor=t) for t in "qkv"]
            arguments += [*strides["q"], *strides["k"]]
        arguments += [*strides["v"], Pointer(tensor="out"), Pointer(tensor="lse")]
        arguments += [*strides["out"], call.scale * LOG2_E]
        arguments += [problem.heads, problem.group, problem.batch * problem.heads]
        return [*arguments, problem.seqlen_q, problem.seqlen_k, int("lse" in call.given)]

    def grid(self, problem: Problem, config: Config, target: Target) -> int:
        del target
        return row_blocks(problem, config)

    def adapt(self, config: Config, access: Access) -> Config:
        if config["LOAD"] == "tma" and not access.tma:
            # Addresses take registers of their own: a cap that TMA could bear would spill.
            return Config(**{**config, "LOAD": "pointer", "maxnreg": 0})
        return config

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        del problem
        load = "tensor copies" if config["LOAD"] == "tma" else "asynchronous loads by pointer"
        return [
            f"{config['num_warps']} warps do all for {config['BLOCK_M']} query rows",
            f"{config['BLOCK_N']} keys a step, {config['num_stages']} stages of {load}",
        ]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        wide = max(block_d(problem), block_dv(problem))
        values = _preferred(wide, problem.causal, target)
        rows = max(16, next_power_of_2(problem.seqlen_q))
        if values["BLOCK_M"] > rows:
            values |= {"BLOCK_M": rows, "num_warps": 4}
        values["BLOCK_N"] = min(values["BLOCK_N"], max(32, next_power_of_2(problem.seqlen_k)))
        if values["GROUP_HEADS"] > next_power_of_2(problem.batch * problem.heads):
            values["GROUP_HEADS"] = 1
        # Each gives up a little more than the one before.
        found: dict[Config, None] = {}
        for change in _DEFAULT_STEPS:
            values |= {**change, "BLOCK_M": min(values["BLOCK_M"], change.get("BLOCK_M", 256))}
            config = Config(**values)
            need = shared_bytes(config, problem, target) + scratch_bytes(config, problem, target)
            fits = need <= target.shared_memory
            if fits and self.space.why_not(config, problem, target) is None:
                found[config] = None
        return list(found)

    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        return model.estimate_blocks_per_sm(problem, config, target)

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        return model.estimate_ms(problem, config, target, blocks_per_sm)


# What defaults() changes, in this order.
_DEFAULT_STEPS: tuple[dict[str, Any], ...] = (
    {},
    {"LOAD": "pointer", "maxnreg": 0},
    {"num_stages": 2},
    {"BLOCK_N": 64},
    {"BLOCK_N": 32},
    {"BLOCK_M": 64, "num_warps": 4},
    {"num_stages": 1},
)

# Tuned on an H200 (tuning_db/nvidia_h200.json): by padded head dim and causal. Small tiles with
# three programs on an SM hide the softmax better than large tiles do.
_HOPPER: dict[tuple[int, bool], dict[str, Any]] = {
    (64, False): {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    (64, True): {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 2, "maxnreg": 168},
    (128, False): {"BLOCK_M": 64, "BLOCK_N": 128, "num_warps": 4, "num_stages": 1, "maxnreg": 168},
    (128, True): {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 128},
    (256, False): {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 0},
    (256, True): {"BLOCK_M": 128, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2, "maxnreg": 0},
}


def _preferred(wide: int, causal: bool, target: Target) -> dict[str, Any]:
    """The tiles that defaults() starts from."""
    if target.arch == "sm_90":
        tiles = _HOPPER[64 if wide <= 64 else wide, causal]
        return {**tiles, "LOAD": "tma", "GROUP_HEADS": 8, "DIAGONAL_FIRST": causal}
    return {
        "BLOCK_M": 128,
        "BLOCK_N": 64 if wide <= 128 else 32,
        "num_warps": 8 if wide > 64 else 4,
        "num_stages": 3,
        "maxnreg": 0,
        "LOAD": "pointer",
        "GROUP_HEADS": 8 if causal else 1,
        "DIAGONAL_FIRST": False,
    }


def why_too_many(problem: Problem) -> str | None:
    """Why there are more programs, or longer tensors, than can be counted, or None."""
    reason = why_too_long(problem)
    if reason is not None:
        return reason
    # Even 16-row programs must fit the grid's first dimension.
    if problem.batch * problem.heads * -(-problem.seqlen_q // 16) > MAX_GRID:
        return f"more than {MAX_GRID} blocks of 16 query rows: split the batch"
    return None


def launch_options(config: Config) -> dict[str, int]:
    """Triton's options of a config that has Params of their names; no maxnreg where that is 0."""
    options = {name: config.integer(name) for name in ("num_warps", "num_stages")}
    if config["maxnreg"]:
        options["maxnreg"] = config.integer("maxnreg")
    return options


def row_blocks(problem: Problem, config: Config) -> int:
    """Programs of BLOCK_M query rows of a head."""
    rows = -(-problem.seqlen_q // config.integer("BLOCK_M"))
    return rows * problem.batch * problem.heads


def _axes(tensor: str) -> str:
    return "bhm" if tensor == "q" else "bhn"


def _descriptor_blocks(problem: Problem, config: Config) -> dict[str, tuple[int, int, int, int]]:
    rows, keys = config.integer("BLOCK_M"), config.integer("BLOCK_N")
    return {
        "q": (1, 1, rows, block_d(problem)),
        "k": (1, 1, keys, block_d(problem)),
        "v": (1, 1, keys, block_dv(problem)),
    }


def tile_descriptor(
    tensor: str, problem: Problem, strides: tuple[int, ...], block: tuple[int, ...]
) -> Descriptor:
    """A descriptor of one of the op's tensors, with the block of one load."""
    full = copy_strides(tensor, problem, strides)
    return Descriptor(
        tensor=tensor,
        shape=tensor_shape(tensor, problem),
        strides=(*full, 1),
        block=block,
    )
