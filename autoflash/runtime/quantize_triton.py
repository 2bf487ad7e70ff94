"""Quantisation to e4m3 on an NVIDIA GPU: the launches of quantize_kernels.py.

Where a tile is all that a scale serves (always per block), x is read from memory once. Per head and
per tensor it is read twice, by largest_magnitudes and by the kernel that rounds in the opposite
order, so that what still lies in the L2 cache isn't read from memory again.
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
from autoflash.target import current_target

# Elements of a tile that a thread holds, and its registers: two programs of 128 dims fit on an SM
# of an H100, and one loads while the other one computes. What is rotated by products is held by
# half the threads: the same bytes are underway, and instructions are fewer.
_PER_THREAD, _REGISTERS = 32, 64
_BY_PRODUCT = 2
# Elements of a tile that are held at once, of two programs an SM.
_HELD = 16384
Constants = dict[str, int]


def quantize_into(
    out: Tensor, x: Tensor, granularity: str, group: int, seed: int | None, permuted: bool
) -> Tensor:
    """quantize_torch.quantize_into, on x's device and its current stream.

    ``out`` lies by rows, or, where x isn't rotated, transposed in whole words of 16 keys. Rotations
    of 16-bit x add up in the order of the matrix unit: its last bits, and so a few of out, aren't
    those of quantize_torch.
    """
    batch, heads, rows, dim = x.shape
    shape = scale_shape(granularity, batch, heads, rows, group)
    if x.numel() == 0:
        out.view(torch.uint8).zero_()
        return torch.ones(shape, device=x.device)
    constants = tile_constants(dim, rows, granularity)
    tile = constants["ROWS"]
    # Of a transposed v, rows behind the last key too; these lie in its tile.
    blocks = -(-out.shape[2] // tile)
    grid = (batch * heads * blocks,)
    one_pass = batch * heads * blocks == torch.Size(shape).numel()
    descale = torch.empty(shape, dtype=torch.float32, device=x.device)
    amax = descale if one_pass else torch.zeros(shape, dtype=torch.int32, device=x.device)
    per_head = granularity == "head"
    mixing = rotation_constants(dim, seed is not None, multiplies_exactly(x))
    by_product = bool(mixing["BY_PRODUCT"])
    # A kernel that doesn't read it takes any pointer.
    matrix = _matrix(dim, seed, x.dtype, x.device) if seed is not None and by_product else x
    sizes = (heads, blocks)
    with torch.cuda.device_of(x):
        if not one_pass:
            largest_magnitudes[grid](
                x, amax, matrix, *x.stride(), seed or 0, *sizes, group, rows, **constants, **mixing,
                PER_HEAD=per_head, **launch_options(tile, constants["BLOCK_D"], by_product),
            )  # fmt: skip
        if is_transposed(out):
            words = out.mT.view(torch.int32)
            piece = columns_piece(constants)
            quantize_columns[grid](
                x, words, descale, amax, *x.stride(), *words.stride()[:3], *sizes, rows,
                out.shape[2], **constants, PIECE=piece, ONE_PASS=one_pass, PER_HEAD=per_head,
                PERMUTED=permuted, **launch_options(tile, piece),
            )  # fmt: skip
        else:
            normal = 1.0 if seed is None else normaliser(dim)
            piece = rows_piece(constants, mixing)
            quantize_rows[grid](
                x, out, descale, amax, matrix, *x.stride(), *out.stride(), normal, seed or 0,
                *sizes, group, rows, **constants, **mixing, PIECE=piece, ONE_PASS=one_pass,
                PER_HEAD=per_head, **launch_options(piece, constants["BLOCK_D"], by_product),
            )  # fmt: skip
    return descale


def is_transposed(out: Tensor) -> bool:
    """Whether rows of out [B, H, S, D] lie side by side in whole words, and not behind each other:
    what quantize_columns writes."""
    return out.stride(2) == 1 and out.shape[2] % 16 == 0 and out.mT.is_contiguous()


def multiplies_exactly(x: Tensor) -> bool:
    """Whether products of x with 1 and -1 are exact, and fit: elsewhere than on sm_90 their sums
    take more registers than there are (Triton 3.7)."""
    hopper = not x.is_cuda or current_target(x.device).capability == 90
    return hopper and x.dtype != torch.float32


@functools.lru_cache(maxsize=64)
def _matrix(dim: int, seed: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Signs times the Hadamard matrix, [dim, dim]. Copied from memory that isn't pinned, so that it
    is there whichever stream reads it."""
    hadamard = [[1 - 2 * ((i & j).bit_count() & 1) for j in range(dim)] for i in range(dim)]
    signed = [1 - 2 * flipped for flipped in signs(dim, seed)]
    return (torch.tensor(hadamard) * torch.tensor(signed)[:, None]).to(dtype).to(device)


def tile_constants(dim: int, rows: int, granularity: str) -> Constants:
    """The constexprs that say what a tile is."""
    block_d = next_power_of_2(max(dim, 16))
    tile = min(SCALE_BLOCK, max(16, next_power_of_2(rows)))
    if granularity != "block":
        tile = min(tile, max(16, _HELD // block_d))
    return {"DIM": dim, "BLOCK_D": block_d, "ROWS": tile}


def rotation_constants(dim: int, rotated: bool, exact: bool) -> Constants:
    """The constexprs that say how it is rotated: by products where these are ``exact`` and it pays.

    On an H200 that is 64 dims: of 128 and 256 their latency costs more than the shuffles do.
    """
    by_product = rotated and exact and dim == 64
    steps = rotated_together(dim).bit_length() - 1 if rotated and not by_product else -1
    return {"STEPS": steps, "BY_PRODUCT": by_product}


def rows_piece(tile: Constants, mixing: Constants) -> int:
    """Rows that quantize_rows holds at once: all of a tile, or of a large one so few that programs
    overlap, unless it had to be rotated twice then."""
    if tile["ROWS"] * tile["BLOCK_D"] <= _HELD or mixing["STEPS"] >= 0:
        return tile["ROWS"]
    return _HELD // 2 // tile["BLOCK_D"]


def columns_piece(tile: Constants) -> int:
    """Dims that quantize_columns holds at once."""
    held_whole = tile["ROWS"] * tile["BLOCK_D"] <= _HELD
    return tile["BLOCK_D"] if held_whole else _HELD // 2 // tile["ROWS"]


def launch_options(rows: int, dims: int, by_product: bool = False) -> dict[str, Any]:
    """Triton's options where ``rows`` x ``dims`` elements are held at once."""
    more = _BY_PRODUCT if by_product else 1
    # However few the rows, a product's matrix is read whole; and Triton 3.6 loses words that one
    # warp moves among its threads (quantize_columns of 16 keys).
    warps = max(4, rows * dims // (32 * _PER_THREAD * more))
    # Programs overlap, pieces needn't.
    return {"num_warps": warps, "num_stages": 1, "maxnreg": _REGISTERS * more}
