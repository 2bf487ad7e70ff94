"""flash_fwd: the portable forward kernel (templates/flash_fwd.py.jinja).

FlashAttention-2's parallelism: one program per block of query rows and head, a loop over the keys
with online softmax. Runs on every GPU that Triton serves; on sm_90 and newer it can load through
tensor descriptors (TMA).
"""

from dataclasses import dataclass
from typing import Any

from autoflash.kernels.kernel import (
    Access,
    Argument,
    Call,
    Descriptor,
    Kernel,
    Pointer,
    Variant,
)
from autoflash.problem import DTYPE_BYTES, Problem, next_power_of_2
from autoflash.space import Config, Constraint, Param, SearchSpace, Value
from autoflash.target import Target

_TRITON_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_LOG2_E = 1.4426950408889634
_MAX_GRID = 2**31 - 1
_MAX_REGISTERS = 255
# Registers that addresses, loop state and the probabilities' 16-bit copy take beside the two
# accumulators; below this margin every variant we compiled for sm_90 spilled.
_OTHER_REGISTERS = 31


@dataclass(frozen=True, kw_only=True)
class FlashFwdVariant(Variant):
    """``tma``: q, k and v come through tensor descriptors instead of pointers."""

    tma: bool

    def template_context(self) -> dict[str, Any]:
        return {"tma": self.tma}

    def slug(self, problem: Problem) -> str:
        dims = f"d{problem.head_dim}"
        if problem.head_dim_v != problem.head_dim:
            dims += f"v{problem.head_dim_v}"
        parts = [_TRITON_DTYPES[problem.dtype], dims]
        parts += ["causal"] if problem.causal else []
        parts += ["tma"] if self.tma else []
        return "_".join(parts)


def _block_d(problem: Problem) -> int:
    return max(16, next_power_of_2(problem.head_dim))


def _block_dv(problem: Problem) -> int:
    return max(16, next_power_of_2(problem.head_dim_v))


def _accumulator_registers(config: Config, problem: Problem, target: Target) -> float:
    """32-bit registers per thread for the scores and the output accumulator."""
    threads = config.integer("num_warps") * target.warp_size
    return config.integer("BLOCK_M") * (_block_dv(problem) + config.integer("BLOCK_N")) / threads


def shared_bytes(config: Config, problem: Problem, target: Target) -> int:
    """Shared memory that the operands take at least (Triton adds barriers and scratch).

    With cp.async the stage in use is copied to registers first, so one stage less is held.
    """
    size = DTYPE_BYTES[problem.dtype]
    stages = config.integer("num_stages")
    if not target.has_tma:
        stages = max(1, stages - 1)
    key_value = config.integer("BLOCK_N") * (_block_d(problem) + _block_dv(problem)) * size
    # From sm_90 on the query tile is an operand in shared memory too.
    query = config.integer("BLOCK_M") * _block_d(problem) * size if target.has_tma else 0
    return stages * key_value + query


def _fits_shared(config: Config, problem: Problem, target: Target) -> str | None:
    need = shared_bytes(config, problem, target)
    if need > target.shared_memory:
        return f"needs {need} bytes of shared memory, {target.name} has {target.shared_memory}"
    return None


def _fits_registers(config: Config, problem: Problem, target: Target) -> str | None:
    need = _accumulator_registers(config, problem, target) + _OTHER_REGISTERS
    # AMD's CDNA threads have 512 registers, half of them accumulators.
    limit = _MAX_REGISTERS if target.vendor == "nvidia" else 512
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


def _matches_queries(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    rows = config.integer("BLOCK_M")
    most = max(16, next_power_of_2(problem.seqlen_q))
    if rows > most:
        return f"BLOCK_M={rows} is more than the {problem.seqlen_q} query rows"
    if rows < 64 <= most:
        return f"BLOCK_M={rows} leaves the matrix unit's 64-row instruction partly empty"
    return None


def _matches_keys(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    keys = config.integer("BLOCK_N")
    if keys > max(32, next_power_of_2(problem.seqlen_k)):
        return f"BLOCK_N={keys} is more than the {problem.seqlen_k} keys"
    return None


def _has_tma(config: Config, problem: Problem, target: Target) -> str | None:
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


def _has_heads(config: Config, problem: Problem, target: Target) -> str | None:
    del target
    group = config.integer("GROUP_HEADS")
    if group > next_power_of_2(problem.batch * problem.heads):
        return (
            f"GROUP_HEADS={group} is more than the {problem.batch * problem.heads} heads there are"
        )
    return None


def _register_cap_helps(config: Config, problem: Problem, target: Target) -> str | None:
    del problem
    cap = config.integer("maxnreg")
    if cap and target.vendor != "nvidia":
        return "a register cap is NVIDIA's"
    # 65536 registers: 168 lets a third program of 4 warps onto an SM, 128 a second one of 8 warps.
    if cap == 168 and config.integer("num_warps") != 4:
        return "168 registers make room for a program more only with 4 warps"
    return None


class FlashFwd(Kernel):
    """The declaration of flash_fwd."""

    name = "flash_fwd"
    template = "flash_fwd.py.jinja"
    op = "fwd"
    space = SearchSpace(
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
            Constraint(name="query rows", why_not=_matches_queries),
            Constraint(name="keys", why_not=_matches_keys),
            Constraint(name="rows per warp", why_not=_rows_per_warp),
            Constraint(name="load path", why_not=_has_tma),
            Constraint(name="loop order", why_not=_has_diagonal),
            Constraint(name="tile order", why_not=_has_heads),
            Constraint(name="register cap", why_not=_register_cap_helps),
            Constraint(name="registers", why_not=_fits_registers),
            Constraint(name="shared memory", why_not=_fits_shared),
        ),
    )

    def serves(self, problem: Problem, target: Target) -> str | None:
        if problem.dtype == "float32":
            return "float32 is not served on a GPU: use float16 or bfloat16"
        if target.vendor == "nvidia" and target.capability < 80:
            return f"{target.arch} is older than sm_80"
        # Even 16-row programs must fit the grid's first dimension.
        if problem.batch * problem.heads * -(-problem.seqlen_q // 16) > _MAX_GRID:
            return f"more than {_MAX_GRID} blocks of 16 query rows: split the batch"
        return None

    def variant(self, problem: Problem, config: Config) -> FlashFwdVariant:
        return FlashFwdVariant(tma=config["LOAD"] == "tma")

    def example(self, problem: Problem) -> Problem:
        fields = {**problem.as_dict(), "batch": 4, "heads": 16, "kv_heads": 16}
        return Problem(**{**fields, "seqlen_q": 4096, "seqlen_k": 4096})

    def constexprs(self, problem: Problem, config: Config) -> dict[str, Value]:
        return {
            "HEAD_DIM": problem.head_dim,
            "HEAD_DIM_V": problem.head_dim_v,
            "BLOCK_D": _block_d(problem),
            "BLOCK_DV": _block_dv(problem),
            "CAUSAL": problem.causal,
            # tf32 would miss the accuracy rule; 16-bit operands ignore this.
            "DOT_PRECISION": "ieee",
            "BLOCK_M": config["BLOCK_M"],
            "BLOCK_N": config["BLOCK_N"],
            "GROUP_HEADS": config["GROUP_HEADS"],
            "DIAGONAL_FIRST": config["DIAGONAL_FIRST"],
        }

    def options(self, config: Config) -> dict[str, int]:
        options = {name: config.integer(name) for name in ("num_warps", "num_stages")}
        if config["maxnreg"]:
            options["maxnreg"] = config.integer("maxnreg")
        return options

    def signature(self, problem: Problem, config: Config) -> dict[str, str]:
        dtype = _TRITON_DTYPES[problem.dtype]
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
            arguments += [_descriptor(t, problem, strides[t], blocks[t]) for t in "qkv"]
            arguments += [Pointer(tensor="v")]
        else:
            arguments += [Pointer(tensor=t) for t in "qkv"]
            arguments += [*strides["q"], *strides["k"]]
        arguments += [*strides["v"], Pointer(tensor="out"), Pointer(tensor="lse")]
        arguments += [*strides["out"], call.scale * _LOG2_E]
        arguments += [problem.heads, problem.group, problem.batch * problem.heads]
        return [*arguments, problem.seqlen_q, problem.seqlen_k, int(call.write_lse)]

    def grid(self, problem: Problem, config: Config) -> int:
        rows = -(-problem.seqlen_q // config.integer("BLOCK_M"))
        return rows * problem.batch * problem.heads

    def adapt(self, config: Config, access: Access) -> Config:
        if config["LOAD"] == "tma" and not access.tma:
            return Config(**{**config, "LOAD": "pointer"})
        return config

    def default(self, problem: Problem, target: Target) -> Config:
        wide = max(_block_d(problem), _block_dv(problem))
        rows = min(128, max(16, next_power_of_2(problem.seqlen_q)))
        values: dict[str, Value] = {
            "BLOCK_M": rows,
            "BLOCK_N": 64 if wide <= 128 else 32,
            "num_warps": 8 if rows == 128 and wide > 64 else 4,
            "num_stages": 3,
            "LOAD": "pointer",
            "GROUP_HEADS": 1,
            "DIAGONAL_FIRST": False,
            "maxnreg": 0,
        }
        # Give up a little at a time until the target and the problem allow it.
        for change in _DEFAULT_STEPS:
            values |= change
            config = Config(**values)
            if self.space.why_not(config, problem, target) is None:
                return config
        return config

    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        threads = config.integer("num_warps") * target.warp_size
        registers = _accumulator_registers(config, problem, target) + 2 * _OTHER_REGISTERS
        registers = min(registers, config.integer("maxnreg") or _MAX_REGISTERS)
        by_registers = int(65536 / (threads * registers))
        by_shared = target.shared_memory // max(1, shared_bytes(config, problem, target))
        return max(1, min(by_registers, by_shared, 2048 // threads))

    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        rows, keys = config.integer("BLOCK_M"), config.integer("BLOCK_N")
        dims = _block_d(problem) + _block_dv(problem)
        size = DTYPE_BYTES[problem.dtype]
        blocks = _key_blocks(problem, rows, keys)
        # Cycles of one key block on one SM: matrix products, exponentials, operand loads.
        clock = target.clock_ghz * 1e9
        flops_per_cycle = target.tflops * 1e12 / target.sm_count / clock
        matmul = 2 * rows * keys * dims / flops_per_cycle
        # A quarter-filled instruction costs as much as a full one.
        matmul *= 64 / min(64, rows)
        softmax = rows * keys * (1 / 16 + 6 / 128)
        loads = keys * dims * size / 64 / (1.15 if config["LOAD"] == "tma" else 1.0)
        # Warps that don't wait for each other overlap one's softmax with another's products.
        strands = blocks_per_sm * config.integer("num_warps") / 4
        hidden = 1 - 1 / max(1.0, strands)
        step = max(matmul, loads) + softmax * (1 - 0.75 * hidden) + 60 / max(1.0, strands)
        # A pipeline of one stage waits for each load.
        step += 500 / max(1.0, strands) if config.integer("num_stages") < 2 else 0
        fixed = 1500 + 2 * rows * dims * size / 32
        tiles = self.grid(problem, config)
        slots = target.sm_count * blocks_per_sm
        waves = -(-tiles // slots) if tiles < 4 * slots else tiles / slots + 0.5
        per_tile = (blocks * step + fixed / blocks_per_sm) * blocks_per_sm
        seconds = max(waves * per_tile / clock, problem.min_bytes / (target.bandwidth_tbs * 1e12))
        return seconds * 1e3


# What default() changes, in this order, while the config isn't allowed.
_DEFAULT_STEPS: tuple[dict[str, Value], ...] = (
    {},
    {"num_stages": 2},
    {"BLOCK_N": 32},
    {"BLOCK_M": 64, "num_warps": 4},
    {"num_stages": 1},
    {"BLOCK_M": 32},
    {"BLOCK_M": 16},
)


def _axes(tensor: str) -> str:
    return "bhm" if tensor == "q" else "bhn"


def _key_blocks(problem: Problem, rows: int, keys: int) -> float:
    """Mean number of key blocks that a row block walks."""
    blocks = -(-problem.seqlen_k // keys)
    if not problem.causal or problem.seqlen_q == 0:
        return blocks
    return (
        blocks * problem.visible_pairs / max(1, problem.seqlen_q * problem.seqlen_k)
        + (rows / keys + 1) / 2
    )


def _descriptor_blocks(problem: Problem, config: Config) -> dict[str, tuple[int, int, int, int]]:
    rows, keys = config.integer("BLOCK_M"), config.integer("BLOCK_N")
    return {
        "q": (1, 1, rows, _block_d(problem)),
        "k": (1, 1, keys, _block_d(problem)),
        "v": (1, 1, keys, _block_dv(problem)),
    }


def _descriptor(
    tensor: str,
    problem: Problem,
    strides: tuple[int, int, int],
    block: tuple[int, int, int, int],
) -> Descriptor:
    rows = problem.seqlen_q if tensor == "q" else problem.seqlen_k
    heads = problem.heads if tensor == "q" else problem.kv_heads
    dim = problem.head_dim_v if tensor == "v" else problem.head_dim
    # A dimension of size one is never stepped along, but the copy engine wants a positive stride.
    filler = next_power_of_2(max(*strides, dim, 16))
    full = tuple(stride or filler for stride in strides)
    return Descriptor(
        tensor=tensor,
        shape=(problem.batch, heads, rows, dim),
        strides=(full[0], full[1], full[2], 1),
        block=block,
    )
