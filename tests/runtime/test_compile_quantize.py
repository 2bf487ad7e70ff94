"""The quantisation kernels compile for every target that runs them, without a GPU: registers,
spills, and how wide they load and store."""

import re
from types import SimpleNamespace

import pytest
import triton
from triton.compiler import ASTSource

from autoflash.runtime import quantize_kernels, quantize_rotated
from autoflash.runtime.compiler import gpu_target
from autoflash.runtime.quantize_triton import (
    held_ahead,
    held_as_loaded,
    held_in_fp32,
    loads_ahead,
    rounds,
    tile_constants,
)
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.resources import resources_of

# Bytes per thread that 64 registers for 32 rotated elements may cost.
TOLERABLE = 32
KINDS = {
    "out_ptr": "*fp8e4nv", "descale_ptr": "*fp32", "amax_ptr": "*i32", "signs_ptr": "*i16",
    "normal": "fp32",
}  # fmt: skip
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def compiled(function, dim, granularity, *, permuted=False, dtype="bf16", target="h200", rows=4096):
    """The binary for dense, aligned tensors, specialised as Triton's launcher does it."""
    rotated = function.endswith("rotated")
    code = getattr(quantize_rotated if rotated else quantize_kernels, function)
    names = list(code.arg_names)
    one_pass = granularity == "block"
    tile = tile_constants(dim, rows, granularity, rotated)
    ahead = function == "quantize_rotated" and loads_ahead(tile, SIZES[dtype], one_pass)
    options = held_in_fp32(tile)
    if ahead:
        options = held_ahead(tile)
    elif one_pass and not rotated and function != "largest_magnitudes":
        options = held_as_loaded(tile, SIZES[dtype])
    constants = tile | {
        "PER_HEAD": granularity == "head", "ONE_PASS": one_pass, "PERMUTED": permuted,
        "STEPS": rounds(dim), "AHEAD": ahead, "stride_d": 1,
    }  # fmt: skip
    if function in ("quantize_rows", "quantize_rotated"):
        constants["stride_od"] = 1
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = {name: KINDS.get(name, "i32") for name in names} | {"x_ptr": f"*{dtype}"}
    kinds |= {"out_ptr": "*i32"} if function == "quantize_columns" else {}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = [n for n in names if n.startswith("stride") or n.endswith("ptr") or n == "padded"]
    source = ASTSource(
        code, kinds, {(names.index(n),): value for n, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants},
    )  # fmt: skip
    binary = triton.compile(source, target=gpu_target(NAMED_TARGETS[target]), options=options)
    return SimpleNamespace(
        resources=resources_of(binary), threads=32 * options["num_warps"], ahead=ahead,
        elements=tile["ROWS"] * tile["BLOCK_D"] // (32 * options["num_warps"]),
        registers=options["maxnreg"],
        ptx=binary.asm["ptx"], converted=binary.asm["ttgir"].count("convert_layout"),
    )  # fmt: skip


def widths(ptx: str, what: str) -> set[int]:
    """Bytes per thread of the global loads or stores."""
    found = re.findall(rf"{what}\.global\.?(?:v(\d))?\.b(\d+)", ptx)
    return {int(count or 1) * int(bits) // 8 for count, bits in found}


FORMS = {
    "rows": ("quantize_rows", False),
    "rotated": ("quantize_rotated", False),
    "columns": ("quantize_columns", False),
    "permuted": ("quantize_columns", True),
}


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("form", FORMS)
def test_programs_fit_side_by_side_and_nothing_spills(dim, granularity, form):
    function, permuted = FORMS[form]
    found = compiled(function, dim, granularity, permuted=permuted)
    assert found.resources.registers <= found.registers
    assert found.resources.spills <= (TOLERABLE if form == "rotated" else 0)
    held = 128 if granularity == "block" and form != "rotated" else 64 if found.ahead else 32
    # Four warps at least have a block of 64 dims.
    assert found.elements == min(held, tile_constants(dim, 128, "block", False)["BLOCK_D"])
    blocks = found.resources.blocks_per_sm(found.threads, NAMED_TARGETS["h200"])
    # One that loads ahead overlaps with itself.
    assert blocks >= (1 if found.ahead else 2)
    # 16 bytes at a time; of 8 neighbours in fp8 there are eight.
    assert max(widths(found.ptx, "ld")) == 16
    assert max(widths(found.ptx, "st")) >= (8 if form == "rotated" else 16)
    if form in ("rows", "rotated"):
        # Nothing goes through shared memory but a maximum.
        assert found.converted == 0
        assert found.resources.shared_bytes <= 128


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("function", ["quantize_rows", "quantize_columns", "quantize_rotated"])
def test_few_rows_have_four_warps(function, granularity):
    """Fewer lose words (docs/fp8.md, "Traps")."""
    found = compiled(function, 64, granularity, rows=1)
    assert found.threads == 128
    assert found.resources.spills == 0


@pytest.mark.parametrize("function", ["largest_magnitudes", "largest_rotated"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_first_pass(dim, function):
    found = compiled(function, dim, "tensor")
    assert found.resources.registers <= 64
    assert found.resources.spills <= TOLERABLE
    assert max(widths(found.ptx, "ld")) == 16
    assert found.converted == 0


@pytest.mark.parametrize("target", ["l40s", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_targets_and_dtypes(target, dtype):
    for function in ("quantize_rows", "quantize_columns", "quantize_rotated"):
        found = compiled(function, 128, "block", dtype=dtype, target=target)
        assert found.resources.spills <= TOLERABLE
        assert found.resources.blocks_per_sm(found.threads, NAMED_TARGETS[target]) >= 1
