"""Strides, alignment, and the shape of out: what a variant may assume about its tensors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.kernels.kernel import Access
from autoflash.problem import Problem
from autoflash.runtime.inputs import (
    access_of,
    check_tensors,
    has_contiguous_rows,
    lse_shape,
    output_like,
    problem_of,
    strides_of,
)

GOOD = Access(aligned=True, tma=True)
ALIGNED_ONLY = Access(aligned=True, tma=False)
NEITHER = Access(aligned=False, tma=False)


def half(*shape, offset=0, strides=None):
    """A float16 tensor whose base lies ``offset`` elements after a multiple of 64 bytes."""
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    extent = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1
    buffer = torch.zeros(extent + 32, dtype=torch.float16)
    start = -buffer.data_ptr() % 64 // 2 + offset
    return buffer.as_strided(shape, strides, start)


def access(bshd=False, **changes):
    """The access of four good tensors, but for ``changes``."""
    shape = (2, 8, 4, 64) if bshd else (2, 4, 8, 64)
    tensors = {name: half(*shape) for name in ("q", "k", "v", "out")}
    return access_of({**tensors, **changes}.values(), bshd)


# --- strides


@pytest.mark.parametrize(
    ("shape", "bshd", "expected"),
    [
        ((2, 4, 8, 64), False, (2048, 512, 64)),
        ((2, 8, 4, 64), True, (2048, 64, 256)),
        ((1, 4, 8, 64), False, (0, 512, 64)),
        ((2, 1, 8, 64), False, (512, 0, 64)),
        ((2, 4, 1, 64), False, (256, 64, 0)),
        ((2, 8, 1, 64), True, (512, 0, 64)),
        ((2, 1, 4, 64), True, (256, 64, 0)),
        ((1, 1, 1, 64), False, (0, 0, 0)),
    ],
)
def test_strides_of(shape, bshd, expected):
    assert strides_of(torch.empty(shape), bshd) == expected


def test_strides_of_views():
    x = torch.empty(2, 8, 4, 64)
    assert strides_of(x.transpose(1, 2), False) == strides_of(x, True) == (2048, 64, 256)
    assert strides_of(x[:, ::2], False) == (2048, 512, 64)
    assert strides_of(x[:, :1].expand(-1, 8, -1, -1), False) == (2048, 0, 64)


def test_the_stride_of_a_size_of_one_is_not_used():
    odd = torch.empty_strided((1, 4, 1, 64), (7, 64, 3, 1))
    assert strides_of(odd, False) == (0, 64, 0)


# --- access


@pytest.mark.parametrize("bshd", [False, True])
def test_contiguous_rows_of_16_bytes(bshd):
    assert access(bshd) == GOOD


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(("offset", "expected"), [(1, NEITHER), (4, NEITHER), (8, GOOD)])
def test_the_base_address(name, offset, expected):
    assert access(**{name: half(2, 4, 8, 64, offset=offset)}) == expected


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ((4096, 1024, 72, 1), GOOD),
        ((4096, 1024, 65, 1), NEITHER),
        ((4096, 1028, 64, 1), NEITHER),
        ((4097, 1024, 64, 1), NEITHER),
    ],
)
def test_every_stride_counts(name, strides, expected):
    assert access(**{name: half(2, 4, 8, 64, strides=strides)}) == expected


@pytest.mark.parametrize("dim", [63, 68, 2])
def test_rows_of_other_lengths(dim):
    assert access(v=half(2, 4, 8, dim)) == NEITHER


def test_rows_of_40_bytes_that_lie_48_apart():
    assert access(v=half(2, 4, 8, 20, strides=(768, 192, 24, 1))) == GOOD


@pytest.mark.parametrize("dimension", [0, 1, 2])
def test_an_expanded_dimension_suits_pointers_only(dimension):
    strides = [2048, 512, 64, 1]
    strides[dimension] = 0
    assert access(k=half(2, 4, 8, 64, strides=strides)) == ALIGNED_ONLY


@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize("stride", [0, 3, 1 << 50])
def test_a_size_of_one_may_have_any_stride(dimension, stride):
    shape, strides = [2, 4, 8, 64], [2048, 512, 64, 1]
    shape[dimension], strides[dimension] = 1, stride
    assert access(k=half(*shape, strides=strides)) == GOOD


@pytest.mark.parametrize(
    ("stride", "expected"), [((1 << 39) - 8, GOOD), (1 << 39, ALIGNED_ONLY)], ids=str
)
def test_the_copy_engine_takes_strides_below_2_to_the_40_bytes(stride, expected):
    far = torch.empty_strided((2, 4, 8, 64), (stride, 512, 64, 1), dtype=torch.float16,
                              device="meta")  # fmt: skip
    assert far.data_ptr() == 0
    assert access(k=far) == expected


def test_fp32_strides_count_in_bytes():
    x = torch.zeros(2, 4, 8, 68)[..., :64]
    assert x.data_ptr() % 16 == 0
    assert access_of((x, x, x, x), bshd=False) == GOOD


@given(
    offset=st.integers(0, 16), row=st.integers(64, 80), head=st.integers(700, 720),
    rows=st.integers(1, 8), heads=st.integers(1, 4),
)  # fmt: skip
def test_aligned_means_that_every_row_starts_at_a_multiple_of_16(offset, row, head, rows, heads):
    x = half(1, heads, rows, 64, offset=offset, strides=(10_000, head, row, 1))
    starts = [x[0, h, r].data_ptr() for h in range(heads) for r in range(rows)]
    aligned = all(start % 16 == 0 for start in starts)
    assert access(k=x) == Access(aligned=aligned, tma=aligned)


# --- problems


@pytest.mark.parametrize("bshd", [False, True])
def test_problem_of(bshd):
    q, k, v = torch.zeros(2, 6, 5, 32), torch.zeros(2, 3, 7, 32), torch.zeros(2, 3, 7, 16)
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    if bshd:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    assert problem_of(q, k, v, causal=True, bshd=bshd) == Problem(
        batch=2, heads=6, kv_heads=3, seqlen_q=5, seqlen_k=7, head_dim=32, head_dim_v=16,
        dtype="bfloat16", causal=True,
    )  # fmt: skip


# --- out


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        # heads outside of rows in q, so in out.
        ((640, 160, 32, 1), (320, 80, 16, 1)),
        ((640, 32, 128, 1), (320, 16, 64, 1)),
        ((9999, 32, 640, 1), (320, 16, 64, 1)),
        ((640, 0, 32, 1), (320, 16, 64, 1)),
    ],
)
def test_output_strides(strides, expected):
    q = torch.empty_strided((2, 4, 5, 32), strides)
    v = torch.zeros(2, 4, 5, 16)
    out = output_like(q, v)
    assert (out.shape, out.stride(), out.dtype) == ((2, 4, 5, 16), expected, torch.float32)


@given(
    order=st.permutations([0, 1, 2]), sizes=st.tuples(*[st.integers(1, 4)] * 3),
    dim_v=st.integers(1, 4),
)  # fmt: skip
def test_out_is_always_dense(order, sizes, dim_v):
    q = torch.empty(*(sizes[i] for i in order), 8).permute(*(order.index(i) for i in range(3)), 3)
    assert q.shape[:3] == sizes
    out = output_like(q, torch.empty(*sizes, dim_v))
    assert out.shape == (*sizes, dim_v)
    assert torch.unique(offsets(out)).numel() == out.numel()
    assert offsets(out).max().item() == out.numel() - 1


def offsets(x):
    """The offset of each element in memory."""
    grids = torch.meshgrid(*(torch.arange(n) for n in x.shape), indexing="ij")
    return sum(grid * stride for grid, stride in zip(grids, x.stride(), strict=True))


def test_out_can_be_made_of_nothing():
    q = torch.empty(2, 4, 5, 32, dtype=torch.bfloat16).transpose(1, 2)
    real, shadow = output_like(q, q), output_like(q, q, "meta")
    assert (shadow.device.type, shadow.dtype) == ("meta", torch.bfloat16)
    assert (shadow.shape, shadow.stride()) == (real.shape, real.stride())


@pytest.mark.parametrize(
    ("strides", "dim", "expected"),
    [((64, 32, 8, 1), 8, True), ((64, 32, 8, 2), 4, False), ((64, 32, 8, 0), 4, False),
     ((64, 32, 8, 8), 1, True)],
)  # fmt: skip
def test_has_contiguous_rows(strides, dim, expected):
    assert has_contiguous_rows(torch.empty_strided((2, 2, 4, dim), strides)) is expected


@pytest.mark.parametrize(("bshd", "expected"), [(False, (2, 4, 5)), (True, (2, 5, 4))])
def test_lse_shape(bshd, expected):
    assert lse_shape(torch.empty(2, 4, 5, 32), bshd) == expected


# --- checks (the messages that a caller sees are tested in test_api.py)


def test_good_tensors_pass():
    q, k, v = torch.zeros(2, 6, 5, 256), torch.zeros(2, 3, 7, 256), torch.zeros(2, 3, 7, 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert check_tensors(q.to(dtype), k.to(dtype), v.to(dtype), False) is None
    assert check_tensors(*(x.transpose(1, 2) for x in (q, k, v)), True) is None
    assert check_tensors(q[:0], k[:0], v[:0], False) is None
    assert check_tensors(q[:, :, :0], k[:, :, :0], v[:, :, :0], False) is None


def test_the_layout_decides_what_are_heads():
    q, k = torch.zeros(2, 6, 5, 8), torch.zeros(2, 3, 5, 8)
    assert check_tensors(q, k, k, False) is None
    with pytest.raises(InvalidInputError, match=r"^k .* and v .* must agree in heads and seqlen$"):
        check_tensors(q, k, k[:, :, :4], True)
    # 5 heads and 5 kv heads: different lengths are fine.
    assert check_tensors(q, k, k, True) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gpu_takes_16_bits_only(dtype):
    class OnGpu:
        """As much of a CUDA tensor as is looked at."""

        def __init__(self, x):
            self.x, self.device = x, torch.device("cuda", 0)

        def __getattr__(self, name):
            return getattr(self.x, name)

    q, k, v = (OnGpu(torch.zeros(1, 2, 3, 8, dtype=dtype)) for _ in range(3))
    with pytest.raises(UnsupportedError) as caught:
        check_tensors(q, k, v, False)
    assert str(caught.value) == (
        f"{dtype} is not served on a GPU: convert to torch.float16 or torch.bfloat16"
    )
    q, k, v = (OnGpu(torch.zeros(1, 2, 3, 8, dtype=torch.float16)) for _ in range(3))
    assert check_tensors(q, k, v, False) is None
