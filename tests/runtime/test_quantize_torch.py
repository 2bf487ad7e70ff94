"""Quantisation in torch against Python's own numbers, an element at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.fp8 import key_order
from autoflash.rotation import rotate
from autoflash.runtime.quantize_torch import quantize_into, scale_of

FP8 = torch.float8_e4m3fn
E4M3 = [x for x in torch.arange(256, dtype=torch.uint8).view(FP8).tolist() if not math.isnan(x)]


def quantized(x, granularity="head", group=1, seed=None, permuted=False, rows=None):
    shape = (*x.shape[:2], x.shape[2] if rows is None else rows, x.shape[3])
    out = torch.empty(shape, dtype=FP8)
    return out, quantize_into(out, x, granularity, group, seed, permuted)


def nearest(value):
    """The e4m3 number nearest to ``value``, of two the one with an even mantissa."""
    best = min(abs(value - e) for e in E4M3)
    found = sorted({e for e in E4M3 if abs(value - e) == best})
    even = [e for e in found if int(torch.tensor(e).to(FP8).view(torch.uint8)) % 2 == 0]
    return found[0] if len(found) == 1 else even[0]


@settings(max_examples=40)
@given(
    granularity=st.sampled_from(("tensor", "head", "block")), rows=st.integers(1, 260),
    group=st.sampled_from((1, 2)), seed=st.integers(0, 1000),
)  # fmt: skip
def test_a_scale_is_the_largest_of_what_it_serves(granularity, rows, group, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 4, rows, 3, generator=generator)
    out, descale = quantized(x, granularity, group)
    for b in range(2):
        for h in range(4):
            if granularity == "tensor":
                served, scale = x, descale[0]
            elif granularity == "head":
                first = h // group * group
                served, scale = x[b, first : first + group], descale[b, h // group]
            for row in {0, rows // 2, rows - 1}:
                if granularity == "block":
                    start = row // 128 * 128
                    served, scale = x[b, h, start : start + 128], descale[b, h, row // 128]
                largest = served.abs().max().item()
                assert scale.item() == pytest.approx(largest / 448, rel=1e-6)
                for d in range(3):
                    got, true = out[b, h, row, d].double().item(), x[b, h, row, d].item()
                    assert got == nearest(true / scale.item())


def test_the_largest_becomes_448():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        x = torch.randn(1, 1, 5, 7, generator=generator) * 10 ** torch.randn(1, generator=generator)
        out, _ = quantized(x)
        assert out.float().abs().max() == 448


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_nan_and_scales_nothing(bad):
    x = torch.randn(1, 2, 140, 8)
    want, want_scale = quantized(x, "block")
    x[0, 1, 3, 5] = bad
    out, scale = quantized(x, "block")
    at = torch.zeros(x.shape, dtype=torch.bool)
    at[0, 1, 3, 5] = True
    assert torch.equal(out.float().isnan(), at)
    assert torch.equal(scale, want_scale)
    assert torch.equal(out.float()[~at], want.float()[~at])
    # Where it would have been the largest, the next one is.
    x[0, 1, 3] = bad
    out, scale = quantized(x, "head")
    assert scale[0, 1] == scale_of(x[0, 1].nan_to_num(0, 0, 0).abs().max())
    out, scale = quantized(torch.full((1, 1, 4, 4), bad))
    assert out.float().isnan().all()
    assert scale.item() == 1


def test_zeros_have_scale_one():
    x = torch.zeros(1, 2, 256, 4)
    x[0, 1, 200] = 2
    out, scale = quantized(x, "block")
    assert scale.tolist() == [[[1, 1], [1, pytest.approx(2 / 448)]]]
    assert out.float().abs().sum() == 4 * 448
    for rows in (0, 3):
        for granularity, shape in (("tensor", (1,)), ("head", (0, 2)), ("block", (0, 2, rows > 0))):
            _, scale = quantized(torch.zeros(0, 2, rows, 4), granularity)
            assert scale.shape == shape
    for granularity in ("tensor", "head", "block"):
        _, scale = quantized(torch.zeros(2, 2, 0, 4), granularity)
        assert (scale == 1).all()


@pytest.mark.parametrize("size", [1e-45, 1e-40, 1e-38, 1e-30, 1e30, 3e38])
def test_sizes_at_the_ends_of_fp32(size):
    x = torch.full((1, 1, 2, 4), size)
    out, scale = quantized(x)
    back = out.double() * scale.double()
    assert torch.isfinite(back).all()
    # What is smaller than the smallest scale's numbers is zero.
    assert ((back - x.double()).abs() <= x.double() * 2**-4 + 2.0**-120).all()


@pytest.mark.parametrize("permuted", [False, True])
def test_rows_behind_the_last_are_zero_and_keys_permuted(permuted):
    x = torch.randn(1, 2, 21, 5)
    plain, want_scale = quantized(x)
    out, scale = quantized(x, permuted=permuted, rows=32)
    assert torch.equal(scale, want_scale)
    for position, key in enumerate(key_order(32).tolist() if permuted else range(32)):
        row = out[:, :, position].float()
        assert torch.equal(row, plain[:, :, key].float() if key < 21 else torch.zeros(1, 2, 5))


@pytest.mark.parametrize("dim", [64, 96, 72, 63])
def test_a_rotation_comes_before_rounding(dim):
    x = torch.randn(1, 2, 130, dim)
    x[0, 0, 5, 7] = 60
    out, scale = quantized(x, "block", seed=9)
    back = out.double() * scale.double().repeat_interleave(128, 2)[:, :, :130, None]
    exact = rotate(x.double(), 9)
    largest = torch.stack(
        [exact[:, :, :128].abs().amax((2, 3)), exact[:, :, 128:].abs().amax((2, 3))]
    )
    assert torch.allclose(scale.double(), largest.permute(1, 2, 0) / 448, rtol=1e-5)
    assert ((back - exact).abs() <= exact.abs() * 2**-4 * 1.001 + scale.max() * 2**-10).all()
