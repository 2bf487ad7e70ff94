# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""Quantisation to e4m3 in Triton: device code alone; quantize_triton.py launches it.

A plain module and not a template: there is nothing to search and no variant that a constexpr
couldn't say, and Triton's own launcher specialises what it is given.

A program takes one tile, ROWS rows of a head (all of a scale block, or of a shorter head). It holds
it in registers in fp32, or takes it in pieces: then it reads all but one of a tile that it needs
the maximum of twice, the second time from the caches. x is [batch, heads, seqlen, DIM] with any
strides.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["seed", "heads", "blocks", "group"])
def quantize_rows(
    x_ptr, out_ptr, descale_ptr, amax_ptr, matrix_ptr,
    stride_b, stride_h, stride_s, stride_d, stride_ob, stride_oh, stride_os, stride_od,
    normal, seed, heads, blocks, group, seqlen,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
    STEPS: tl.constexpr, BY_PRODUCT: tl.constexpr, ONE_PASS: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    # out: as x, at any strides. `normal`: what a rotation leaves out, 1 without one.
    # ONE_PASS: the tile is all that a scale serves. Else the scale is that of the largest magnitude
    # that largest_magnitudes found: PER_HEAD one for `group` heads, or one for all of x.
    # matrix: what a row is multiplied by where BY_PRODUCT, [DIM, DIM]. PIECE: rows that are held at
    # once.
    # The last tiles first: largest_magnitudes has just read them, they may still be in L2.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    block = tile % blocks
    batch, head = tile // blocks // heads, tile // blocks % heads
    start = block * ROWS
    from_ptr = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    to_ptr = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    dims = tl.arange(0, BLOCK_D)
    rows = start + tl.arange(0, PIECE)
    before = ROWS - PIECE
    # The last piece, or all of the tile, stays in x until the scale is known.
    x = tl.zeros([PIECE, BLOCK_D], tl.float32)
    amax = 0.0
    for piece in range(0 if ONE_PASS else before, ROWS, PIECE):
        x = load_rows(
            from_ptr, matrix_ptr, stride_s, stride_d, rows + piece, seqlen, seed,
            DIM, BLOCK_D, PIECE, STEPS, BY_PRODUCT,
        )  # fmt: skip
        if ONE_PASS:
            amax = tl.maximum(amax, largest_finite(x))
    if ONE_PASS:
        scale = scale_of(amax)
        tl.store(descale_ptr + tile, scale * normal)
    else:
        scale = known_scale(
            descale_ptr, amax_ptr, normal, tile, batch, head, block, heads, group, PER_HEAD
        )
    inverse = tl.math.div_rn(1.0, scale)
    store_rows(to_ptr, stride_os, stride_od, rows + before, dims, seqlen, x, inverse, DIM)
    for piece in range(0, before, PIECE):
        x = load_rows(
            from_ptr, matrix_ptr, stride_s, stride_d, rows + piece, seqlen, seed,
            DIM, BLOCK_D, PIECE, STEPS, BY_PRODUCT,
        )  # fmt: skip
        store_rows(to_ptr, stride_os, stride_od, rows + piece, dims, seqlen, x, inverse, DIM)


@triton.jit(do_not_specialize=["heads", "blocks"])
def quantize_columns(
    x_ptr, out_ptr, descale_ptr, amax_ptr,
    stride_b, stride_h, stride_s, stride_d, stride_ob, stride_oh, stride_od,
    heads, blocks, seqlen, padded,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr,
    ONE_PASS: tl.constexpr, PER_HEAD: tl.constexpr, PERMUTED: tl.constexpr,
):  # fmt: skip
    # out is transposed, [batch, heads, DIM, padded / 4], four keys in an int32 (strides count
    # these): what goes from one thread to another is words, and what is written 16 bytes. Keys from
    # seqlen on are zero. PIECE: dims that are held at once. The rest is as in quantize_rows.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    block = tile % blocks
    batch, head = tile // blocks // heads, tile // blocks % heads
    words = block * (ROWS // 4) + tl.arange(0, ROWS // 4)
    from_ptr = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    to_ptr = out_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    dims = tl.arange(0, PIECE)
    if PIECE == BLOCK_D:
        a, b, c, d = load_words(from_ptr, stride_s, stride_d, words, dims, seqlen, DIM, PERMUTED)
    if ONE_PASS:
        if PIECE == BLOCK_D:
            amax = tl.max(larger_of(a, b, c, d))
            if not amax < float("inf"):
                amax = tl.max(finite_of(a, b, c, d))
        else:
            top = tl.zeros([ROWS // 4], tl.float32)
            for piece in range(0, BLOCK_D, PIECE):
                a, b, c, d = load_words(
                    from_ptr, stride_s, stride_d, words, dims + piece, seqlen, DIM, PERMUTED
                )
                top = tl.maximum(top, tl.max(finite_of(a, b, c, d), 1))
            amax = tl.max(top)
        scale = scale_of(amax)
        tl.store(descale_ptr + tile, scale)
    else:
        scale = known_scale(
            descale_ptr, amax_ptr, 1.0, tile, batch, head, block, heads, 1, PER_HEAD
        )
    inverse = tl.math.div_rn(1.0, scale)
    for piece in range(0, BLOCK_D, PIECE):
        if PIECE < BLOCK_D:
            a, b, c, d = load_words(
                from_ptr, stride_s, stride_d, words, dims + piece, seqlen, DIM, PERMUTED
            )
        word = as_byte(to_e4m3(a, inverse)) | (as_byte(to_e4m3(b, inverse)) << 8)
        word |= as_byte(to_e4m3(c, inverse)) << 16
        word |= as_byte(to_e4m3(d, inverse)) << 24
        at = words[:, None] + (dims + piece).to(tl.int64)[None, :] * stride_od
        there = (words < padded // 4)[:, None] & (dims + piece < DIM)[None, :]
        tl.store(to_ptr + at, word, mask=there)


@triton.jit(do_not_specialize=["seed", "heads", "blocks", "group"])
def largest_magnitudes(
    x_ptr, amax_ptr, matrix_ptr, stride_b, stride_h, stride_s, stride_d,
    seed, heads, blocks, group, seqlen,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    BY_PRODUCT: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    # amax_ptr holds zeros, and is left with the bits of the largest finite |x|, rotated: those of
    # numbers >= 0 are in the numbers' order, and a maximum is the same in any order.
    tile = tl.program_id(0)
    block = tile % blocks
    batch, head = tile // blocks // heads, tile // blocks % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    from_ptr = x_ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    x = load_rows(
        from_ptr, matrix_ptr, stride_s, stride_d, rows, seqlen, seed,
        DIM, BLOCK_D, ROWS, STEPS, BY_PRODUCT,
    )  # fmt: skip
    amax = largest_finite(x)
    index = 0
    if PER_HEAD:
        index = batch * (heads // group) + head // group
    tl.atomic_max(amax_ptr + index, amax.to(tl.int32, bitcast=True), sem="relaxed")


@triton.jit
def load_rows(
    x_ptr, matrix_ptr, stride_s, stride_d, rows, seqlen, seed,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STEPS: tl.constexpr,
    BY_PRODUCT: tl.constexpr,
):  # fmt: skip
    # x[rows] in fp32, zero outside of the tensor. With STEPS >= 0 as autoflash.rotation.mix has it:
    # each 2^STEPS neighbours of a row are mixed; BY_PRODUCT with sums in the order of the matrix
    # unit, else in that of mix.
    dims = tl.arange(0, BLOCK_D)
    x = read(x_ptr, stride_s, stride_d, rows, dims, seqlen, DIM)
    if BY_PRODUCT:
        x = tl.dot(x, tl.load(matrix_ptr + dims[:, None] * DIM + dims[None, :]))
    else:
        x = x.to(tl.float32)
        if STEPS >= 0:
            x = x * sign_of(dims, seed)[None, :]
            sign = (1.0 - 2.0 * tl.arange(0, 2))[None, None, :, None]
            for step in tl.static_range(STEPS):
                # a + b, a - b in the places of each pair. The other of a pair is what is left of
                # the exclusive or of both: Triton reduces by shuffles within a warp, and the
                # compiler removes the rest. (tl.split would send each step through shared memory.)
                pairs = x.reshape(ROWS, BLOCK_D // (2 << step), 2, 1 << step)
                bits = pairs.to(tl.int32, bitcast=True)
                other = (tl.xor_sum(bits, 2, keep_dims=True) ^ bits).to(tl.float32, bitcast=True)
                x = (other + pairs * sign).reshape(ROWS, BLOCK_D)
    return x


@triton.jit
def read(x_ptr, stride_s, stride_d, rows, dims, seqlen, DIM: tl.constexpr):
    at = rows.to(tl.int64)[:, None] * stride_s + dims.to(tl.int64)[None, :] * stride_d
    return tl.load(x_ptr + at, mask=(rows < seqlen)[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def store_rows(to_ptr, stride_s, stride_d, rows, dims, seqlen, x, inverse, DIM: tl.constexpr):
    at = rows.to(tl.int64)[:, None] * stride_s + dims.to(tl.int64)[None, :] * stride_d
    there = (rows < seqlen)[:, None] & (dims < DIM)[None, :]
    tl.store(to_ptr + at, to_e4m3(x, inverse), mask=there)


@triton.jit
def load_words(
    x_ptr, stride_s, stride_d, words, dims, seqlen, DIM: tl.constexpr, PERMUTED: tl.constexpr
):
    # In fp32 what each byte of `words` is to hold, zero outside of the tensor.
    some = dims.to(tl.int64)[None, :] * stride_d
    inside = (dims < DIM)[None, :]
    if PERMUTED:
        # autoflash.fp8.key_order: word 4a + q holds the keys 16a + 2q + (0, 1, 8, 9).
        first = (words & -4) * 4 + (words & 3) * 2
        step = 6
    else:
        first = words * 4
        step = 0
    a = load_key(x_ptr, stride_s, some, first, inside, seqlen)
    b = load_key(x_ptr, stride_s, some, first + 1, inside, seqlen)
    c = load_key(x_ptr, stride_s, some, first + 2 + step, inside, seqlen)
    d = load_key(x_ptr, stride_s, some, first + 3 + step, inside, seqlen)
    return a, b, c, d


@triton.jit
def load_key(x_ptr, stride_s, some, rows, inside, seqlen):
    at = rows.to(tl.int64)[:, None] * stride_s + some
    return tl.load(x_ptr + at, mask=(rows < seqlen)[:, None] & inside, other=0.0).to(tl.float32)


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
        amax = tl.max(finite_magnitude(x))
    return amax


@triton.jit
def finite_magnitude(x):
    return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)


@triton.jit
def larger_of(a, b, c, d):
    # Maxima pass over NaN.
    return tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))


@triton.jit
def finite_of(a, b, c, d):
    return larger_of(
        finite_magnitude(a), finite_magnitude(b), finite_magnitude(c), finite_magnitude(d)
    )


@triton.jit
def known_scale(
    descale_ptr, amax_ptr, normal, tile, batch, head, block, heads, group, PER_HEAD: tl.constexpr
):
    # From what largest_magnitudes found; one program stores it.
    index = 0
    first = tile == 0
    if PER_HEAD:
        index = batch * (heads // group) + head // group
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
