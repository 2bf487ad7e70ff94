"""flash_fwd_fp8 compiles for every target with e4m3, without a GPU, fits it and uses its fp8 unit.

By default a sample runs, in which each target occurs with each kind of operands; the other cases
are marked full. AUTOFLASH_TEST_SEED chooses another sample.
"""

import dataclasses
import itertools
import os
import random
import re
from dataclasses import dataclass

import pytest

from autoflash.dtypes import FP8
from autoflash.errors import UnsupportedError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.flash_fwd_fp8_space import needs_fnuz, shared_bytes
from autoflash.kernels.kernel import ALIGNED, Access
from autoflash.problem import Problem
from autoflash.runtime.compiler import compile_config
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.resources import resources_of

SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
KERNEL = KERNELS["flash_fwd_fp8"]
PROBLEM = Problem(
    batch=1, heads=8, kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=64, head_dim_v=64,
    dtype=FP8, causal=True, scales="block",
)  # fmt: skip
TARGETS = ("l40s", "h100", "b200", "rtx5090", "mi300x")
# q, k and v, out
KINDS = ((FP8, "", ""), (FP8, "", "float16"), ("bfloat16", FP8, ""), ("float16", FP8, ""))
LAYOUTS = ("rows", "columns", "permuted")
SHAPES = ((64, 64), (128, 128), (72, 40), (192, 128))


@dataclass(frozen=True)
class Case:
    target_name: str
    kind: tuple[str, str, str]
    layout: str
    scales: str
    shape: tuple[int, int]
    causal: bool
    aligned: bool

    @property
    def problem(self):
        dtype, kv_dtype, out_dtype = self.kind
        return dataclasses.replace(
            PROBLEM, dtype=dtype, kv_dtype=kv_dtype, out_dtype=out_dtype, v_layout=self.layout,
            scales=self.scales, head_dim=self.shape[0], head_dim_v=self.shape[1],
            causal=self.causal,
        )  # fmt: skip

    @property
    def config(self):
        target = NAMED_TARGETS[self.target_name]
        return Config(
            BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2, GROUP_HEADS=1, maxnreg=0,
            FNUZ=needs_fnuz(self.problem, target),
        )  # fmt: skip

    def __str__(self):
        lie = "aligned" if self.aligned else "unaligned"
        return f"{self.target_name}-{self.problem.label().replace(' ', '-')}-{lie}"


CASES = [
    Case(*rest)
    for rest in itertools.product(
        TARGETS, KINDS, LAYOUTS, ("head", "block"), SHAPES, (False, True), (True, False)
    )
]


def sample(seed: int) -> set[Case]:
    lot = random.Random(seed)
    by_kind = itertools.groupby(CASES, key=lambda case: (case.target_name, case.kind))
    return {lot.choice(list(cases)) for _, cases in by_kind}


BY_DEFAULT = sample(SEED)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in BY_DEFAULT else pytest.mark.full)
        for case in CASES
    ],
)
def test_the_variant_compiles_and_fits(case):
    print(f"AUTOFLASH_TEST_SEED={SEED}")
    target, problem = NAMED_TARGETS[case.target_name], case.problem
    access = ALIGNED if case.aligned else Access(aligned=False, tma=False)
    (compiled,) = compile_config(KERNEL, problem, case.config, access, target)
    resources = resources_of(compiled)
    assert resources.why_not(target) is None
    if case.aligned:
        assert shared_bytes(case.config, problem, target) <= resources.shared_bytes
    if target.vendor == "nvidia":
        check_ptx(case, compiled.asm["ptx"])
    else:
        products = set(re.findall(r"v_mfma_f32_\w+", compiled.asm["amdgcn"]))
        unit = "fp8_fp8" if problem.dtype == FP8 else {"bfloat16": "bf16", "float16": "f16"}[
            problem.dtype
        ]  # fmt: skip
        assert products
        assert all(name.endswith(unit) or f"{unit}_1k" in name for name in products)


def check_ptx(case: Case, ptx: str) -> None:
    """The matrix instructions, the cast of P, and the width of loads that the alignment allows."""
    eight_bits = "f8f6f4" if case.target_name == "b200" else r"\.e4m3\.e4m3"
    is_fp8 = case.kind[0] == FP8
    assert bool(re.search(rf"mma\S*{eight_bits}", ptx)) == is_fp8
    assert ("cvt.rn.satfinite.e4m3x2" in ptx) == is_fp8
    copies = set(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+),", ptx))
    wide = re.findall(r"(?:ld|st)\.global\S*\.v[248]\.\S+", ptx)
    # Those of 4 bytes are scales.
    scales = {"0x4"} if case.scales == "block" else set()
    if case.aligned:
        # A row of 72 bytes ends in the middle of 16.
        assert copies - scales <= {"0x10", "0x8"} if 72 in case.shape else {"0x10"}
        assert "st.global.v4.b32" in wide
    else:
        # A wide access to an address that isn't a multiple of its width kills the context.
        assert wide == []
        assert copies <= scales


DEFAULTS = list(itertools.product(TARGETS, KINDS, LAYOUTS, (*SHAPES, (256, 256), (256, 64))))
_lot = random.Random(SEED)
DEFAULTS_BY_DEFAULT = {_lot.choice([d for d in DEFAULTS if d[0] == name]) for name in TARGETS}


@pytest.mark.parametrize(
    ("name", "kind", "layout", "shape"),
    [
        pytest.param(
            *one,
            id="-".join(map(str, (one[0], *filter(None, one[1]), one[2], *one[3]))),
            marks=() if one in DEFAULTS_BY_DEFAULT else pytest.mark.full,
        )
        for one in DEFAULTS
    ],
)
def test_the_default_can_be_loaded(name, kind, layout, shape):
    target = NAMED_TARGETS[name]
    problem = Case(name, kind, layout, "block", shape, True, True).problem
    config = KERNEL.default(problem, target)
    (compiled,) = compile_config(KERNEL, problem, config, ALIGNED, target)
    assert resources_of(compiled).why_not(target) is None


def test_gpus_without_e4m3_are_refused():
    with pytest.raises(UnsupportedError, match=r"flash_fwd_fp8: sm_80 has no e4m3 \(sm_89"):
        kernels_for(PROBLEM, NAMED_TARGETS["a100"])
    assert KERNEL in kernels_for(PROBLEM, NAMED_TARGETS["l40s"])
