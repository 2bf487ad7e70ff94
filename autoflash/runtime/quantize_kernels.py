# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Quantisation to e4m3 in Triton: device code alone; quantize_triton.py launches it, and
quantize_rotated.py has what rotates.

Plain modules and not templates: there is nothing to search and no variant that a constexpr
couldn't say, and Triton's own launcher specialises what it is given.

A program takes one tile, ROWS rows of a head, all of a scale block or of a shorter head. x is
[batch, heads, seqlen, DIM] with any strides.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["heads", "blocks", "group", "nothing"])
def quantize_rows(
    x_ptr, out_ptr, descale_ptr, amax_ptr,
    stride_b, stride_h, stride_s, stride_d, stride_ob, stride_oh, stride_os, stride_od,
    heads, blocks, group, seqlen, nothing,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, ONE_PASS: tl.constexpr,
    PER_HEAD: tl.constexpr,
):  # fmt: skip
    # out: as x, at any strides. ONE_PASS: the tile is all that a scale serves. Else the scale is
    # that of the largest magnitude that largest_magnitudes found: PER_HEAD one for `group` heads,
    # or one for all of x. `nothing` is 0.
    # The last tiles first: largest_magnitudes has just read them, they may still be in L2.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head, block = place_of(tile, heads, blocks)
    from_ptr = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    to_ptr = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    rows = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    x = read(from_ptr, stride_s, stride_d, rows, dims, seqlen, DIM)
    if ONE_PASS:
        scale = scale_of(largest_finite(x, nothing))
        tl.store(descale_ptr + tile, scale)
    else:
        scale = known_scale(
            descale_ptr, amax_ptr, 1.0, tile, batch, head, block, heads, group, PER_HEAD
        )
    inverse = tl.math.div_rn(1.0, scale)
    y = to_e4m3(once_more(x, nothing), inverse)
    write(to_ptr, stride_os, stride_od, rows, dims, seqlen, y, DIM)


@triton.jit(do_not_specialize=["heads", "blocks", "nothing"])
def quantize_columns(
    x_ptr, out_ptr, descale_ptr, amax_ptr,
    stride_b, stride_h, stride_s, stride_d, stride_ob, stride_oh, stride_od,
    heads, blocks, seqlen, padded, nothing,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    ONE_PASS: tl.constexpr, PER_HEAD: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    # out is transposed, [batch, heads, DIM, padded / 4], four keys in an int32 (strides count
    # these): what goes from one thread to another is words, and what is written 16 bytes. Keys from
    # seqlen on are zero. The rest is as in quantize_rows.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head, block = place_of(tile, heads, blocks)
    words = block * (ROWS // 4) + tl.arange(0, ROWS // 4)
    from_ptr = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    to_ptr = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    dims = tl.arange(0, BLOCK_D)
    if PERMUTED:
        # autoflash.fp8.key_order: word 4a + q holds the keys 16a + 2q + (0, 1, 8, 9).
        first = (words & -4) * 4 + (words & 3) * 2
        step = 6
    else:
        first = words * 4
        step = 0
    a = read(from_ptr, stride_s, stride_d, first, dims, seqlen, DIM)
    b = read(from_ptr, stride_s, stride_d, first + 1, dims, seqlen, DIM)
    c = read(from_ptr, stride_s, stride_d, first + 2 + step, dims, seqlen, DIM)
    d = read(from_ptr, stride_s, stride_d, first + 3 + step, dims, seqlen, DIM)
    if ONE_PASS:
        scale = scale_of(largest_of_four(a, b, c, d, nothing))
        tl.store(descale_ptr + tile, scale)
    else:
        scale = known_scale(
            descale_ptr, amax_ptr, 1.0, tile, batch, head, block, heads, 1, PER_HEAD
        )
    inverse = tl.math.div_rn(1.0, scale)
    word = as_byte(to_e4m3(once_more(a, nothing), inverse))
    word |= as_byte(to_e4m3(once_more(b, nothing), inverse)) << 8
    word |= as_byte(to_e4m3(once_more(c, nothing), inverse)) << 16
    word |= as_byte(to_e4m3(once_more(d, nothing), inverse)) << 24
    at = words[:, None] + dims.to(tl.int64)[None, :] * stride_od
    tl.store(to_ptr + at, word, mask=(words < padded // 4)[:, None] & (dims < DIM)[None, :])


@triton.jit(do_not_specialize=["heads", "blocks", "group"])
def largest_magnitudes(
    x_ptr, amax_ptr, stride_b, stride_h, stride_s, stride_d, heads, blocks, group, seqlen,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    # amax_ptr holds zeros, and is left with the bits of the largest finite |x|.
    tile = tl.program_id(0)
    batch, head, block = place_of(tile, heads, blocks)
    from_ptr = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    rows = block * ROWS + tl.arange(0, ROWS)
    x = read(from_ptr, stride_s, stride_d, rows, tl.arange(0, BLOCK_D), seqlen, DIM)
    amax = largest_finite(x.to(tl.float32), 0)
    raise_to(amax_ptr, amax, batch, head, heads, group, PER_HEAD)


@triton.jit
def place_of(tile, heads, blocks):
    # Batch, head and the head's block of rows.
    return tile // blocks // heads, tile // blocks % heads, tile % blocks


@triton.jit
def read(x_ptr, stride_s, stride_d, rows, dims, seqlen, DIM: tl.constexpr):
    # x[rows, dims], zero outside of the tensor.
    at = rows.to(tl.int64)[:, None] * stride_s + dims.to(tl.int64)[None, :] * stride_d
    return tl.load(x_ptr + at, mask=(rows < seqlen)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def write(x_ptr, stride_s, stride_d, rows, dims, seqlen, x, DIM: tl.constexpr):
    at = rows.to(tl.int64)[:, None] * stride_s + dims.to(tl.int64)[None, :] * stride_d
    tl.store(x_ptr + at, x, mask=(rows < seqlen)[:, None] & (dims < DIM)[None, :])


@triton.jit
def once_more(x, nothing):
    # x in fp32, by instructions of its own: `nothing` is 0, but the compiler doesn't know it. So x
    # is held as it was loaded until the scale is known, and not in fp32: of 16 bits half the
    # registers.
    if x.dtype.primitive_bitwidth == 16:
        bits = x.to(tl.int16, bitcast=True) ^ nothing.to(tl.int16)
        x = bits.to(x.dtype, bitcast=True).to(tl.float32)
    return x


@triton.jit
def largest_finite(x, nothing):
    # Maxima pass over NaN. Infinities are rare enough that the others shouldn't pay for them.
    amax = tl.max(tl.abs(x.to(tl.float32)))
    if not amax < float("inf"):
        amax = tl.max(finite_magnitude(once_more(x, nothing)))
    return amax


@triton.jit
def largest_of_four(a, b, c, d, nothing):
    # The same of four tensors.
    amax = tl.max(larger_of(a.to(tl.float32), b.to(tl.float32), c.to(tl.float32), d.to(tl.float32)))
    if not amax < float("inf"):
        amax = tl.max(
            finite_of(
                once_more(a, nothing), once_more(b, nothing), once_more(c, nothing),
                once_more(d, nothing),
            )
        )  # fmt: skip
    return amax


@triton.jit
def finite_magnitude(x):
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)


@triton.jit
def larger_of(a, b, c, d):
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def finite_of(a, b, c, d):
    return larger_of(
        finite_magnitude(a), finite_magnitude(b), finite_magnitude(c), finite_magnitude(d)
    )


@triton.jit
def scale_index(batch, head, heads, group, PER_HEAD: tl.constexpr):
    index = 0
    if PER_HEAD:
        index = batch * (heads // group) + head // group
    return index


@triton.jit
def raise_to(amax_ptr, amax, batch, head, heads, group, PER_HEAD: tl.constexpr):
    # The bits of numbers >= 0 are in the numbers' order, and a maximum is the same in any order.
    index = scale_index(batch, head, heads, group, PER_HEAD)
    tl.atomic_max(amax_ptr + index, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def known_scale(
    descale_ptr, amax_ptr, normal, tile, batch, head, block, heads, group, PER_HEAD: tl.constexpr
):
    # From what largest_magnitudes found; one program stores it.
    index = scale_index(batch, head, heads, group, PER_HEAD)
    first = tile == 0
    if PER_HEAD:
        first = (block == 0) & (head % group == 0)
    scale = scale_of(tl.load(amax_ptr + index).to(tl.float32, bitcast=True))
    tl.store(descale_ptr + index, scale * normal, mask=first)
    return scale


@triton.jit
def scale_of(amax):
    # autoflash.runtime.quantize_torch.scale_of
    return tl.where(amax > 0, tl.maximum(amax * (1 / 448), 2.0**-110), 1.0)


@triton.jit
def to_e4m3(x, inverse):
    # The cast makes 448 of all that is more, as of the largest where it was rounded up; an infinity
    # becomes NaN before (0 * inf + inf), all else stays.
    y = x * inverse
    return tl.fma(y, 0.0, y).to(tl.float8e4nv)


@triton.jit
def as_byte(x):
    return x.to(tl.uint8, bitcast=True).to(tl.int32)
