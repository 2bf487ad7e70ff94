"""fp8 attention in fp64 and emulated: scales count once, NaN goes where it is seen."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.errors import InvalidInputError
from autoflash.reference import exact_attention
from autoflash.reference_fp8 import emulate_fp8_attention, exact_fp8_attention, to_e4m3

FP8 = torch.float8_e4m3fn


def inputs(batch, heads, kv_heads, rows, keys, dim, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, rows), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(batch, *s, dim, generator=generator).to(FP8) for s in shapes]


def scales(granularity, batch, heads, kv_heads, rows, keys):
    """Unequal powers of two, so that nothing rounds."""
    if granularity == "tensor":
        return torch.tensor(0.5), torch.tensor([0.25]), torch.tensor(2.0)
    shapes = {
        "head": [(batch, kv_heads)] * 3,
        "query head": [(batch, heads), (batch, kv_heads), (batch, kv_heads)],
        "block": [(batch, heads, -(-rows // 128)), *[(batch, kv_heads, -(-keys // 128))] * 2],
    }[granularity]
    generator = torch.Generator().manual_seed(7)
    return [2.0 ** torch.randint(-3, 2, s, generator=generator) for s in shapes]


@pytest.mark.parametrize("granularity", ["tensor", "head", "query head", "block"])
@pytest.mark.parametrize("causal", [False, True])
def test_scaled_inputs_are_the_inputs_that_they_stand_for(granularity, causal):
    sizes = (2, 6, 2, 150, 300)
    q, k, v = inputs(*sizes, 16)
    qs, ks, vs = scales(granularity, *sizes)

    def by_hand(x, scale):
        full = torch.empty(x.shape, dtype=torch.float64)
        for b in range(2):
            for h in range(x.shape[1]):
                for row in range(x.shape[2]):
                    s = scale
                    if s.dim() == 2:
                        s = s[b, h * s.shape[1] // x.shape[1]]
                    elif s.dim() == 3:
                        s = s[b, h, row // 128]
                    full[b, h, row] = x[b, h, row].double() * s.item()
        return full

    want = exact_attention(*map(by_hand, (q, k, v), (qs, ks, vs)), causal=causal, scale=0.25)
    out, lse = exact_fp8_attention(q, k, v, qs, ks, vs, causal=causal, scale=0.25)
    assert torch.equal(out, want[0])
    assert torch.equal(lse, want[1])
    got, got_lse = emulate_fp8_attention(q, k, v, qs, ks, vs, causal=causal, scale=0.25)
    # P is rounded to 3 bits of mantissa: 2^-4 of each term at most.
    size = exact_attention(
        *map(by_hand, (q, k, v.float().abs().to(FP8)), (qs, ks, vs)), causal=causal, scale=0.25
    )[0]
    assert ((got - out).abs() <= (2**-4 + 1e-5) * size + 1e-6).all()
    assert torch.allclose(got_lse.double(), lse, atol=1e-5)


@pytest.mark.parametrize("block_keys", [16, 64, 128])
def test_scales_of_the_whole_come_through_exactly(block_keys):
    q, k, v = inputs(2, 8, 2, 64, 256, 32)
    plain = emulate_fp8_attention(
        q, k, v, None, None, None, causal=False, scale=0.1, block_keys=block_keys
    )[0]
    for scale in (torch.tensor(0.5), torch.full((2, 2), 0.5), torch.full((2, 2, 2), 0.5)):
        got = emulate_fp8_attention(
            q, k, v, None, None, scale, causal=False, scale=0.1, block_keys=block_keys
        )[0]
        assert torch.equal(got, plain * 0.5)
        # q and k: the same as a factor of the scores.
        factor = torch.tensor(2.0)
        got = emulate_fp8_attention(
            q, k, v, factor, factor, None, causal=False, scale=0.025, block_keys=block_keys
        )[0]
        assert torch.equal(got, plain)


def test_a_single_dominant_key_gives_its_value():
    q, k, v = inputs(1, 2, 1, 3, 200, 16)
    k = k.float()
    k[0, 0, 137] = 40 * q.float()[0, 0, 1]
    out, _ = emulate_fp8_attention(
        q, k.to(FP8), v, None, None, torch.tensor(3.0), causal=False, scale=1.0
    )
    assert torch.allclose(out[0, 0, 1], 3 * v[0, 0, 137].float(), rtol=1e-6)


@pytest.mark.parametrize("p_exponent", [0, 8])
def test_small_probabilities_survive_by_the_factor_of_p(p_exponent):
    # One key of weight 1, and 4096 that share a weight of 1 among them.
    q, k, v = (torch.zeros(1, 1, n, 16) for n in (1, 4097, 4097))
    q[..., 0] = 1
    k[0, 0, 0, 0] = 8
    v[0, 0, 1:] = 1
    lean = math.log(4096) / 8
    out, _ = emulate_fp8_attention(
        *(x.to(FP8) for x in (q, k, v)), None, None, None, causal=False, scale=lean,
        p_exponent=p_exponent, last_first=False,
    )  # fmt: skip
    assert out[0, 0, 0, 0].item() == pytest.approx(0.0 if p_exponent == 0 else 0.5, rel=2**-4)


@pytest.mark.parametrize("last_first", [False, True])
def test_a_sink_at_the_start_hides_nobody_from_the_last_to_the_first(last_first):
    # 4096 keys of e^-13 of the first one's weight: in e4m3 nothing, unless they come before it.
    q, k, v = (torch.zeros(1, 1, n, 16) for n in (1, 128 + 4096, 128 + 4096))
    q[..., 0] = 1
    k[0, 0, 1:128, 0] = -13
    k[0, 0, 0, 0] = 13
    v[0, 0, 128:] = 1
    given_ = [x.to(FP8) for x in (q, k, v)]
    exact, _ = exact_fp8_attention(*given_, None, None, None, causal=False, scale=1.0)
    out, _ = emulate_fp8_attention(
        *given_, None, None, None, causal=False, scale=1.0, last_first=last_first
    )
    assert exact[0, 0, 0, 0].item() == pytest.approx(4096 * math.exp(-13), rel=0.02)
    assert out[0, 0, 0, 0].item() == (pytest.approx(exact[0, 0, 0, 0].item()) if last_first else 0)


def test_unequal_scales_of_v_blocks_change_units():
    sizes = (1, 1, 1, 5, 384)
    q, k, v = inputs(*sizes, 8)
    vs = torch.tensor([[[2.0**-20, 1.0, 2.0**20]]])
    out, _ = exact_fp8_attention(q, k, v, None, None, vs, causal=False, scale=0.1)
    got, _ = emulate_fp8_attention(q, k, v, None, None, vs, causal=False, scale=0.1)
    assert ((got - out).abs() / out.abs().amax()).max() < 2**-4


def test_a_block_of_two_scales_is_refused():
    q, k, v = inputs(1, 1, 1, 4, 256, 8)
    with pytest.raises(InvalidInputError, match="block_keys=256: must divide 128"):
        emulate_fp8_attention(
            q, k, v, None, None, torch.ones(1, 1, 2), causal=False, scale=1.0, block_keys=256
        )


@settings(max_examples=30)
@given(
    causal=st.booleans(), rows=st.integers(1, 40), keys=st.integers(1, 40),
    which=st.sampled_from("qkv"), at=st.integers(0, 39), byte=st.sampled_from((0x7F, 0xFF)),
)  # fmt: skip
def test_nan_goes_to_the_rows_that_see_it(causal, rows, keys, which, at, byte):
    tensors = inputs(1, 4, 2, rows, keys, 8)
    index = "qkv".index(which)
    at %= tensors[index].shape[2]
    tensors[index].view(torch.uint8)[0, 1, at, 3] = byte
    heads, columns = ([1], slice(None)) if which == "q" else ([2, 3], slice(None))
    if which == "v":
        columns = slice(3, 4)
    want = torch.zeros(1, 4, rows, 8, dtype=torch.bool)
    for head in heads:
        for row in range(rows):
            last = row + keys - rows if causal else keys - 1
            if (last >= 0 if which == "q" else last >= at) and (which != "q" or row == at):
                want[0, head, row, columns] = True
    for attend in (exact_fp8_attention, emulate_fp8_attention):
        out, lse = attend(*tensors, None, None, None, causal=causal, scale=0.3)
        assert torch.equal(out.isnan(), want)
        assert torch.equal(lse.isnan(), want.all(-1))


def test_rows_without_keys_are_zero():
    for attend in (exact_fp8_attention, emulate_fp8_attention):
        for keys, causal in ((0, False), (2, True)):
            q, k, v = inputs(1, 2, 1, 5, keys, 8)
            out, lse = attend(q, k, v, None, None, None, causal=causal, scale=1.0)
            empty = 5 - keys
            assert out[:, :, :empty].abs().max() == 0
            assert (lse[:, :, :empty] == -math.inf).all()
            assert torch.isfinite(lse[:, :, empty:]).all()


def test_casts_saturate():
    x = torch.tensor([448.0, 464.0, 465.0, 1e30, -math.inf, math.nan, 2.0**-10, 3 * 2.0**-11])
    got = to_e4m3(x).float().tolist()
    assert got[:5] == [448, 448, 448, 448, -448]
    assert math.isnan(got[5])
    assert got[6:] == [0.0, 2.0**-9]
