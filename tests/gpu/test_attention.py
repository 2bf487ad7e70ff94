"""autoflash.attention on the GPU: sizes, layouts and inputs that broke other libraries."""

import itertools
import random

import pytest
import torch

import autoflash
from autoflash.reference import attention_backward, exact_attention
from tests.gpu.support import assert_accurate, assert_meets_rule, poison, run_seed, tensors

pytestmark = pytest.mark.usefixtures("each_kernel")

LENGTHS = (1, 2, 15, 17, 63, 65, 127, 129, 1025)
DIMS = (8, 40, 63, 72, 80, 96, 160, 192, 256)
SEED = run_seed()
GRID = list(itertools.product(LENGTHS, DIMS, (False, True), (torch.float16, torch.bfloat16)))


@pytest.mark.parametrize("index", range(16))
def test_ragged_lengths_and_head_dims(index: int) -> None:
    print(f"seed {SEED}")
    length, dim, causal, dtype = random.Random(SEED).sample(GRID, 16)[index]
    q, k, v = tensors(*[(2, 3, length, dim)] * 3, dtype=dtype)
    assert_accurate(q, k, v, causal=causal)


@pytest.mark.full
@pytest.mark.parametrize(("length", "dim", "causal", "dtype"), GRID)
def test_all_ragged_lengths_and_head_dims(
    length: int, dim: int, causal: bool, dtype: torch.dtype
) -> None:
    q, k, v = tensors(*[(2, 3, length, dim)] * 3, dtype=dtype)
    assert_accurate(q, k, v, causal=causal)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (9, 3), (8, 1)])
@pytest.mark.parametrize(("dim", "dim_v"), [(64, 64), (128, 96), (192, 128), (64, 128)])
def test_grouped_heads_and_value_dims(heads: int, kv_heads: int, dim: int, dim_v: int) -> None:
    shapes = ((2, heads, 257, dim), (2, kv_heads, 257, dim), (2, kv_heads, 257, dim_v))
    assert_accurate(*tensors(*shapes, dtype=torch.bfloat16), causal=True)


def test_rows_that_see_no_key_are_zero_and_lse_minus_infinity() -> None:
    q, k, v = tensors((1, 2, 5, 64), (1, 2, 2, 64), (1, 2, 2, 64), dtype=torch.float16)
    q, k, v = (3 * x for x in (q, k, v))
    out = assert_accurate(q, k, v, causal=True)
    assert torch.equal(out[:, :, :3], torch.zeros_like(out[:, :, :3]))


@pytest.mark.parametrize(("rows", "keys"), [(333, 589), (589, 333), (700, 64), (64, 700), (1, 999)])
@pytest.mark.parametrize("dim", [64, 96, 128, 192, 256])
def test_lengths_that_differ_under_a_causal_mask(rows: int, keys: int, dim: int) -> None:
    q, k, v = tensors((2, 8, rows, dim), (2, 2, keys, dim), (2, 2, keys, dim), dtype=torch.float16)
    assert_accurate(q, k, v, causal=True)


def test_outlier_channels() -> None:
    q, k, v = tensors(*[(2, 4, 515, 128)] * 3, dtype=torch.bfloat16)
    q[..., ::17] *= 20
    v[..., ::13] *= 20
    for causal in (False, True):
        assert_accurate(q, k, v, causal=causal)


@pytest.mark.parametrize("sign", [-1, 1])
def test_very_negative_and_very_positive_logits(sign: int) -> None:
    q, k, v = tensors((1, 1, 1, 128), (1, 1, 256, 128), (1, 1, 256, 128), dtype=torch.bfloat16)
    q[..., 0] = 448
    k[..., 0] = sign * 544
    assert_accurate(q, k, v, causal=False)


@pytest.mark.parametrize("length", [64, 192, 200])
def test_memory_behind_the_last_key_is_never_read(length: int) -> None:
    q, k, v = tensors((1, 2, 70, 64), (1, 2, 256, 64), (1, 2, 256, 64), dtype=torch.bfloat16)
    k[:, :, length:] = torch.inf
    v[:, :, length:] = torch.nan
    assert_accurate(q, k[:, :, :length], v[:, :, :length], causal=True)


def test_keys_hidden_from_every_row_may_hold_nan() -> None:
    """The top of a causal square: the keys behind its tiles are there, but unseen."""
    top = 768  # whole tiles, of whatever size
    q, k, v = tensors(*[(1, 1, 2 * top, 64)] * 3, dtype=torch.bfloat16)
    k[:, :, top:] = torch.nan
    v[:, :, top:] = torch.nan
    out = autoflash.attention(q, k, v, causal=True)
    exact, _ = exact_attention(*(x[:, :, :top] for x in (q, k, v)), causal=True, scale=64**-0.5)
    torch.testing.assert_close(out[:, :, :top].double(), exact, rtol=0, atol=2e-2)


@pytest.mark.parametrize("bshd", [False, True])
def test_layouts_and_strided_views_without_a_copy(bshd: bool) -> None:
    (packed,) = tensors((2, 196, 3, 4, 80), dtype=torch.float16)
    q, k, v = packed.unbind(2)  # [B, S, H, D], rows 3 * 4 * 80 apart
    straight = autoflash.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
    if bshd:
        out = autoflash.attention(q, k, v, causal=True, layout="bshd")
        assert torch.equal(out.transpose(1, 2), straight)
    else:
        # Heads and rows keep q's order in memory.
        assert straight.transpose(1, 2).is_contiguous()
        assert_accurate(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)


def test_misaligned_rows_after_the_aligned_kernel_was_cached() -> None:
    q, k, v = tensors(*[(2, 2, 65, 64)] * 3, dtype=torch.bfloat16)
    assert_accurate(q, k, v, causal=False)
    big = tensors(*[(2, 2, 65, 511)] * 3, dtype=torch.bfloat16, seed=1)
    assert_accurate(*(x[..., 1:65] for x in big), causal=False)
    # Same shapes and strides, but a base that is 2 bytes off.
    flat = tensors(*[(2 * 2 * 65 * 64 + 1,)] * 3, dtype=torch.bfloat16, seed=2)
    assert_accurate(*(x[1:].view(2, 2, 65, 64) for x in flat), causal=False)


def test_expanded_and_discontiguous_inputs() -> None:
    q, k, v = tensors((2, 4, 130, 64), (2, 1, 130, 64), (2, 1, 130, 64), dtype=torch.float16)
    assert_accurate(q, k.expand(2, 4, 130, 64), v.expand(2, 4, 130, 64), causal=True)
    (transposed,) = tensors((2, 4, 64, 130), dtype=torch.float16)
    assert_accurate(transposed.transpose(2, 3), k, v, causal=True)


@pytest.mark.parametrize("shape", [(0, 2, 4, 4), (1, 2, 0, 4), (1, 2, 4, 0)])
def test_empty_sizes(shape: tuple[int, int, int, int]) -> None:
    batch, heads, rows, keys = shape
    q, k, v = tensors(
        (batch, heads, rows, 64), (batch, heads, keys, 64), (batch, heads, keys, 64),
        dtype=torch.bfloat16,
    )  # fmt: skip
    poison(1024)
    out, lse = autoflash.attention(q, k, v, return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.equal(lse, torch.full(q.shape[:3], -torch.inf, device="cuda"))


@pytest.mark.parametrize(
    "shape",
    [(65536, 1, 1, 16), (1, 65536, 1, 16), (10923, 6, 1, 16), (1, 1, 64 * 65535 + 1, 16)],
)
def test_grid_limits(shape: tuple[int, int, int, int]) -> None:
    (q,) = tensors(shape, dtype=torch.float16)
    k, v = (q[:, :, :1].contiguous(), 2 * q[:, :, :1].contiguous())
    poison(q.numel())
    # One key: each row's answer is that key's value.
    out = autoflash.attention(q, k, v)
    assert torch.equal(out, v.expand_as(out))


def test_more_than_2_31_elements() -> None:
    (q,) = tensors((2600, 16, 729, 72), dtype=torch.float16)
    out = autoflash.attention(q, q, q)
    # Not against a call of its own: of another size it may be served by another config.
    last = q[-1:]
    assert_meets_rule(out[-1:], last, last, last, causal=False)


def test_row_offsets_past_2_31_elements() -> None:
    (storage,) = tensors((24000, 700, 128), dtype=torch.bfloat16)
    k = storage.transpose(0, 1).unsqueeze(1)  # [700, 1, 24000, 128], rows 89600 apart
    (q,) = tensors((700, 1, 16, 128), dtype=torch.bfloat16, seed=1)
    out = autoflash.attention(q, k, k)
    assert_meets_rule(out[-1:], q[-1:], k[-1:], k[-1:], causal=False)


@pytest.mark.parametrize("expanded", [True, False])
def test_gradients_with_expanded_and_permuted_dout(expanded: bool) -> None:
    inputs = tensors((2, 4, 32, 128), (2, 1, 32, 128), (2, 1, 32, 128), dtype=torch.float16)
    q, k, v = (x.requires_grad_() for x in inputs)
    out, lse = autoflash.attention(q, k, v, causal=True, return_lse=True)
    weight = torch.ones_like(out) if expanded else tensors(out.shape, dtype=out.dtype, seed=3)[0]
    loss = out.sum() if expanded else (out.transpose(1, 2) * weight.transpose(1, 2)).sum()
    found = torch.autograd.grad(loss, (q, k, v))
    expected = attention_backward(
        weight, None, *(x.detach().double() for x in (q, k, v)),
        *(x.detach().double() for x in (out, lse)), causal=True, scale=128**-0.5,
    )  # fmt: skip
    for gradient, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient.double(), exact, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.float32, torch.float32), "float32 is not served"),
        ((torch.float16, torch.bfloat16), "must be the same"),
    ],
)
def test_refusals(arguments: tuple[torch.dtype, torch.dtype], message: str) -> None:
    q = torch.zeros(1, 2, 4, 64, device="cuda", dtype=arguments[0])
    k = q.to(arguments[1])
    with pytest.raises(autoflash.AutoFlashError, match=message):
        autoflash.attention(q, k, k)
    with pytest.raises(autoflash.InvalidInputError, match="cpu"):
        autoflash.attention(q, q.cpu(), q)
