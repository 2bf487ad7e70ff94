# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Quantisation to e4m3 in Triton: device code alone; quantize_triton.py launches it.

A plain module and not a template: there is nothing to search and no variant that a constexpr
couldn't say, and Triton's own launcher specialises what it is given.

A program takes one tile, ROWS rows of a head (all of a scale block, or of a shorter head), which it
holds in registers in fp32. x is [batch, heads, seqlen, DIM] with any strides.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seed", "heads", "blocks", "group"])
def quantize_tiles(
    x_ptr, out_ptr, descale_ptr, amax_ptr,
    stride_b, stride_h, stride_s, stride_d, stride_ob, stride_oh, stride_os, stride_od,
    normal, seed, heads, blocks, group, seqlen, padded,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    ONE_PASS: tl.constexpr, PER_HEAD: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    # `normal`: what a rotation leaves out, 1 without one.
    # ONE_PASS: the tile is all that a scale serves. Else the scale is that of the largest magnitude
    # that largest_magnitudes found: PER_HEAD one for `group` heads, or one for all of x.
    # out has rows and dims at any strides; rows from seqlen to `padded` are zero.
    # The last tiles first: largest_magnitudes has just read them, they may still be in L2.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    block = tile % blocks
    batch, head = tile // blocks // heads, tile // blocks % heads
    positions = block * ROWS + tl.arange(0, ROWS)
    rows = positions
    if PERMUTED:
        # autoflash.fp8.key_order: whole rows change places while they are loaded, which is free.
        rows = (rows & -16) | ((rows & 2) << 2) | ((rows & 12) >> 1) | (rows & 1)
    x = load_tile(
        x_ptr, stride_b, stride_h, stride_s, stride_d, batch, head, rows, seqlen, seed,
        DIM, BLOCK_D, ROWS, STEPS,
    )  # fmt: skip
    if ONE_PASS:
        scale = scale_of(largest_finite(x))
        tl.store(descale_ptr + tile, scale * normal)
    else:
        index = 0
        first = tile == 0
        if PER_HEAD:
            index = batch * (heads // group) + head // group
            first = (block == 0) & (head % group == 0)
        scale = scale_of(tl.load(amax_ptr + index).to(tl.float32, bitcast=True))
        tl.store(descale_ptr + index, scale * normal, mask=first)
    y = x * tl.math.div_rn(1.0, scale)
    # The cast makes 448 of all that is more, as of the largest where it was rounded up; an infinity
    # becomes NaN before (0 * inf + inf), all else stays.
    y = tl.fma(y, 0.0, y)
    dims = tl.arange(0, BLOCK_D)
    start = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    at = positions.to(tl.int64)[:, None] * stride_os + dims.to(tl.int64)[None, :] * stride_od
    there = (positions < padded)[:, None] & (dims < DIM)[None, :]
    tl.store(start + at, y.to(tl.float8e4nv), mask=there)


@triton.jit(do_not_specialize=["seed", "heads", "blocks", "group"])
def largest_magnitudes(
    x_ptr, amax_ptr, stride_b, stride_h, stride_s, stride_d,
    seed, heads, blocks, group, seqlen,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    # amax_ptr holds zeros, and is left with the bits of the largest finite |x|, rotated: those of
    # numbers >= 0 are in the numbers' order, and a maximum is the same in any order.
    tile = tl.program_id(0)
    block = tile % blocks
    batch, head = tile // blocks // heads, tile // blocks % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    x = load_tile(
        x_ptr, stride_b, stride_h, stride_s, stride_d, batch, head, rows, seqlen, seed,
        DIM, BLOCK_D, ROWS, STEPS,
    )  # fmt: skip
    amax = largest_finite(x)
    index = 0
    if PER_HEAD:
        index = batch * (heads // group) + head // group
    tl.atomic_max(amax_ptr + index, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def load_tile(
    x_ptr, stride_b, stride_h, stride_s, stride_d, batch, head, rows, seqlen, seed,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    # x[rows] in fp32, zero outside of the tensor. With STEPS >= 0 as autoflash.rotation.mix has it:
    # each 2^STEPS neighbours of a row are mixed, in the same order of additions.
    dims = tl.arange(0, BLOCK_D)
    start = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    at = rows.to(tl.int64)[:, None] * stride_s + dims.to(tl.int64)[None, :] * stride_d
    there = (rows < seqlen)[:, None] & (dims < DIM)[None, :]
    x = tl.load(start + at, mask=there, other=0.0).to(tl.float32)
    if STEPS >= 0:
        x = x * sign_of(dims, seed)[None, :]
        sign = (1.0 - 2.0 * tl.arange(0, 2))[None, None, :, None]
        for step in tl.static_range(STEPS):
            # a + b, a - b in the places of each pair. The other of a pair is what is left of the
            # exclusive or of both: Triton reduces by shuffles within a warp, and the compiler
            # removes the rest. (tl.split would send each step through shared memory.)
            pairs = x.reshape(ROWS, BLOCK_D // (2 << step), 2, 1 << step)
            bits = pairs.to(tl.int32, bitcast=True)
            other = (tl.xor_sum(bits, 2, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
            x = (other + pairs * sign).reshape(ROWS, BLOCK_D)
    return x


@triton.jit
def sign_of(dims, seed):
    # 1 or -1 by the lowest bit of autoflash.rotation.sign_hash.
    h = dims.to(tl.uint32) * 0x9E3779B9 + seed.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return 1.0 - 2.0 * ((h ^ (h >> 16)) & 1).to(tl.float32)


@triton.jit
def largest_finite(x):
    amax = tl.max(tl.abs(x))
    if not amax < float("inf"):
        # Rare enough that the others shouldn't pay for it.
        amax = tl.max(tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0))
    return amax


@triton.jit
def scale_of(amax):
    # autoflash.runtime.quantize_torch.scale_of
    return tl.where(amax > 0, tl.maximum(amax * (1 / 448), 2.0**-110), 1.0)
