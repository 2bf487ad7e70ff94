"""Every variant compiles for every named target, without a GPU, and fits it.

By default a sample runs, in which each target, load path and alignment occurs; the other cases are
marked full. AUTOFLASH_TEST_SEED chooses another sample.
"""

import dataclasses
import itertools
import os
import random
import re
import subprocess
from dataclasses import dataclass

import pytest
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.errors import TritonError

from autoflash.errors import CompileError
from autoflash.kernels import KERNELS
from autoflash.kernels.flash_fwd_space import shared_bytes
from autoflash.kernels.kernel import ALIGNED, Access
from autoflash.problem import Problem
from autoflash.runtime import compiler
from autoflash.runtime.compiler import gpu_target
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.resources import resources_of

SEED = int(os.environ.get("AUTOFLASH_TEST_SEED", "0"))
SAMPLE = 24

KERNEL = KERNELS["flash_fwd"]
UNALIGNED = Access(aligned=False, tma=False)
SMALL = Config(
    BLOCK_M=64, BLOCK_N=32, num_warps=4, num_stages=2, LOAD="pointer", GROUP_HEADS=1,
    DIAGONAL_FIRST=False, maxnreg=0,
)  # fmt: skip
PROBLEM = Problem(
    batch=1, heads=8, kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=64, head_dim_v=64,
    dtype="bfloat16", causal=True,
)  # fmt: skip
# One name per architecture.
TARGETS = ("a100", "l40s", "h100", "b200", "rtx5090", "mi300x")
SHAPES = ((64, 64), (128, 128), (256, 256), (72, 40), (192, 128))
MASKS = ((False, False), (True, False), (True, True))  # causal, DIAGONAL_FIRST
DTYPES = ("bfloat16", "float16")
BUILDS = tuple(
    (name, load, aligned)
    for name in TARGETS
    for load, aligned in (("pointer", True), ("pointer", False), ("tma", True))
    if load == "pointer" or NAMED_TARGETS[name].has_tma
)


def compile_config(*arguments):
    """The one binary of a kernel with one function."""
    (compiled,) = compiler.compile_config(*arguments)
    return compiled


@dataclass(frozen=True)
class Case:
    target_name: str
    load: str
    aligned: bool
    shape: tuple[int, int]
    mask: tuple[bool, bool]
    dtype: str

    @property
    def target(self):
        return NAMED_TARGETS[self.target_name]

    @property
    def access(self):
        return ALIGNED if self.aligned else UNALIGNED

    @property
    def problem(self):
        dim, dim_v = self.shape
        return dataclasses.replace(
            PROBLEM, head_dim=dim, head_dim_v=dim_v, causal=self.mask[0], dtype=self.dtype
        )

    @property
    def config(self):
        return Config(**{**SMALL, "LOAD": self.load, "DIAGONAL_FIRST": self.mask[1]})

    def __str__(self):
        lie = "aligned" if self.aligned else "unaligned"
        causal, diagonal = self.mask
        return (
            f"{self.target.arch}-{self.load}-{lie}-d{self.shape[0]}v{self.shape[1]}"
            f"-causal{causal:d}-diagonal{diagonal:d}-{self.dtype}"
        )


CASES = [
    Case(*build, *rest) for build in BUILDS for rest in itertools.product(SHAPES, MASKS, DTYPES)
]


def sample(seed: int) -> set[Case]:
    """SAMPLE cases: each build at least once, shapes, masks and dtypes in equal shares."""
    lot = random.Random(seed)
    builds = lot.sample(BUILDS, len(BUILDS)) + lot.sample(BUILDS, SAMPLE - len(BUILDS))
    shapes = itertools.cycle(lot.sample(SHAPES, len(SHAPES)))
    kinds = list(itertools.product(MASKS, DTYPES))
    kinds = itertools.cycle(lot.sample(kinds, len(kinds)))
    return {
        Case(*build, shape, *kind)
        for build, shape, kind in zip(builds, shapes, kinds, strict=False)
    }


BY_DEFAULT = sample(SEED)


def spills_nothing(case: Case) -> bool:
    """Where the small tiles are known to fit in the registers (Triton 3.7.1).

    Element-wise loads (unaligned) need an address each, D = 256 holds two wide operands, and AMD
    counts scalar registers that move to vector registers.
    """
    if not case.aligned or case.target.vendor != "nvidia":
        return False
    return case.target.arch == "sm_90" if case.load == "tma" else max(case.shape) < 256


def test_the_sample_is_balanced():
    assert len(CASES) == 15 * 5 * 3 * 2
    assert {(c.target_name, c.load, c.aligned) for c in BY_DEFAULT} == set(BUILDS)
    for axis, values in (("shape", SHAPES), ("mask", MASKS), ("dtype", DTYPES)):
        counts = [sum(getattr(c, axis) == value for c in BY_DEFAULT) for value in values]
        assert min(counts) >= SAMPLE // len(values) - 2


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=str(case), marks=() if case in BY_DEFAULT else pytest.mark.full)
        for case in CASES
    ],
)
def test_the_variant_compiles_and_fits(case):
    print(f"AUTOFLASH_TEST_SEED={SEED}")
    target = case.target
    compiled = compile_config(KERNEL, case.problem, case.config, case.access, target)
    assert compiled.metadata.target == gpu_target(target)
    assert compiled.metadata.num_warps == 4
    resources = resources_of(compiled)
    assert resources.shared_bytes == compiled.metadata.shared
    assert 0 < resources.shared_bytes <= target.shared_memory
    assert resources.why_not(target) is None
    # Both accumulators live in registers.
    least = 64 * (case.config["BLOCK_N"] + case.shape[1]) / (4 * target.warp_size)
    assert least <= resources.registers <= (255 if target.vendor == "nvidia" else 512)
    assert resources.blocks_per_sm(4 * target.warp_size, target) >= 1
    if spills_nothing(case):
        assert resources.spills == 0
    # Unaligned loads are not pipelined: no bound is claimed for them.
    if case.aligned:
        assert shared_bytes(case.config, case.problem, target) <= resources.shared_bytes
    if target.vendor == "nvidia":
        check_loads(case, compiled.asm["ptx"])
    else:
        assert compiled.asm["hsaco"].startswith(b"\x7fELF")


def check_loads(case: Case, ptx: str) -> None:
    """The instructions that a load path and its promise of alignment lead to."""
    wide = re.findall(r"(?:ld|st)\.global\S*\.v[248]\.\S+", ptx)
    copies = set(re.findall(r"cp\.async\.c[ag]\.shared\.global [^;]*?, (0x\w+),", ptx))
    assert ("cp.async.bulk.tensor.4d" in ptx) == (case.load == "tma")
    if case.aligned:
        assert "st.global.v4.b32" in wide
        # With descriptors only the values on the diagonal come by pointer.
        by_pointer = case.load == "pointer" or case.problem.causal
        assert copies == ({"0x10"} if by_pointer else set())
    else:
        # A wide access to an address that isn't a multiple of its width kills the context.
        assert wide == []
        assert copies == set()


# -- defaults --------------------------------------------------------------------------------------

DEFAULTS = list(itertools.product(TARGETS, SHAPES, (False, True)))
_lot = random.Random(SEED)
DEFAULTS_BY_DEFAULT = {_lot.choice([d for d in DEFAULTS if d[0] == name]) for name in TARGETS}


@pytest.mark.parametrize(
    ("name", "shape", "causal"),
    [
        pytest.param(
            *one,
            id=f"{one[0]}-d{one[1][0]}v{one[1][1]}-causal{one[2]:d}",
            marks=() if one in DEFAULTS_BY_DEFAULT else pytest.mark.full,
        )
        for one in DEFAULTS
    ],
)
def test_the_default_can_be_loaded(name, shape, causal):
    target = NAMED_TARGETS[name]
    problem = dataclasses.replace(PROBLEM, head_dim=shape[0], head_dim_v=shape[1], causal=causal)
    config = KERNEL.default(problem, target)
    resources = resources_of(compile_config(KERNEL, problem, config, ALIGNED, target))
    assert resources.why_not(target) is None
    assert resources.shared_bytes <= target.shared_memory


# -- what goes wrong -------------------------------------------------------------------------------

H100 = NAMED_TARGETS["h100"]


def small(**changes) -> Config:
    return Config(**{**SMALL, **changes})


def test_what_triton_refuses_is_a_compile_error():
    with pytest.raises(CompileError, match=r"^flash_fwd_bf16_d64_causal_\w{8} for sm_90: ") as seen:
        compile_config(KERNEL, PROBLEM, small(BLOCK_M=96), ALIGNED, H100)
    cause = seen.value.__cause__
    assert isinstance(cause, TritonError)
    assert "arange's range must be a power of 2" in str(seen.value)


def test_what_the_assembler_refuses_is_a_compile_error_with_its_reason(capfd):
    with pytest.raises(CompileError, match=r"for sm_90: .*Insufficient registers") as seen:
        compile_config(KERNEL, PROBLEM, small(maxnreg=8), ALIGNED, H100)
    assert "\n" not in str(seen.value)
    assert len(str(seen.value)) < 500


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))


def break_assembler(monkeypatch, error):
    def make_cubin(*args, **kwargs):
        raise error

    monkeypatch.setattr(CUDABackend, "make_cubin", make_cubin)


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PassManager::run failed"),
        ValueError("odd\n  layout"),
        IndexError("map::at"),
        OSError("No such file: ptxas"),
        subprocess.CalledProcessError(-11, "ptxas"),
        subprocess.TimeoutExpired("ptxas", 5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_compiler_that_breaks_is_a_compile_error_with_its_reason(monkeypatch, error):
    break_assembler(monkeypatch, error)
    with pytest.raises(CompileError) as seen:
        compile_config(KERNEL, PROBLEM, SMALL, ALIGNED, H100)
    assert str(seen.value).endswith("for sm_90: " + " ".join(str(error).split()))
    assert seen.value.__cause__ is error


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()], ids=repr)
def test_what_is_no_fault_of_the_config_passes_through(monkeypatch, error):
    break_assembler(monkeypatch, error)
    with pytest.raises(type(error)):
        compile_config(KERNEL, PROBLEM, SMALL, ALIGNED, H100)


@pytest.mark.usefixtures("fresh_cache")
def test_the_second_time_triton_answers_from_its_disk_cache(monkeypatch):
    first = compile_config(KERNEL, PROBLEM, SMALL, ALIGNED, H100)
    break_assembler(monkeypatch, RuntimeError("asked to assemble"))
    again = compile_config(KERNEL, PROBLEM, SMALL, ALIGNED, H100)
    assert again.hash == first.hash
    assert again.asm["cubin"] == first.asm["cubin"]
    # What may change the code is in the key.
    other_problem = dataclasses.replace(PROBLEM, dtype="float16")
    for problem, config, access, target in (
        (PROBLEM, small(num_stages=3), ALIGNED, H100),
        (PROBLEM, small(GROUP_HEADS=8), ALIGNED, H100),
        (PROBLEM, SMALL, UNALIGNED, H100),
        (PROBLEM, SMALL, ALIGNED, NAMED_TARGETS["a100"]),
        (other_problem, SMALL, ALIGNED, H100),
    ):
        with pytest.raises(CompileError, match="asked to assemble"):
            compile_config(KERNEL, problem, config, access, target)
    # Sizes are arguments: other ones share the binary.
    longer = dataclasses.replace(PROBLEM, batch=3, heads=5, kv_heads=5, seqlen_q=7, seqlen_k=90_000)
    assert compile_config(KERNEL, longer, SMALL, ALIGNED, H100).hash == first.hash


def test_targets_have_tritons_names():
    assert gpu_target(H100) == gpu_target(NAMED_TARGETS["h200"]) == GPUTarget("cuda", 90, 32)
    assert gpu_target(NAMED_TARGETS["rtx5090"]) == GPUTarget("cuda", 120, 32)
    assert gpu_target(NAMED_TARGETS["mi300x"]) == GPUTarget("hip", "gfx942", 64)
