"""flash_bwd_split: the repeatable backward for Hopper (templates/flash_bwd_split.py.jinja).

A chain of three functions: row statistics; dk and dv, by blocks of keys; dq, by blocks of rows.
Seven products where flash_bwd_ws has five, but no sum is shared: the same result bit for bit each
time, without room for sums, and only what is wanted is computed. Wide heads (above 128), of which
flash_bwd_ws can't hold dk and dv, are served too: there one consumer sums up dv, the other dk.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoflash.kernels import flash_bwd_split_model as model
from autoflash.kernels.flash_bwd_split_space import (
    ROWS,
    SPACE,
    dkdv_shared,
    dq_shared,
    group_heads,
    keys_owned,
    paired,
    why_not_served,
)
from autoflash.kernels.flash_bwd_ws import copied, descriptor_types, row_statistics
from autoflash.kernels.flash_bwd_ws_space import (
    CONSUMER_REGISTERS,
    LOADER_REGISTERS,
    grouped,
    lead_rows,
    padded_rows,
)
from autoflash.kernels.hopper_tiles import block_d
from autoflash.kernels.kernel import (
    LOG2_E,
    MAX_GRID,
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
from autoflash.problem import Problem
from autoflash.space import Config, Value
from autoflash.target import Target


@dataclass(frozen=True, kw_only=True)
class FlashBwdSplitVariant(Variant):
    """Who sums up what; the order of tiles is the emitted file's own."""

    paired: bool
    group_mb: int

    def template_context(self) -> dict[str, Any]:
        return {"paired": self.paired, "group_mb": self.group_mb}

    def slug(self, problem: Problem) -> str:
        return "_".join(slug_parts(problem))


class FlashBwdSplit(Kernel):
    """The declaration of flash_bwd_split."""

    name = "flash_bwd_split"
    template = "flash_bwd_split.py.jinja"
    language = "gluon"
    op = "bwd"
    space = SPACE
    # Numbers that don't change in the loop are what spills: they are read again once a step.
    tolerable_spills = 256

    def serves(self, problem: Problem, target: Target) -> str | None:
        reason = why_not_served(problem, target) or why_too_long(problem)
        if reason is not None:
            return reason
        keys = problem.batch * problem.kv_heads * -(-problem.seqlen_k // keys_owned(problem))
        rows = problem.batch * problem.heads * -(-problem.seqlen_q // ROWS)
        if max(keys, rows) > MAX_GRID:
            return f"more than {MAX_GRID} blocks of keys or of {ROWS} query rows: split the batch"
        return None

    def variant(self, problem: Problem, config: Config) -> FlashBwdSplitVariant:
        return FlashBwdSplitVariant(paired=paired(problem), group_mb=config.integer("GROUP_MB"))

    def scratch(self, problem: Problem) -> tuple[Scratch, ...]:
        shape = (problem.batch, problem.heads, padded_rows(problem))
        return tuple(
            Scratch(name=name, shape=shape, dtype="float32") for name in ("lse2", "minus_delta")
        )

    def functions(self, problem: Problem, config: Config) -> tuple[Function, ...]:
        prepare = row_statistics("flash_bwd_split_prepare", problem, sums=False)
        return (prepare, _dkdv(problem, config), _dq(problem, config))

    def adapt(self, config: Config, access: Access) -> Config | None:
        # There is no other way to load.
        return config if access.tma else None

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        def told(parts: dict[str, int]) -> str:
            return ", ".join(f"{n} {size / 1024:g} KiB" for n, size in parts.items() if size)

        who = (
            "one of 2 consumers dv, the other dk"
            if paired(problem)
            else "each of 2 consumers both, for 64 keys"
        )
        return [
            f"dk, dv: 1 warp loads, {who}; ring of {config['DKDV_STAGES']} blocks of "
            f"{config['DKDV_BLOCK_M']} query rows",
            f"shared memory: {told(dkdv_shared(config, problem))}",
            f"dq: 1 warp loads, 2 consumers of 64 query rows; ring of {config['DQ_SLOTS']} blocks "
            f"of {config['DQ_BLOCK_N']} keys",
            f"shared memory: {told(dq_shared(config, problem))}",
        ]

    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        found: dict[Config, None] = {}
        heads = (problem.batch * problem.heads, problem.batch * problem.kv_heads)
        for values in _TRIES[block_d(problem)]:
            config = grouped(
                values, lambda config: [group_heads(config, problem, n) for n in heads]
            )
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


def _try(rows: int, stages: int, keys: int, slots: int) -> dict[str, Any]:
    own = {"DKDV_BLOCK_M": rows, "DKDV_STAGES": stages, "DP_EARLY": False}
    return {**own, "DQ_BLOCK_N": keys, "DQ_SLOTS": slots}


# What defaults() tries, by padded head dim, each with fewer registers or less shared memory.
_TRIES = {
    64: (_try(128, 2, 128, 4), _try(64, 2, 64, 4), _try(64, 1, 32, 2)),
    128: (_try(64, 2, 64, 4), _try(64, 1, 32, 2)),
    256: (_try(64, 2, 32, 4), _try(64, 1, 32, 2)),
}


def _dkdv(problem: Problem, config: Config) -> Function:
    rows, wide = config.integer("DKDV_BLOCK_M"), block_d(problem)
    step, own = (1, 1, rows, wide), (1, 1, 64, wide)
    blocks = {
        "q": step, "k": own, "v": own, "dout": step, "lse2": (rows,), "minus_delta": (rows,),
        "dk": own, "dv": own,
    }  # fmt: skip

    def bind(call: Call) -> list[Argument]:
        p = call.problem
        heads = p.batch * p.kv_heads
        arguments: list[Argument] = [copied(name, call, b) for name, b in blocks.items()]
        arguments += [call.scale, call.scale * LOG2_E, p.kv_heads, p.group, heads]
        arguments += [group_heads(config, p, heads), p.seqlen_q, p.seqlen_k]
        arguments += [padded_rows(p), lead_rows(p)]
        return arguments

    def grid(problem: Problem, target: Target) -> int:
        del target
        return problem.batch * problem.kv_heads * -(-problem.seqlen_k // keys_owned(problem))

    return Function(
        name="flash_bwd_split_dkdv",
        signature=_signature(problem, blocks, (), "kv_heads"),
        constexprs={
            "PARTS": keys_owned(problem) // 64,
            "BLOCK_M": rows,
            "STAGES": config["DKDV_STAGES"],
            "BLOCK_D": wide,
            "CAUSAL": problem.causal,
            "DP_EARLY": config["DP_EARLY"],
            **_REGISTERS,
        },
        options={"num_warps": 4},
        bind=bind,
        grid=grid,
        results=frozenset({"dk", "dv"}),
        language="gluon",
    )


def _dq(problem: Problem, config: Config) -> Function:
    keys, wide = config.integer("DQ_BLOCK_N"), block_d(problem)
    own, step = (1, 1, 64, wide), (1, 1, keys, wide)
    blocks = {"q": own, "k": step, "v": step, "dout": own, "dq": own}

    def bind(call: Call) -> list[Argument]:
        p = call.problem
        heads = p.batch * p.heads
        arguments: list[Argument] = [copied(name, call, b) for name, b in blocks.items()]
        arguments += [Pointer(tensor="lse2"), Pointer(tensor="minus_delta")]
        arguments += [call.scale, call.scale * LOG2_E, p.heads, p.group, heads]
        arguments += [group_heads(config, p, heads), p.seqlen_q, p.seqlen_k]
        arguments += [padded_rows(p), lead_rows(p)]
        return arguments

    def grid(problem: Problem, target: Target) -> int:
        del target
        return problem.batch * problem.heads * -(-problem.seqlen_q // ROWS)

    return Function(
        name="flash_bwd_split_dq",
        signature=_signature(problem, blocks, ("lse2", "minus_delta"), "heads"),
        constexprs={
            "BLOCK_N": keys,
            "SLOTS": config["DQ_SLOTS"],
            "BLOCK_D": wide,
            "CAUSAL": problem.causal,
            **_REGISTERS,
        },
        options={"num_warps": 4},
        bind=bind,
        grid=grid,
        results=frozenset({"dq"}),
        language="gluon",
    )


_REGISTERS: dict[str, Value] = {
    "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
    "LOADER_REGISTERS": LOADER_REGISTERS,
}


def _signature(
    problem: Problem, blocks: Mapping[str, tuple[int, ...]], pointers: tuple[str, ...], heads: str
) -> dict[str, str]:
    kinds = descriptor_types(problem, blocks)
    kinds |= {f"{name}_ptr": "*fp32" for name in pointers}
    sizes = (heads, "group", "batch_heads", "group_heads", "seqlen_q", "seqlen_k", "padded", "lead")
    return {**kinds, "scale": "fp32", "scale_log2": "fp32", **dict.fromkeys(sizes, "i32")}
