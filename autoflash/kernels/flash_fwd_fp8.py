"""flash_fwd_fp8: the portable forward kernel for fp8 (templates/flash_fwd_fp8.py.jinja).

flash_fwd's structure with keys walked from the last to the first and descales folded in: q, k and v
in e4m3, or k and v alone beside a q of 16 bits. Runs wherever Triton has e4m3: sm_89 and newer, and
MI300, whose matrix unit takes e4m3fnuz.
"""

from dataclasses import dataclass
from typing import Any

from autoflash.dtypes import FP8
from autoflash.kernels import descales
from autoflash.kernels import flash_fwd_fp8_model as model
from autoflash.kernels.flash_fwd import launch_options, row_blocks, why_too_many
from autoflash.kernels.flash_fwd_fp8_space import (
    SPACE,
    block_d,
    may_share_rows,
    needs_fnuz,
    shared_bytes,
)
from autoflash.kernels.flash_fwd_space import block_dv
from autoflash.kernels.kernel import (
    LOG2_E,
    TRITON_DTYPES,
    Access,
    Argument,
    Call,
    OneFunction,
    Pointer,
    Variant,
    slug_parts,
)
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, Value
from autoflash.target import Target


@dataclass(frozen=True, kw_only=True)
class FlashFwdFp8Variant(Variant):
    """All is said by constexprs."""

    def template_context(self) -> dict[str, Any]:
        return {}

    def slug(self, problem: Problem) -> str:
        parts = slug_parts(problem)
        parts += ["blocks"] if problem.scales == "block" else []
        return "_".join(parts + ([problem.v_layout] if problem.v_layout != "rows" else []))


class FlashFwdFp8(OneFunction):
    """The declaration of flash_fwd_fp8."""

    name = "flash_fwd_fp8"
    template = "flash_fwd_fp8.py.jinja"
    language = "triton"
    op = "fwd"
    fp8 = True
    results = frozenset({"out", "lse"})
    space = SPACE

    def serves(self, problem: Problem, target: Target) -> str | None:
        if target.vendor == "nvidia" and target.capability < 89:
            return f"{target.arch} has no e4m3 (sm_89 and newer have)"
        return why_too_many(problem)

    def variant(self, problem: Problem, config: Config) -> FlashFwdFp8Variant:
        del problem, config
        return FlashFwdFp8Variant()

    def constexprs(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": block_d(problem),
            "BLOCK_DV": block_dv(problem),
            "CAUSAL": problem.causal,
            "V_LAYOUT": problem.v_layout,
            "BLOCK_SCALES": problem.scales == "block",
            "P_EXPONENT": _p_exponent(problem, config),
            "BLOCK_M": config["BLOCK_M"],
            "BLOCK_N": config["BLOCK_N"],
            "GROUP_HEADS": config["GROUP_HEADS"],
            "FNUZ": config["FNUZ"],
        }

    def options(self, config: Config) -> dict[str, int]:
        return launch_options(config)

    def signature(self, problem: Problem, config: Config) -> dict[str, str]:
        dtypes = {"q": problem.dtype, "k": problem.dtype_of_kv, "v": problem.dtype_of_kv}
        fp8 = "u8" if config["FNUZ"] else TRITON_DTYPES[FP8]
        kinds = {t: fp8 if x == FP8 else TRITON_DTYPES[x] for t, x in dtypes.items()}
        inputs = {f"{t}_ptr": f"*{kind}" for t, kind in kinds.items()}
        inputs |= dict.fromkeys(descales.POINTERS, "*fp32")
        strides = [f"stride_{t}" for t in _STRIDES]
        outputs = {"out_ptr": f"*{TRITON_DTYPES[problem.dtype_of_out]}", "lse_ptr": "*fp32"}
        sizes = {"scale_log2": "fp32", "heads": "i32", "group": "i32", "batch_heads": "i32"}
        flags = (*descales.SCALED, "write_lse")
        return {
            **inputs,
            **dict.fromkeys((*strides, *descales.STRIDES), "i64"),
            **outputs,
            **{f"stride_o{axis}": "i64" for axis in "bhm"},
            **sizes,
            **dict.fromkeys(("seqlen_q", "seqlen_k", *flags), "i32"),
        }

    def divisible(self, problem: Problem, config: Config) -> dict[str, int]:
        del config
        # 16 bytes are 16 elements of fp8.
        fp8 = _STRIDES if problem.dtype == FP8 else _STRIDES[3:]
        return descales.DIVISIBLE | {f"stride_{axis}": 16 for axis in fp8}

    def bind(self, call: Call, config: Config) -> list[Argument]:
        del config
        problem, strides = call.problem, call.strides
        arguments: list[Argument] = [Pointer(tensor=t) for t in "qkv"]
        arguments += descales.pointers()
        arguments += [*strides["q"], *strides["k"], *strides["v"], *descales.strides(call)]
        arguments += [Pointer(tensor="out"), Pointer(tensor="lse"), *strides["out"]]
        arguments += [call.scale * LOG2_E, problem.heads, problem.group]
        arguments += [problem.batch * problem.heads, problem.seqlen_q, problem.seqlen_k]
        return [*arguments, *descales.scaled(call), int("lse" in call.given)]

    def grid(self, problem: Problem, config: Config, target: Target) -> int:
        del target
        return row_blocks(problem, config)

    def adapt(self, config: Config, access: Access) -> Config:
        del access
        return config

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        fp8 = problem.dtype == FP8
        return [
            f"{config['num_warps']} warps do all for {config['BLOCK_M']} query rows",
            f"{config['BLOCK_N']} keys a step, from the last to the first, "
            f"{config['num_stages']} stages of asynchronous loads by pointer",
            "products in e4m3" if fp8 else f"k and v become {problem.dtype} as they are loaded",
        ]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        wide = max(block_d(problem), block_dv(problem))
        # Where operands come from registers (before sm_90, and on AMD) small tiles don't spill.
        small = target.capability < 90 and wide > 64
        values: dict[str, Any] = {
            "BLOCK_M": 64 if small or wide > 128 else 128,
            "BLOCK_N": 32 if small or wide > 128 else 64,
            "num_stages": 3,
            "GROUP_HEADS": 8 if problem.causal else 1,
            "FNUZ": needs_fnuz(problem, target),
            "maxnreg": 0,
        }
        values["BLOCK_M"] = min(values["BLOCK_M"], max(16, next_power_of_2(problem.seqlen_q)))
        values["BLOCK_N"] = min(values["BLOCK_N"], max(32, next_power_of_2(problem.seqlen_k)))
        if values["GROUP_HEADS"] > next_power_of_2(problem.batch * problem.heads):
            values["GROUP_HEADS"] = 1
        # Each gives up a little more than the one before.
        found: dict[Config, None] = {}
        for change in _DEFAULT_STEPS:
            values |= {name: min(values[name], most) for name, most in change.items()}
            many = values["BLOCK_M"] == 128 or may_share_rows(values["BLOCK_M"], problem)
            config = Config(**values, num_warps=8 if many else 4)
            # Triton takes some beside the operands, to change layouts.
            fits = shared_bytes(config, problem, target) <= 0.8 * target.shared_memory
            if fits and self.space.why_not(config, problem, target) is None:
                found[config] = None
        return list(found)

    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        return model.estimate_blocks_per_sm(problem, config, target)

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        return model.estimate_ms(problem, config, target, blocks_per_sm)


# The strides of q, k and v, as the kernel names them.
_STRIDES = ("qb", "qh", "qm", "kb", "kh", "kn", "vb", "vh", "vn")
# What defaults() lowers, in this order.
_DEFAULT_STEPS: tuple[dict[str, int], ...] = (
    {},
    {"num_stages": 2},
    {"BLOCK_N": 32},
    {"BLOCK_M": 64},
    {"num_stages": 1},
    {"BLOCK_M": 32},
)


def _p_exponent(problem: Problem, config: Config) -> int:
    """P is multiplied by 2 to this before it is rounded: e4m3 ends at 448, e4m3fnuz at 240."""
    if problem.dtype != FP8:
        return 0
    return 7 if config["FNUZ"] else 8
