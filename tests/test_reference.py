"""The reference against a formula that shares nothing with it, and against autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash import reference
from autoflash.reference import (
    attention_backward,
    attention_forward,
    error_allowance,
    exact_attention,
    plain_attention,
)

# (batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v)
SHAPES = [
    (2, 4, 4, 5, 5, 8, 8),
    (1, 6, 2, 7, 11, 16, 4),
    (2, 6, 2, 11, 7, 4, 16),
    (1, 2, 1, 1, 9, 3, 5),
    (1, 4, 1, 9, 1, 8, 8),
]


def inputs(shape, dtype=torch.float64, seed=0):
    b, h, hk, sq, sk, d, dv = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((b, h, sq, d), (b, hk, sk, d), (b, hk, sk, dv))
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def dense(q, k, v, causal, scale):
    """out and LSE, a row at a time over the keys that it sees; differentiable."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    outs, lses = [], []
    for i in range(q.shape[2]):
        seen = i + k.shape[2] - q.shape[2] + 1 if causal else k.shape[2]
        seen = max(0, seen)
        scores = (q[:, :, i : i + 1] * k[:, :, :seen]).sum(-1) * scale
        top = scores.amax(-1, keepdim=True).detach() if seen else scores.new_zeros(1)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if seen:
            outs.append(((weights / total).unsqueeze(-1) * v[:, :, :seen]).sum(2))
            lses.append((top + torch.log(total)).squeeze(-1))
        else:
            outs.append(v.new_zeros(*q.shape[:2], v.shape[3]))
            lses.append(v.new_full(q.shape[:2], -math.inf))
    return torch.stack(outs, 2), torch.stack(lses, 2)


def gradients(q, k, v, dout, dlse, causal, scale):
    """dq, dk and dv of sum(dout * out) + sum(dlse * lse), by autograd through ``dense``."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, causal, scale)
    loss = (out * dout).sum()
    if dlse is not None:
        loss = loss + torch.where(lse == -math.inf, 0.0, lse * dlse).sum()
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def assert_close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [0.3, -0.7, 0.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_forward(shape, causal, scale):
    q, k, v = inputs(shape)
    out, lse = attention_forward(q, k, v, causal=causal, scale=scale)
    expected_out, expected_lse = dense(q, k, v, causal, scale)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


def test_forward_by_hand():
    q = torch.tensor([[1.0, 0.0]], dtype=torch.float64).view(1, 1, 1, 2)
    k = torch.tensor([[0.0, 5.0], [math.log(3), 7.0]], dtype=torch.float64).view(1, 1, 2, 2)
    v = torch.tensor([[4.0], [8.0]], dtype=torch.float64).view(1, 1, 2, 1)
    out, lse = attention_forward(q, k, v, causal=False, scale=1.0)
    # Weights 1 : 3.
    assert_close(out.flatten(), torch.tensor([7.0], dtype=torch.float64))
    assert_close(lse.flatten(), torch.tensor([math.log(4)], dtype=torch.float64))


def test_forward_survives_large_logits():
    q, k, v = inputs(SHAPES[1])
    out, lse = attention_forward(q * 1e3, k * 1e3, v, causal=True, scale=1.0)
    expected_out, expected_lse = dense(q * 1e3, k * 1e3, v, True, 1.0)
    assert_close(out, expected_out)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_backward(shape, causal, with_dlse):
    q, k, v = inputs(shape)
    scale = -0.4
    out, lse = attention_forward(q, k, v, causal=causal, scale=scale)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    dlse = torch.linspace(-1, 1, lse.numel(), dtype=out.dtype).view(lse.shape)
    dlse = dlse if with_dlse else None
    grads = attention_backward(dout, dlse, q, k, v, out, lse, causal=causal, scale=scale)
    for grad, expected in zip(grads, gradients(q, k, v, dout, dlse, causal, scale), strict=True):
        assert_close(grad, expected)


sizes = st.integers(min_value=1, max_value=6)


@given(
    batch=st.integers(1, 2), kv_heads=st.integers(1, 2), group=st.integers(1, 3), seqlen_q=sizes,
    seqlen_k=sizes, head_dim=sizes, head_dim_v=sizes, causal=st.booleans(), chunk=sizes,
)  # fmt: skip
@settings(max_examples=30, deadline=None)
def test_any_shape_and_any_chunk(
    batch, kv_heads, group, seqlen_q, seqlen_k, head_dim, head_dim_v, causal, chunk
):
    heads = kv_heads * group
    q, k, v = inputs((batch, heads, kv_heads, seqlen_q, seqlen_k, head_dim, head_dim_v))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_CHUNK_ELEMENTS", chunk * batch * heads * seqlen_k)
        out, lse = attention_forward(q, k, v, causal=causal, scale=0.5)
        expected_out, expected_lse = dense(q, k, v, causal, 0.5)
        assert_close(out, expected_out)
        assert_close(lse, expected_lse)
        dout, dlse = torch.cos(out), torch.sin(expected_out.sum(-1))
        grads = attention_backward(dout, dlse, q, k, v, out, lse, causal=causal, scale=0.5)
    for grad, expected in zip(grads, gradients(q, k, v, dout, dlse, causal, 0.5), strict=True):
        assert_close(grad, expected, 1e-10)


@pytest.mark.parametrize("elements", [1, 2 * 6 * 7 * 3, 2 * 6 * 7 * 11 - 1])
def test_chunks_change_nothing(monkeypatch, elements):
    q, k, v = inputs(SHAPES[2])
    whole = attention_forward(q, k, v, causal=True, scale=0.4)
    dout = torch.ones_like(whole[0])
    dlse = torch.linspace(-1, 1, whole[1].numel(), dtype=torch.float64).view(whole[1].shape)
    options = {"causal": True, "scale": 0.4}
    whole_grads = attention_backward(dout, dlse, q, k, v, *whole, **options)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", elements)
    assert len(reference._row_chunks(q, k)) > 1
    parts = attention_forward(q, k, v, **options)
    grads = attention_backward(dout, dlse, q, k, v, *whole, **options)
    for part, expected in zip([*parts, *grads], [*whole, *whole_grads], strict=True):
        assert_close(part, expected)


@pytest.mark.parametrize(
    ("per_row", "length", "expected"),
    [
        (1, 5, [(0, 3), (3, 5)]),
        (2, 3, [(0, 1), (1, 2), (2, 3)]),
        (100, 2, [(0, 1), (1, 2)]),
        (1, 3, [(0, 3)]),
        (1, 0, [(0, 0)]),
    ],
)
def test_row_chunks(monkeypatch, per_row, length, expected):
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 3)
    q, k = torch.empty(1, 1, length, 4), torch.empty(1, 1, per_row, 4)
    assert reference._row_chunks(q, k) == expected


def test_rows_that_see_no_key():
    q, k, v = inputs((1, 2, 1, 5, 3, 4, 4))
    out, lse = attention_forward(q, k, v, causal=True, scale=1.0)
    assert out[:, :, :2].abs().max() == 0
    assert bool((lse[:, :, :2] == -math.inf).all())
    assert bool(torch.isfinite(lse[:, :, 2:]).all())
    dout, dlse = torch.ones_like(out), torch.ones_like(lse)
    dq, dk, dv = attention_backward(dout, dlse, q, k, v, out, lse, causal=True, scale=1.0)
    assert dq[:, :, :2].abs().max() == 0
    # They add nothing to dk and dv either: the rest alone gives the same.
    rest = [x[:, :, 2:] for x in (dout, dlse, q, out, lse)]
    part = attention_backward(rest[0], rest[1], rest[2], k, v, *rest[3:], causal=True, scale=1.0)
    assert_close(dq[:, :, 2:], part[0])
    assert_close(dk, part[1])
    assert_close(dv, part[2])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 4, 2, 3, 0, 8, 4), (2, 4, 2, 0, 3, 8, 4), (0, 4, 2, 3, 3, 8, 4)], ids=str
)
def test_empty_sizes(shape, causal):
    b, h, _, sq, _, _, dv = shape
    q, k, v = inputs(shape)
    out, lse = attention_forward(q, k, v, causal=causal, scale=1.0)
    assert torch.equal(out, torch.zeros(b, h, sq, dv, dtype=torch.float64))
    assert torch.equal(lse, torch.full((b, h, sq), -math.inf, dtype=torch.float64))
    grads = attention_backward(out, lse.exp(), q, k, v, out, lse, causal=causal, scale=1.0)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize(
    ("dtype", "lse_dtype", "ulps"),
    [
        # 16 bits: all is computed in fp32, so only the output's rounding shows (half an ulp).
        (torch.float16, torch.float32, 0.6),
        (torch.bfloat16, torch.float32, 0.6),
        (torch.float32, torch.float32, 16),
        (torch.float64, torch.float64, 0),
    ],
)
def test_dtypes(dtype, lse_dtype, ulps):
    q, k, v = inputs(SHAPES[1], dtype)
    out, lse = attention_forward(q, k, v, causal=True, scale=0.25)
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
    grads = attention_backward(out, lse, q, k, v, out, lse, causal=True, scale=0.25)
    assert [grad.dtype for grad in grads] == [dtype] * 3
    exact, exact_lse = exact_attention(q, k, v, causal=True, scale=0.25)
    assert (exact.dtype, exact_lse.dtype) == (torch.float64, torch.float64)
    error = (out.double() - exact).abs() / exact.abs().clamp_min(0.1)
    assert error.max().item() <= ulps * torch.finfo(dtype).eps
    assert (lse.double() - exact_lse).abs().max().item() < 2e-6


def test_plain_attention_rounds_every_step():
    q, k, v = inputs((1, 6, 2, 64, 96, 32, 32), torch.bfloat16)
    plain = plain_attention(q, k, v, causal=True, scale=0.18)
    exact, _ = exact_attention(q, k, v, causal=True, scale=0.18)
    assert plain.dtype == torch.bfloat16
    error = (plain.double() - exact).abs().max().item()
    ours = attention_forward(q, k, v, causal=True, scale=0.18)[0]
    assert (ours.double() - exact).abs().max().item() < error < 0.05


def test_plain_attention_gives_empty_rows_zero():
    q, k, v = inputs((1, 1, 1, 4, 2, 8, 8), torch.float16)
    plain = plain_attention(q, k, v, causal=True, scale=1.0)
    assert torch.equal(plain[:, :, :2], torch.zeros(1, 1, 2, 8, dtype=torch.float16))
    exact, _ = exact_attention(q, k, v, causal=True, scale=1.0)
    torch.testing.assert_close(plain.double(), exact, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("dtype", "floor"), [(torch.float16, 1e-3), (torch.bfloat16, 1e-3), (torch.float32, 1e-5)]
)
def test_error_allowance(dtype, floor):
    q, k, v = inputs((1, 6, 2, 20, 30, 16, 16), dtype)
    exact, _ = dense(q.double(), k.double(), v.double(), True, 0.25)
    plain = plain_attention(q, k, v, causal=True, scale=0.25)
    expected = 2 * (plain.double() - exact).abs().max().item() + floor
    allowed = error_allowance(q, k, v, causal=True, scale=0.25)
    assert allowed == pytest.approx(expected, rel=1e-6)
    assert allowed > floor


def test_error_allowance_of_nothing_is_the_floor():
    q, k, v = inputs((1, 1, 1, 0, 3, 8, 8), torch.float16)
    assert error_allowance(q, k, v, causal=False, scale=1.0) == 1e-3


# --- the accuracy rule for gradients


def gradient_inputs(dtype, rows=20, keys=13):
    generator = torch.Generator().manual_seed(3)
    shapes = ((2, 4, rows, 8), (2, 2, keys, 8), (2, 2, keys, 16), (2, 4, rows, 16))
    q, k, v, dout = (torch.randn(s, generator=generator).to(dtype) for s in shapes)
    return dout, torch.randn(q.shape[:3], generator=generator), q, k, v


@pytest.mark.parametrize("causal", [False, True])
def test_exact_and_plain_gradients_agree_but_for_rounding(causal):
    options = {"causal": causal, "scale": 0.3}
    inputs = gradient_inputs(torch.float64)
    exact = reference.exact_gradients(*inputs, **options)
    for one, other in zip(exact, reference.plain_gradients(*inputs, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    inputs = gradient_inputs(torch.float16)
    exact = reference.exact_gradients(*inputs, **options)
    plain = reference.plain_gradients(*inputs, **options)
    allowed = reference.gradient_allowances(*inputs, **options, exact=exact)
    for one, other, limit in zip(plain, exact, allowed, strict=True):
        assert one.dtype == torch.float16
        error = (one.double() - other).abs().max().item()
        assert 0 < error < 0.05
        assert limit == pytest.approx(2 * error + 1e-3)


def test_what_overflowed_is_no_yardstick():
    plain = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float16)
    exact = torch.tensor([1.5, 1e6, 3.0], dtype=torch.float64)
    assert reference.allowance(plain, exact) == pytest.approx(1.001)
