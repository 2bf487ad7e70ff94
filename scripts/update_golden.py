"""Accept the kernel sources as they are rendered now.

Usage: python scripts/update_golden.py [--check]     (make golden)

Writes tests/golden/<slug>.py for every case of CASES and removes files that no case has any more.
With --check it writes nothing and exits with 1 if a file would change. Look at the difference in
git before committing: it is the change of the GPU code that a change of a template has made.
"""

import argparse
import sys
from pathlib import Path

from autoflash.codegen.render import render
from autoflash.dtypes import FP8
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "golden"

# A config is written out here, so that a golden file changes only when a template or the way it is
# rendered does, not when another default is chosen.
_CONFIG = Config(
    BLOCK_M=128,
    BLOCK_N=64,
    num_warps=8,
    num_stages=3,
    LOAD="pointer",
    GROUP_HEADS=1,
    DIAGONAL_FIRST=False,
    maxnreg=0,
)


def _problem(
    dtype: str, head_dim: int, head_dim_v: int, *, causal: bool, op: str = "fwd", **fp8: str
) -> Problem:
    return Problem(
        batch=2,
        heads=16,
        kv_heads=4,
        seqlen_q=1000,
        seqlen_k=2000,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        causal=causal,
        op=op,
        **fp8,
    )


_HOPPER_CONFIG = Config(
    CONSUMERS=2,
    PACK_HEADS=1,
    BLOCK_N=128,
    STAGES=2,
    OVERLAP=True,
    Q_IN_REGISTERS=False,
    SCHEDULE="persistent",
    GROUP_MB=32,
    STAGING="own",
    PV_WAIT="middle",
    PING_PONG="none",
    LOADER_REGISTERS=24,
    EXP2_BY_FMA=0,
    RESCALE_ABOVE=8,
)

_BACKWARD_CONFIG = Config(
    DKDV_BLOCK_M=64,
    DKDV_BLOCK_N=128,
    DKDV_WARPS=8,
    DKDV_STAGES=2,
    DQ_BLOCK_M=128,
    DQ_BLOCK_N=64,
    DQ_WARPS=8,
    DQ_STAGES=3,
    GROUP_HEADS=1,
    LOAD="pointer",
)

_HOPPER_BACKWARD_CONFIG = Config(
    BLOCK_M=64,
    STAGES=2,
    DQ_SPLIT="columns",
    DP_EARLY=False,
    TURNS=False,
    SPREAD=False,
    SCHEDULE="dynamic",
    GROUP_MB=24,
)

Cases = tuple[tuple[Problem, dict[str, bool | int | str]], ...]

# (problem, what differs from _CONFIG): every Jinja decision, and each kind of constexpr and option.
CASES: Cases = (
    (_problem("bfloat16", 64, 64, causal=False), {"num_warps": 4}),
    (_problem("bfloat16", 128, 128, causal=False), {}),
    (_problem("bfloat16", 128, 128, causal=True), {}),
    (_problem("bfloat16", 128, 128, causal=False), {"LOAD": "tma", "maxnreg": 128}),
    (
        _problem("bfloat16", 128, 128, causal=True),
        {"LOAD": "tma", "GROUP_HEADS": 32, "DIAGONAL_FIRST": True},
    ),
    (_problem("float16", 64, 64, causal=True), {"num_warps": 4, "GROUP_HEADS": 8}),
    (_problem("float16", 72, 40, causal=True), {"BLOCK_M": 64, "num_warps": 4}),
    (_problem("float16", 72, 40, causal=False), {"LOAD": "tma"}),
    (_problem("float16", 256, 256, causal=False), {"BLOCK_N": 32, "num_stages": 2}),
    (_problem("bfloat16", 256, 256, causal=True), {"BLOCK_N": 32, "LOAD": "tma"}),
)


HOPPER_CASES: Cases = (
    (_problem("bfloat16", 128, 128, causal=False), {}),
    (_problem("bfloat16", 128, 128, causal=True), {"SCHEDULE": "dynamic", "GROUP_MB": 64}),
    (
        _problem("float16", 64, 64, causal=False),
        {"CONSUMERS": 3, "STAGES": 3, "PING_PONG": "done", "SCHEDULE": "grid", "EXP2_BY_FMA": 8},
    ),
    (
        _problem("float16", 72, 40, causal=True),
        {"STAGING": "direct", "SCHEDULE": "dynamic", "LOADER_REGISTERS": 40, "PACK_HEADS": 4},
    ),
    (
        _problem("bfloat16", 64, 64, causal=True),
        {"CONSUMERS": 4, "BLOCK_N": 64, "STAGES": 4, "PING_PONG": "done"},
    ),
    (_problem("float16", 256, 256, causal=False), {"BLOCK_N": 64, "STAGING": "half"}),
    (_problem("bfloat16", 192, 128, causal=True), {"BLOCK_N": 64, "SCHEDULE": "grid"}),
    (
        _problem("bfloat16", 256, 256, causal=False),
        {"BLOCK_N": 64, "STAGING": "direct", "RESCALE_ABOVE": 0},
    ),
)


BACKWARD_CASES: Cases = (
    (_problem("bfloat16", 128, 128, causal=False, op="bwd"), {}),
    (_problem("float16", 72, 40, causal=True, op="bwd"), {"DKDV_BLOCK_M": 32, "GROUP_HEADS": 8}),
    (_problem("bfloat16", 64, 64, causal=True, op="bwd"), {"DKDV_BLOCK_M": 32, "LOAD": "tma"}),
)


_SPLIT_BACKWARD_CONFIG = Config(
    DKDV_BLOCK_M=64,
    DKDV_STAGES=2,
    DP_EARLY=False,
    DQ_BLOCK_N=32,
    DQ_SLOTS=4,
    GROUP_MB=16,
)

SPLIT_BACKWARD_CASES: Cases = (
    (_problem("bfloat16", 256, 256, causal=True, op="bwd"), {}),
    (_problem("float16", 128, 128, causal=False, op="bwd"), {"DP_EARLY": True}),
)

HOPPER_BACKWARD_CASES: Cases = (
    (_problem("bfloat16", 128, 128, causal=True, op="bwd"), {}),
    (
        _problem("float16", 64, 64, causal=False, op="bwd"),
        {"BLOCK_M": 128, "DQ_SPLIT": "rows", "TURNS": True, "DP_EARLY": True, "SCHEDULE": "grid"},
    ),
)


_FP8_CONFIG = Config(
    BLOCK_M=128,
    BLOCK_N=64,
    num_warps=8,
    num_stages=3,
    GROUP_HEADS=1,
    FNUZ=False,
    maxnreg=0,
)

# Each layout, granularity and dtype; there are no Jinja decisions.
FP8_CASES: Cases = (
    (_problem(FP8, 128, 128, causal=False, scales="head"), {}),
    (_problem(FP8, 64, 64, causal=True, scales="block", v_layout="columns"), {"num_warps": 4}),
    (
        _problem(
            FP8, 72, 40, causal=True, scales="tensor", v_layout="permuted", out_dtype="float16"
        ),
        {"FNUZ": True, "GROUP_HEADS": 8},
    ),
    (_problem("bfloat16", 128, 128, causal=True, scales="head", kv_dtype=FP8), {"maxnreg": 128}),
)


_FP8_HOPPER_CONFIG = Config(
    CONSUMERS=3,
    BLOCK_N=128,
    STAGES=3,
    Q_IN_REGISTERS=False,
    PV_PART=128,
    SCHEDULE="dynamic",
    GROUP_MB=16,
    STAGING="own",
    PING_PONG="none",
    LOADER_REGISTERS=24,
    EXP2_BY_FMA=0,
)

FP8_HOPPER_CASES: Cases = (
    (_problem(FP8, 128, 128, causal=False, scales="head", v_layout="permuted"), {}),
    (
        _problem(FP8, 256, 256, causal=True, scales="block"),
        {"CONSUMERS": 2, "STAGES": 2, "SCHEDULE": "persistent", "EXP2_BY_FMA": 8},
    ),
    (
        _problem(
            FP8, 64, 48, causal=True, scales="tensor", v_layout="permuted", out_dtype="float16"
        ),
        {
            "Q_IN_REGISTERS": True,
            "PV_PART": 64,
            "STAGING": "direct",
            "SCHEDULE": "grid",
            "GROUP_MB": 1,
            "PING_PONG": "done",
        },
    ),
)


def render_all() -> dict[str, str]:
    """File name to text of every case."""
    texts: dict[str, str] = {}
    kernels = (
        ("flash_fwd", _CONFIG, CASES),
        ("flash_fwd_ws", _HOPPER_CONFIG, HOPPER_CASES),
        ("flash_fwd_fp8", _FP8_CONFIG, FP8_CASES),
        ("flash_fwd_fp8_ws", _FP8_HOPPER_CONFIG, FP8_HOPPER_CASES),
        ("flash_bwd", _BACKWARD_CONFIG, BACKWARD_CASES),
        ("flash_bwd_ws", _HOPPER_BACKWARD_CONFIG, HOPPER_BACKWARD_CASES),
        ("flash_bwd_split", _SPLIT_BACKWARD_CONFIG, SPLIT_BACKWARD_CASES),
    )
    for kernel, base, cases in kernels:
        for problem, changes in cases:
            source = render(KERNELS[kernel], problem, Config(**{**base, **changes}))
            # The hash at the end of the name would hide a change from `git diff`.
            name = source.name.rpartition("_")[0] + ".py"
            assert name not in texts, f"two golden cases are called {name}"
            texts[name] = source.text
    return texts


def stale(folder: Path, texts: dict[str, str]) -> list[Path]:
    """Files of ``folder`` that no case has."""
    return sorted(path for path in folder.glob("*.py") if path.name not in texts)


def main() -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if stale")
    check = parser.parse_args().check
    GOLDEN.mkdir(exist_ok=True)
    texts = render_all()
    changed = 0
    for path in stale(GOLDEN, texts):
        print(f"removed   {path.name}")
        changed += 1
        if not check:
            path.unlink()
    for name, text in texts.items():
        path = GOLDEN / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            print(f"{'changed' if path.exists() else 'new':9} {name}")
            changed += 1
            if not check:
                path.write_text(text, encoding="utf-8")
    print(f"{len(texts)} golden files, {changed} {'would change' if check else 'changed'}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
