"""The quantisation kernels compile for every target that runs them, without a GPU: registers,
spills, and how wide they load and store."""

import re
from types import SimpleNamespace

import pytest
import triton
from triton.compiler import ASTSource

from autoflash.runtime import quantize_kernels
from autoflash.runtime.compiler import gpu_target
from autoflash.runtime.quantize_triton import (
    columns_piece,
    launch_options,
    rotation_constants,
    rows_piece,
    tile_constants,
)
from autoflash.target import NAMED_TARGETS
from autoflash.tuning.resources import resources_of

# Bytes per thread, of 32 elements, that 64 registers may cost in the first pass and elsewhere.
TOLERABLE = 32
KINDS = {"out_ptr": "*fp8e4nv", "descale_ptr": "*fp32", "amax_ptr": "*i32", "normal": "fp32"}


def compiled(function, dim, granularity, *, rotated=False, permuted=False, dtype="bf16",
             target="h200", rows=4096):  # fmt: skip
    """The binary for dense, aligned tensors, specialised as Triton's launcher does it."""
    code = getattr(quantize_kernels, function)
    names = list(code.arg_names)
    tile = tile_constants(dim, rows, granularity)
    mixing = rotation_constants(dim, rotated, dtype != "fp32" and target == "h200")
    held = {
        "quantize_rows": (rows_piece(tile, mixing), tile["BLOCK_D"]),
        "quantize_columns": (tile["ROWS"], columns_piece(tile)),
        "largest_magnitudes": (tile["ROWS"], tile["BLOCK_D"]),
    }[function]
    options = launch_options(*held, by_product=bool(mixing["BY_PRODUCT"]))
    constants = tile | mixing | {
        "PIECE": held[1] if function == "quantize_columns" else held[0],
        "PER_HEAD": granularity == "head", "ONE_PASS": granularity == "block",
        "PERMUTED": permuted, "stride_d": 1,
    }  # fmt: skip
    if function == "quantize_rows":
        constants["stride_od"] = 1
    constants = {name: value for name, value in constants.items() if name in names}
    kinds = {name: KINDS.get(name, "i32") for name in names} | {"x_ptr": f"*{dtype}"}
    kinds |= {"matrix_ptr": f"*{dtype}"} if "matrix_ptr" in names else {}
    kinds |= {"out_ptr": "*i32"} if function == "quantize_columns" else {}
    kinds |= dict.fromkeys(constants, "constexpr")
    aligned = [n for n in names if n.startswith("stride") or n.endswith("ptr") or n == "padded"]
    source = ASTSource(
        code, kinds, {(names.index(n),): value for n, value in constants.items()},
        {(names.index(n),): [["tt.divisibility", 16]] for n in aligned if n not in constants},
    )  # fmt: skip
    binary = triton.compile(source, target=gpu_target(NAMED_TARGETS[target]), options=options)
    threads = 32 * options["num_warps"]
    return SimpleNamespace(
        resources=resources_of(binary), threads=threads, elements=held[0] * held[1] // threads,
        by_product=mixing["BY_PRODUCT"],
        ptx=binary.asm["ptx"], converted=binary.asm["ttgir"].count("convert_layout"),
    )  # fmt: skip


def widths(ptx: str, what: str) -> set[int]:
    """Bytes per thread of the global loads or stores."""
    found = re.findall(rf"{what}\.global\.?(?:v(\d))?\.b(\d+)", ptx)
    return {int(count or 1) * int(bits) // 8 for count, bits in found}


@pytest.mark.parametrize("granularity", ["head", "block"])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("form", ["rows", "rotated", "columns", "permuted"])
def test_two_programs_fit_and_nothing_spills(dim, granularity, form):
    by_rows = form in ("rows", "rotated")
    found = compiled(
        "quantize_rows" if by_rows else "quantize_columns", dim, granularity,
        rotated=form == "rotated", permuted=form == "permuted",
    )  # fmt: skip
    assert found.resources.registers <= (128 if found.by_product else 64)
    assert found.resources.spills <= (TOLERABLE if form == "rotated" else 0)
    assert found.elements == (64 if found.by_product else 32)
    # What is mixed by shuffles is held whole, lest it be mixed twice.
    whole = form == "rotated" and granularity == "block" and dim > 128
    blocks = found.resources.blocks_per_sm(found.threads, NAMED_TARGETS["h200"])
    assert blocks == 1 if whole else blocks >= 2
    # 16 bytes at a time; of 32 elements in fp8 there are two.
    assert max(widths(found.ptx, "ld")) == 16
    assert max(widths(found.ptx, "st")) == 16
    if form == "rows" and (granularity == "head" or dim <= 128):
        # Nothing goes through shared memory but a maximum.
        assert found.converted == 0
        assert found.resources.shared_bytes <= 128


@pytest.mark.parametrize("granularity", ["head", "block"])
def test_few_rows_share_the_reading_of_a_matrix(granularity):
    found = compiled("quantize_rows", 64, granularity, rotated=True, rows=1)
    assert found.threads == 128
    assert found.resources.spills == 0


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rotated", [False, True])
def test_the_first_pass(dim, rotated):
    found = compiled("largest_magnitudes", dim, "tensor", rotated=rotated)
    assert found.resources.registers <= (128 if found.by_product else 64)
    assert found.resources.spills <= TOLERABLE
    assert max(widths(found.ptx, "ld")) == 16
    assert found.converted == 0


@pytest.mark.parametrize("target", ["l40s", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_other_targets_and_dtypes(target, dtype):
    for function, form in (("quantize_rows", {"rotated": True}), ("quantize_columns", {})):
        found = compiled(function, 128, "block", dtype=dtype, target=target, **form)
        assert found.resources.spills <= TOLERABLE
        assert found.resources.blocks_per_sm(found.threads, NAMED_TARGETS[target]) >= 1
