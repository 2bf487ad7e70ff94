# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Quantisation to e4m3 of rotated tensors: quantize_kernels.py with autoflash.rotation.mix.

A row is taken in quarters, each a tensor of its own. Of the rounds of sums and differences those
between quarters, and between neighbours that one load brings, stay in a thread; the others are
shuffles within a warp. The order of additions is mix's: both give the same bits.
"""

import triton
import triton.language as tl

from autoflash.runtime.quantize_kernels import (
    known_scale,
    largest_of_four,
    place_of,
    raise_to,
    read,
    scale_of,
    to_e4m3,
    write,
)


@triton.jit(do_not_specialize=["heads", "blocks", "group", "tiles"])
def quantize_rotated(
    x_ptr, out_ptr, descale_ptr, amax_ptr, signs_ptr,
    stride_b, stride_h, stride_s, stride_d, stride_ob, stride_oh, stride_os, stride_od,
    normal, heads, blocks, group, seqlen, tiles,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    ONE_PASS: tl.constexpr, PER_HEAD: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    # quantize_kernels.quantize_rows, with each 2^STEPS neighbours of a row mixed. `normal` is the
    # factor that this leaves out. AHEAD: a program takes several tiles, and loads one while it has
    # another.
    tile = tiles - 1 - tl.program_id(0)
    a, b, c, d = load_quarters(
        x_ptr, stride_b, stride_h, stride_s, stride_d, tile, heads, blocks, seqlen,
        DIM, BLOCK_D, ROWS,
    )  # fmt: skip
    if AHEAD:
        while tile >= 0:
            later = tile - tl.num_programs(0)
            # Before the first there is none: a row of no tensor.
            e, f, g, h = load_quarters(
                x_ptr, stride_b, stride_h, stride_s, stride_d, tl.maximum(later, 0), heads, blocks,
                tl.where(later < 0, 0, seqlen), DIM, BLOCK_D, ROWS,
            )  # fmt: skip
            round_quarters(
                a, b, c, d, out_ptr, descale_ptr, amax_ptr, signs_ptr,
                stride_ob, stride_oh, stride_os, stride_od, normal, tile, heads, blocks, group,
                seqlen, DIM, BLOCK_D, ROWS, STEPS, ONE_PASS, PER_HEAD,
            )  # fmt: skip
            a, b, c, d = e, f, g, h
            tile = later
    else:
        round_quarters(
            a, b, c, d, out_ptr, descale_ptr, amax_ptr, signs_ptr,
            stride_ob, stride_oh, stride_os, stride_od, normal, tile, heads, blocks, group, seqlen,
            DIM, BLOCK_D, ROWS, STEPS, ONE_PASS, PER_HEAD,
        )  # fmt: skip


@triton.jit(do_not_specialize=["heads", "blocks", "group"])
def largest_rotated(
    x_ptr, amax_ptr, signs_ptr, stride_b, stride_h, stride_s, stride_d,
    heads, blocks, group, seqlen,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    # quantize_kernels.largest_magnitudes of what quantize_rotated mixes.
    tile = tl.program_id(0)
    a, b, c, d = load_quarters(
        x_ptr, stride_b, stride_h, stride_s, stride_d, tile, heads, blocks, seqlen,
        DIM, BLOCK_D, ROWS,
    )  # fmt: skip
    a, b, c, d = mix(a, b, c, d, signs_ptr, DIM, BLOCK_D, ROWS, STEPS)
    batch, head, _ = place_of(tile, heads, blocks)
    raise_to(amax_ptr, largest_of_four(a, b, c, d, 0), batch, head, heads, group, PER_HEAD)


@triton.jit
def load_quarters(
    x_ptr, stride_b, stride_h, stride_s, stride_d, tile, heads, blocks, seqlen,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    batch, head, block = place_of(tile, heads, blocks)
    x_ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    rows = block * ROWS + tl.arange(0, ROWS)
    QUARTER: tl.constexpr = BLOCK_D // 4
    dims = tl.arange(0, QUARTER)
    a = read(x_ptr, stride_s, stride_d, rows, dims, seqlen, DIM)
    b = read(x_ptr, stride_s, stride_d, rows, dims + QUARTER, seqlen, DIM)
    c = read(x_ptr, stride_s, stride_d, rows, dims + 2 * QUARTER, seqlen, DIM)
    d = read(x_ptr, stride_s, stride_d, rows, dims + 3 * QUARTER, seqlen, DIM)
    return a, b, c, d


@triton.jit
def round_quarters(
    a, b, c, d, out_ptr, descale_ptr, amax_ptr, signs_ptr, stride_b, stride_h, stride_s, stride_d,
    normal, tile, heads, blocks, group, seqlen,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    ONE_PASS: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    batch, head, block = place_of(tile, heads, blocks)
    a, b, c, d = mix(a, b, c, d, signs_ptr, DIM, BLOCK_D, ROWS, STEPS)
    if ONE_PASS:
        scale = scale_of(largest_of_four(a, b, c, d, 0))
        tl.store(descale_ptr + tile, scale * normal)
    else:
        scale = known_scale(
            descale_ptr, amax_ptr, normal, tile, batch, head, block, heads, group, PER_HEAD
        )
    inverse = tl.math.div_rn(1.0, scale)
    out_ptr += batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    rows = block * ROWS + tl.arange(0, ROWS)
    QUARTER: tl.constexpr = BLOCK_D // 4
    dims = tl.arange(0, QUARTER)
    a, b, c, d = to_e4m3(a, inverse), to_e4m3(b, inverse), to_e4m3(c, inverse), to_e4m3(d, inverse)
    write(out_ptr, stride_s, stride_d, rows, dims, seqlen, a, DIM)
    write(out_ptr, stride_s, stride_d, rows, dims + QUARTER, seqlen, b, DIM)
    write(out_ptr, stride_s, stride_d, rows, dims + 2 * QUARTER, seqlen, c, DIM)
    write(out_ptr, stride_s, stride_d, rows, dims + 3 * QUARTER, seqlen, d, DIM)


@triton.jit
def mix(
    a, b, c, d, signs_ptr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    # Rows of four quarters as loaded, rotated in fp32, without the factor.
    QUARTER: tl.constexpr = BLOCK_D // 4
    a = mix_quarter(a, signs_ptr, 0, DIM, QUARTER, ROWS, STEPS)
    b = mix_quarter(b, signs_ptr, 1, DIM, QUARTER, ROWS, STEPS)
    c = mix_quarter(c, signs_ptr, 2, DIM, QUARTER, ROWS, STEPS)
    d = mix_quarter(d, signs_ptr, 3, DIM, QUARTER, ROWS, STEPS)
    if (1 << STEPS) > QUARTER:
        a, b, c, d = a + b, a - b, c + d, c - d
    if (1 << STEPS) > 2 * QUARTER:
        a, b, c, d = a + c, b + d, a - c, b - d
    return a, b, c, d


@triton.jit
def mix_quarter(
    x, signs_ptr, index, DIM: tl.constexpr, QUARTER: tl.constexpr, ROWS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    # signs: for each dim 0, or of a 16-bit number the sign bit alone.
    dims = index * QUARTER + tl.arange(0, QUARTER)
    flip = tl.load(signs_ptr + dims, mask=dims < DIM, other=0)[None, :]
    if x.dtype.primitive_bitwidth == 16:
        x = (x.to(tl.int16, bitcast=True) ^ flip).to(x.dtype, bitcast=True).to(tl.float32)
    else:
        bits = x.to(tl.int32, bitcast=True) ^ (flip.to(tl.int32) << 16)
        x = bits.to(tl.float32, bitcast=True)
    sign = (1.0 - 2.0 * tl.arange(0, 2))[None, None, :, None]
    for step in tl.static_range(STEPS):
        if (2 << step) <= QUARTER:
            # a + b, a - b in the places of each pair. The other of a pair is what is left of the
            # exclusive or of both: Triton reduces by shuffles within a warp, and the compiler
            # removes the rest. (tl.split would send each step through shared memory.)
            pairs = x.reshape(ROWS, QUARTER // (2 << step), 2, 1 << step)
            bits = pairs.to(tl.int32, bitcast=True)
            other = (tl.xor_sum(bits, 2, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
            x = (other + pairs * sign).reshape(ROWS, QUARTER)
    return x
