"""Quantisation to e4m3 on an NVIDIA GPU: the launches of quantize_kernels.py.

A program holds a tile in registers: where a tile is all that a scale serves (always per block), x
is read once. Per head and per tensor it is read twice, by largest_magnitudes and by quantize_tiles
in the opposite order, so that what still lies in the L2 cache isn't read from memory again.
"""

from typing import Any

import torch
from torch import Tensor

from autoflash.fp8 import SCALE_BLOCK, scale_shape
from autoflash.problem import next_power_of_2
from autoflash.rotation import normaliser, rotated_together
from autoflash.runtime.quantize_kernels import largest_magnitudes, quantize_tiles

# Elements of a tile that a thread holds. With 64 registers a thread, two programs of 128 dims
# fit on an SM of an H100, and one loads while the other one computes.
_PER_THREAD = 32
_REGISTERS = 64
# Where a scale's data needs more than a tile anyway.
_TILE_ELEMENTS = 16384


def quantize_into(
    out: Tensor, x: Tensor, granularity: str, group: int, seed: int | None, permuted: bool
) -> Tensor:
    """quantize_torch.quantize_into, on x's device and its current stream."""
    batch, heads, rows, dim = x.shape
    shape = scale_shape(granularity, batch, heads, rows, group)
    if x.numel() == 0:
        out.view(torch.uint8).zero_()
        return torch.ones(shape, device=x.device)
    constants = tile_constants(dim, rows, granularity, seed is not None)
    tile = constants["ROWS"]
    # Of a transposed v, rows behind the last key too; these lie in its tile.
    blocks = -(-out.shape[2] // tile)
    one_pass = batch * heads * blocks == torch.Size(shape).numel()
    descale = torch.empty(shape, dtype=torch.float32, device=x.device)
    amax = descale if one_pass else torch.zeros(shape, dtype=torch.int32, device=x.device)
    sizes = (seed or 0, heads, blocks, group, rows)
    options = launch_options(tile, constants["BLOCK_D"])
    grid = (batch * heads * blocks,)
    per_head = granularity == "head"
    with torch.cuda.device_of(x):
        if not one_pass:
            largest_magnitudes[grid](
                x, amax, *x.stride(), *sizes, **constants, PER_HEAD=per_head, **options
            )
        normal = 1.0 if seed is None else normaliser(dim)
        quantize_tiles[grid](
            x, out, descale, amax, *x.stride(), *out.stride(), normal, *sizes, out.shape[2],
            **constants, ONE_PASS=one_pass, PER_HEAD=per_head, PERMUTED=permuted, **options,
        )  # fmt: skip
    return descale


def tile_constants(dim: int, rows: int, granularity: str, rotated: bool) -> dict[str, int]:
    """The constexprs that say what a tile is."""
    block_d = next_power_of_2(max(dim, 16))
    tile = min(SCALE_BLOCK, max(16, next_power_of_2(rows)))
    if granularity != "block":
        tile = min(tile, max(16, _TILE_ELEMENTS // block_d))
    steps = rotated_together(dim).bit_length() - 1 if rotated else -1
    return {"DIM": dim, "BLOCK_D": block_d, "ROWS": tile, "STEPS": steps}


def launch_options(tile: int, block_d: int) -> dict[str, Any]:
    """Triton's options for a tile of ``tile`` x ``block_d``."""
    warps = max(1, tile * block_d // (32 * _PER_THREAD))
    return {"num_warps": warps, "maxnreg": _REGISTERS}
