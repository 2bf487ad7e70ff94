"""Quantisation to e4m3 on an NVIDIA GPU: launches quantize_kernels.py and quantize_rotated.py.

Where a tile is all that a scale serves (always per block), x is read from memory once. Per head and
per tensor it is read twice, by the kernel that finds the largest and by the one that rounds, in the
opposite order, so that what still lies in the L2 cache isn't read from memory again.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from autoflash.fp8 import SCALE_BLOCK, scale_shape
from autoflash.problem import next_power_of_2
from autoflash.rotation import normaliser, rotated_together, signs
from autoflash.runtime.quantize_kernels import (
    largest_magnitudes,
    quantize_columns,
    quantize_rows,
)
from autoflash.runtime.quantize_rotated import largest_rotated, quantize_rotated
from autoflash.target import current_target

# Elements of a tile that is read twice, by rows and rotated.
_TILE, _ROTATED_TILE = 16384, 4096
# Elements that a thread holds in fp32, with the registers for that.
_PER_THREAD, _REGISTERS = 32, 64
# Bytes that a thread holds as they were loaded, or twice the elements while it loads as many.
_BYTES, _MORE, _MORE_REGISTERS = 256, 64, 128
Constants = dict[str, int]
Options = dict[str, Any]


def quantize_into(
    out: Tensor, x: Tensor, granularity: str, group: int, seed: int | None, permuted: bool
) -> Tensor:
    """quantize_torch.quantize_into, on x's device and its current stream.

    ``out`` lies by rows, or, where x isn't rotated, transposed in whole words of 16 keys.
    """
    batch, heads, rows, dim = x.shape
    shape = scale_shape(granularity, batch, heads, rows, group)
    if x.numel() == 0:
        out.view(torch.uint8).zero_()
        return torch.ones(shape, device=x.device)
    rotated = seed is not None
    tile = tile_constants(dim, rows, granularity, rotated)
    # Of a transposed v, rows behind the last key too; these lie in its tile.
    blocks = -(-out.shape[2] // tile["ROWS"])
    tiles = batch * heads * blocks
    one_pass = tiles == torch.Size(shape).numel()
    descale = torch.empty(shape, dtype=torch.float32, device=x.device)
    amax = descale if one_pass else torch.zeros(shape, dtype=torch.int32, device=x.device)
    sizes, per_head = (heads, blocks), granularity == "head"
    which = {"ONE_PASS": one_pass, "PER_HEAD": per_head}
    with torch.cuda.device_of(x):
        if seed is not None:
            table, tile["STEPS"] = _flips(dim, seed, x.device), rounds(dim)
            if not one_pass:
                largest_rotated[(tiles,)](
                    x, amax, table, *x.stride(), *sizes, group, rows, **tile, PER_HEAD=per_head,
                    **held_in_fp32(tile),
                )  # fmt: skip
            ahead = loads_ahead(tile, x.element_size(), one_pass)
            options = held_ahead(tile) if ahead else held_in_fp32(tile)
            programs = min(tiles, resident(options, x.device)) if ahead else tiles
            quantize_rotated[(programs,)](
                x, out, descale, amax, table, *x.stride(), *out.stride(), normaliser(dim), *sizes,
                group, rows, tiles, **tile, **which, AHEAD=ahead, **options,
            )  # fmt: skip
            return descale
        if not one_pass:
            largest_magnitudes[(tiles,)](
                x, amax, *x.stride(), *sizes, group, rows, **tile, PER_HEAD=per_head,
                **held_in_fp32(tile),
            )  # fmt: skip
        options = held_as_loaded(tile, x.element_size()) if one_pass else held_in_fp32(tile)
        if is_transposed(out):
            words = out.mT.view(torch.int32)
            quantize_columns[(tiles,)](
                x, words, descale, amax, *x.stride(), *words.stride()[:3], *sizes, rows,
                out.shape[2], 0, **tile, **which, PERMUTED=permuted, **options,
            )  # fmt: skip
        else:
            quantize_rows[(tiles,)](
                x, out, descale, amax, *x.stride(), *out.stride(), *sizes, group, rows, 0,
                **tile, **which, **options,
            )  # fmt: skip
    return descale


def is_transposed(out: Tensor) -> bool:
    """Whether rows of out [B, H, S, D] lie side by side in whole words, and not behind each other:
    what quantize_columns writes."""
    return out.stride(2) == 1 and out.shape[2] % 16 == 0 and out.mT.is_contiguous()


@functools.lru_cache(maxsize=64)
def _flips(dim: int, seed: int, device: torch.device) -> Tensor:
    """For each dim the sign bit of a 16-bit number where it is negated, else 0. Copied from memory
    that isn't pinned, so that it is there whichever stream reads it."""
    flips = [-(1 << 15) if flipped else 0 for flipped in signs(dim, seed)]
    return torch.tensor(flips, dtype=torch.int16).to(device)


def tile_constants(dim: int, rows: int, granularity: str, rotated: bool) -> Constants:
    """The constexprs that say what a tile is."""
    block_d = next_power_of_2(max(dim, 16))
    tile = min(SCALE_BLOCK, max(16, next_power_of_2(rows)))
    if granularity != "block":
        tile = min(tile, max(16, (_ROTATED_TILE if rotated else _TILE) // block_d))
    return {"DIM": dim, "BLOCK_D": block_d, "ROWS": tile}


def rounds(dim: int) -> int:
    """Rounds of sums and differences that mix a row."""
    return rotated_together(dim).bit_length() - 1


def loads_ahead(tile: Constants, size: int, one_pass: bool) -> bool:
    """Whether programs of quantize_rotated take several tiles, of elements of ``size`` bytes: where
    a tile is so large that few programs run side by side (H200: 128 dims 0.73 of a copy's rate in
    place of 0.71, 256 dims 0.69 in place of 0.58; 64 dims would lose, 0.69 in place of 0.76)."""
    return one_pass and size == 2 and tile["ROWS"] * tile["BLOCK_D"] >= 16384


def held_in_fp32(tile: Constants) -> Options:
    """Triton's options where a thread has 32 elements: two programs of a tile, or more, fit on an
    SM of an H100, and one loads while another one computes."""
    return _options(tile["ROWS"] * tile["BLOCK_D"] // _PER_THREAD, _REGISTERS)


def held_as_loaded(tile: Constants, size: int) -> Options:
    """The same where it has more, as they were loaded, of ``size`` bytes each."""
    return _options(tile["ROWS"] * tile["BLOCK_D"] * size // _BYTES, _MORE_REGISTERS)


def held_ahead(tile: Constants) -> Options:
    """The same where it has 64 in fp32 and as many underway."""
    return _options(tile["ROWS"] * tile["BLOCK_D"] // _MORE, _MORE_REGISTERS)


def resident(options: Options, device: torch.device) -> int:
    """Programs that the GPU holds at a time, by their registers."""
    each: int = 32 * options["num_warps"] * options["maxnreg"]
    # Triton's interpreter is one.
    sms = current_target(device).sm_count if device.type == "cuda" else 1
    return sms * max(1, 65536 // each)


def _options(threads: int, registers: int) -> Options:
    # At least four warps: Triton 3.6 loses words that one warp moves among its threads
    # (quantize_columns of 16 keys).
    return {"num_warps": max(4, threads // 32), "num_stages": 1, "maxnreg": registers}
