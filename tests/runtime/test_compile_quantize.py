"""The quantisation kernels compile for every target that runs them, without a GPU: registers,
spills, and how wide they load and store."""

import re
from types import SimpleNamespace

import pytest
import triton
from triton.compiler import ASTSource

from autoflash.runtime import quantize_kernels
from autoflash.runtime.compiler import gpu_target
from autoflash.runtime.quantize_triton import launch_options, tile_constants
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.resources import resources_of

# Bytes per thread, of 32 elements, that 64 registers may cost, which let two programs share an SM.
# Triton 3.6 carries 8-bit numbers as 16-bit ones where it transposes.
TOLERABLE = 128 if triton.__version__.startswith("3.6.") else 32
KINDS = {"out_ptr": "*fp8e4nv", "descale_ptr": "*fp32", "amax_ptr": "*i32", "normal": "fp32"}


def compiled(function, dim, granularity, *, rotated=False, transposed=False, dtype="bf16",
             target="h200"):  # fmt: skip
    """The binary for dense, aligned tensors, specialised as Triton's launcher does it."""
    code = getattr(quantize_kernels, function)
    names = list(code.arg_names)
    constants = tile_constants(dim, 4096, granularity, rotated)
    options = launch_options(constants["ROWS"], constants["BLOCK_D"])
    constants |= {
        "PER_HEAD": granularity == "head", "ONE_PASS": granularity == "block",
        "PERMUTED": transposed, "stride_d": 1, "stride_os" if transposed else "stride_od": 1,
    }  # fmt: skip
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = {name: KINDS.get(name, "i32") for name in names} | {"x_ptr": f"*{dtype}"}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = [n for n in names if n.startswith("stride") or n.endswith("ptr") or n == "padded"]
    source = ASTSource(
        code, kinds, {(names.index(n),): value for n, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants},
    )  # fmt: skip
    binary = triton.compile(source, target=gpu_target(NAMED_TARGETS[target]), options=options)
    threads = 32 * options["num_warps"]
    elements = constants["ROWS"] * constants["BLOCK_D"] // threads
    return SimpleNamespace(
        resources=resources_of(binary), threads=threads, elements=elements,
        ptx=binary.asm["ptx"], converted=binary.asm["ttgir"].count("convert_layout"),
    )  # fmt: skip


def widths(ptx: str, what: str) -> set[int]:
    """Bytes per thread of the global loads or stores."""
    found = re.findall(rf"{what}\.global\.?(?:v(\d))?\.b(\d+)", ptx)
    return {int(count or 1) * int(bits) // 8 for count, bits in found}


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("form", ["rows", "rotated", "transposed"])
def test_two_programs_fit_and_hardly_spill(dim, granularity, form):
    found = compiled(
        "quantize_tiles", dim, granularity, rotated=form == "rotated",
        transposed=form == "transposed",
    )  # fmt: skip
    assert found.resources.registers <= 64
    assert found.resources.spills <= TOLERABLE
    assert found.elements == 32
    # A tile of 128 rows of more than 128 dims takes the whole register file.
    one = granularity == "block" and dim > 128
    blocks = found.resources.blocks_per_sm(found.threads, NAMED_TARGETS["h200"])
    assert blocks == 1 if one else blocks >= 2
    # 16 bytes at a time; of 32 elements in fp8 there are two.
    assert max(widths(found.ptx, "ld")) == 16
    assert max(widths(found.ptx, "st")) == 16
    # Nothing goes through shared memory but a maximum, and what is transposed.
    assert found.converted == (form == "transposed")
    if form != "transposed":
        assert found.resources.shared_bytes <= 128


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rotated", [False, True])
def test_the_first_pass(dim, rotated):
    found = compiled("largest_magnitudes", dim, "tensor", rotated=rotated)
    assert found.resources.registers <= 64
    assert found.resources.spills <= TOLERABLE
    assert max(widths(found.ptx, "ld")) == 16
    assert found.converted == 0


@pytest.mark.parametrize("target", ["l40s", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_targets_and_dtypes(target, dtype):
    for form in ({"rotated": True}, {"transposed": True}):
        found = compiled("quantize_tiles", 128, "block", dtype=dtype, target=target, **form)
        assert found.resources.spills <= TOLERABLE
        assert found.resources.blocks_per_sm(found.threads, NAMED_TARGETS[target]) >= 1
