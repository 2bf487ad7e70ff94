"""autoflash.attention on fp8: what it computes on the CPU, what it refuses, under torch.compile."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

import autoflash
from autoflash import Fp8KV, InvalidInputError, UnsupportedError, attention, explain
from autoflash.fp8 import key_order
from autoflash.reference_fp8 import exact_fp8_attention
from autoflash.rotation import rotate

FP8 = torch.float8_e4m3fn
OP = torch.ops.autoflash.attention_fwd_fp8.default
LAYOUTS = ["rows", "columns", "permuted"]
GRANULARITIES = ["tensor", "head", "block"]


def inputs(batch=2, heads=6, kv_heads=2, rows=150, keys=300, dim=40, dim_v=24, seed=0, bshd=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v))
    found = [torch.randn(batch, *shape, generator=generator) for shape in shapes]
    found[1][:, 1] *= 3
    found[2][:, :, 128:] *= 5
    return [x.transpose(1, 2).contiguous() if bshd else x for x in found]


def quantized(granularity="head", v_layout="rows", bshd=False, **sizes):
    return autoflash.quantize_fp8(
        *inputs(bshd=bshd, **sizes), granularity=granularity, transpose_v=v_layout != "rows",
        permute_keys=v_layout == "permuted", layout="bshd" if bshd else "bhsd",
    )  # fmt: skip


def arguments(x):
    descales = {name: getattr(x, name) for name in ("q_descale", "k_descale", "v_descale")}
    return (x.q, x.k, x.v), {**descales, "v_layout": x.v_layout, "layout": x.layout}


def exact(x, causal, scale=None):
    tensors = (x.q, x.k, x.v_by_row())
    tensors = [t.transpose(1, 2) if x.layout == "bshd" else t for t in tensors]
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    descales = (x.q_descale, x.k_descale, x.v_descale)
    return exact_fp8_attention(*tensors, *descales, causal=causal, scale=scale)


def close(out, want, dtype=torch.bfloat16):
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_it_is_attention_of_what_the_inputs_stand_for(granularity, v_layout, causal, bshd):
    x = quantized(granularity, v_layout, bshd)
    tensors, options = arguments(x)
    out, lse = attention(*tensors, **options, causal=causal, return_lse=True)
    want, want_lse = exact(x, causal)
    close(out.transpose(1, 2) if bshd else out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-6)
    half = attention(*tensors, **options, causal=causal, out_dtype=torch.float16)
    close(half.transpose(1, 2) if bshd else half, want, torch.float16)
    # An Fp8KV is the same.
    packed = attention(x.q, x.kv, q_descale=x.q_descale, causal=causal, layout=x.layout)
    assert torch.equal(packed, out)
    assert out.stride() == packed.stride()


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_scale(scale):
    x = quantized()
    tensors, options = arguments(x)
    out = attention(*tensors, **options, scale=scale, causal=True)
    close(out, exact(x, True, scale)[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_mixed(granularity, v_layout, dtype):
    q, k, v = inputs()
    q = q.to(dtype)
    kv = autoflash.quantize_kv_fp8(k, v, granularity=granularity, v_layout=v_layout)
    out, lse = attention(q, kv, causal=True, return_lse=True)
    x = quantized(granularity, v_layout)
    want, want_lse = exact_fp8_attention(
        q, x.k, x.v_by_row(), None, x.k_descale, x.v_descale, causal=True, scale=40**-0.5
    )
    close(out, want, dtype)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-6)
    assert torch.equal(out, attention(q, kv, causal=True, out_dtype=dtype))


@pytest.mark.parametrize("left_out", ["q_descale", "k_descale", "v_descale"])
def test_a_descale_that_is_not_given_is_one(left_out):
    (q, k, v), options = arguments(quantized("block", "columns"))
    ones = {**options, left_out: torch.ones(())}
    assert torch.equal(
        attention(q, k, v, **{**options, left_out: None}), attention(q, k, v, **ones)
    )


def test_granularities_may_differ():
    x = quantized("block", "permuted")
    options = arguments(x)[1] | {
        "q_descale": torch.linspace(0.005, 0.02, 12).reshape(2, 6),
        "v_descale": torch.tensor([0.01]),
    }
    want, _ = exact_fp8_attention(
        x.q, x.k, x.v_by_row(), options["q_descale"], x.k_descale, options["v_descale"],
        causal=False, scale=40**-0.5,
    )  # fmt: skip
    close(attention(x.q, x.k, x.v, **options), want)


def test_what_lies_behind_the_last_key_counts_for_nothing():
    for layout in ("columns", "permuted"):
        x = quantized("head", layout, keys=299)
        tensors, options = arguments(x)
        wanted = attention(*tensors, **options)
        bits = x.v.view(torch.uint8)
        order = key_order(304) if layout == "permuted" else torch.arange(304)
        bits[..., order >= 299] = 0x7F
        assert torch.equal(attention(*tensors, **options), wanted)


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"keys": 0}, {"batch": 0}], ids=str)
@pytest.mark.parametrize("v_layout", LAYOUTS)
def test_nothing_to_compute(v_layout, sizes):
    shapes = {"batch": 2, "rows": 5, "keys": 6} | sizes
    b, rows, keys = (shapes[name] for name in ("batch", "rows", "keys"))
    q, k = (torch.zeros(b, h, n, 16, dtype=FP8) for h, n in ((4, rows), (2, keys)))
    v = torch.zeros(b, 2, keys, 8, dtype=FP8)
    if v_layout != "rows":
        v = torch.zeros(b, 2, 8, -(-keys // 16) * 16, dtype=FP8)
    out, lse = attention(q, k, v, v_layout=v_layout, return_lse=True)
    assert out.shape == (b, 4, rows, 8)
    assert torch.equal(out, torch.zeros_like(out))
    assert bool((lse == -math.inf).all()) == ("keys" in sizes or lse.numel() == 0)


def test_rows_without_keys_give_zero_and_minus_infinity():
    x = quantized("block", "permuted", rows=50, keys=30)
    tensors, options = arguments(x)
    out, lse = attention(*tensors, **options, causal=True, return_lse=True)
    assert torch.equal(out[:, :, :20], torch.zeros_like(out[:, :, :20]))
    assert bool((lse[:, :, :20] == -math.inf).all())
    assert bool(torch.isfinite(lse[:, :, 20:]).all())


def test_nan_reaches_the_rows_that_see_it():
    x = quantized("head")
    x.k.view(torch.uint8)[0, 0, 200, 3] = 0x7F
    x.v.view(torch.uint8)[1, 1, 170, 5] = 0xFF
    x.q.view(torch.uint8)[1, 0, 7, 0] = 0x7F
    tensors, options = arguments(x)
    out, lse = attention(*tensors, **options, causal=True, return_lse=True)
    want = torch.zeros_like(out, dtype=torch.bool)
    # Row i sees key j when j <= i + 150.
    want[0, :3, 50:] = True
    want[1, 3:, 20:, 5] = True
    want[1, 0, 7] = True
    assert torch.equal(out.isnan(), want)
    assert torch.equal(lse.isnan(), want[..., 0])


# --- the public cases


def case_11(seed=0):
    """B=2, Hq=8, Hk=2, S=256, D=128; scales per kv head, unequal between heads."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, h, 256, 128, generator=generator).to(FP8) for h in (8, 2, 2))
    unequal = torch.tensor([[1.0, 0.5], [0.75, 2.0]])
    scales = {"q_descale": 0.5, "k_descale": 0.25, "v_descale": 0.5}
    return (q, k, v), {name: s * unequal for name, s in scales.items()}


@pytest.mark.parametrize("ones", [False, True])
def test_case_11_scales_count_once(ones):
    (q, k, v), scales = case_11()
    if ones:
        scales = {name: torch.ones_like(x) for name, x in scales.items()}
    out = attention(q, k, v, **scales)
    by_head = {name: x.reshape(2, 2, 1, 1) for name, x in scales.items()}
    plain = attention(
        (q.float() * by_head["q_descale"].repeat_interleave(4, 1)).bfloat16(),
        (k.float() * by_head["k_descale"]).bfloat16(),
        (v.float() * by_head["v_descale"]).bfloat16(),
    )  # fmt: skip
    torch.testing.assert_close(out.float(), plain.float(), rtol=2**-6, atol=1e-3)


def test_case_11_v_descale_scales_the_output_exactly():
    (q, k, v), scales = case_11()
    out = attention(q, k, v, **scales)
    twice = attention(q, k, v, **{**scales, "v_descale": 4 * scales["v_descale"]})
    assert torch.equal(twice, 4 * out)


def test_case_11_one_dominant_key():
    (q, k, v), scales = case_11()
    k = k.float()
    k[:, :, 100] = 30 * q.float()[:, ::4, 7] / q.float()[:, ::4, 7].norm(dim=-1, keepdim=True)
    k = k.clamp(-448, 448).to(FP8)
    out, lse = attention(q, k, v, **scales, return_lse=True)
    want, want_lse = exact_fp8_attention(q, k, v, *scales.values(), causal=False, scale=128**-0.5)
    close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-6)


# --- refusals


@pytest.fixture
def nothing_runs(monkeypatch):
    for name in ("_attention_fwd", "_attention_fwd_fp8"):
        monkeypatch.setattr(autoflash.api, name, None)


def refused(message, *tensors, kind=InvalidInputError, **options):
    for call in (attention, explain):
        with pytest.raises(kind) as caught:
            call(*tensors, **options)
        assert message in str(caught.value)


def test_what_of_fp8_does_not_go_together():
    q, k, v = inputs()
    q8, k8, v8 = (x.to(FP8) for x in (q, k, v))
    h = q.half()
    refused("v is torch.float32: in fp8 attention k and v are both", q8, k8, v)
    refused("k is torch.float16: in fp8 attention", q8, k.half(), v8)
    refused("q is torch.float32: beside k and v in fp8 it must be", q, k8, v8)
    refused("q_descale is for a q in fp8, and q is torch.float16", h, k8, v8,
            q_descale=torch.ones(1))  # fmt: skip
    refused("k_descale is for k and v in torch.float8_e4m3fn: k is torch.float32", q, k, v,
            k_descale=torch.ones(1))  # fmt: skip
    refused("v_layout is for k and v in", h, k.half(), v.half(), v_layout="columns")
    refused("out_dtype=torch.float16: out is like q here, torch.float32", q, k, v,
            out_dtype=torch.float16)  # fmt: skip
    refused("out_dtype=torch.float32 with q torch.float8_e4m3fn: must be torch.float16 or", q8, k8,
            v8, out_dtype=torch.float32)  # fmt: skip
    refused("out_dtype=torch.bfloat16 with q torch.float16: must be torch.float16", h, k8, v8,
            out_dtype=torch.bfloat16)  # fmt: skip
    refused("v_layout='transposed': must be one of rows, columns, permuted", q8, k8, v8,
            v_layout="transposed")  # fmt: skip
    refused("v is missing: only an Fp8KV stands for both", q8, k8)
    refused("k is torch.float8_e5m2, which is not served", q8, k8.float().to(torch.float8_e5m2),
            v8, kind=UnsupportedError)  # fmt: skip
    # A dtype that is the one anyway is no request.
    assert torch.equal(attention(h, k.half(), v.half(), out_dtype=torch.float16),
                       attention(h, k.half(), v.half()))  # fmt: skip


def test_shapes_and_scales_that_are_refused():
    x = quantized("head", "columns")
    (q, k, v), options = arguments(x)
    message = (
        "v has shape (2, 2, 24, 304): with v_layout='permuted' it must be [batch, kv_heads, "
        "head_dim_v, 288]"
    )
    refused(message, q, k[:, :, :280], v, **{**options, "v_layout": "permuted"})
    refused("k (2, 2, 300, 40) and v", q, k, v, **{**options, "v_layout": "rows"})
    refused("head_dim of k is 40, of q 32", q[..., :32], k, v, **options)
    refused("q_descale has shape [2, 3]: must be [] or [1]", q, k, v,
            **{**options, "q_descale": torch.ones(2, 3)})  # fmt: skip
    refused("v_descale is torch.float64: must be torch.float32", q, k, v,
            **{**options, "v_descale": torch.ones(2, 2).double()})  # fmt: skip
    refused("q has 3 dimensions", q[0], k, v, **options)
    refused("6 query heads are not a multiple of 4", q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1),
            v_layout="columns")  # fmt: skip


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_descales_on_the_cpu_are_looked_at(value):
    (q, k, v), options = arguments(quantized())
    with pytest.raises(InvalidInputError, match="k_descale holds"):
        attention(q, k, v, **{**options, "k_descale": torch.full((2, 2), value)})


def test_an_fp8kv_stands_alone():
    q, k, v = inputs()
    kv = autoflash.quantize_kv_fp8(k, v)
    refused("an Fp8KV stands for k and v", q.half(), kv, v)
    refused("an Fp8KV stands for k and v", q.half(), kv, k_descale=torch.ones(1))
    refused("an Fp8KV stands for k and v", q.half(), kv, v_layout="columns")
    refused("layout='bshd': the Fp8KV was made of 'bhsd'", q.half(), kv, layout="bshd")


@pytest.mark.parametrize("leaf", ["q", "k", "v", "k_descale"])
def test_gradients_are_refused(leaf, nothing_runs):
    q, k, v = inputs()
    given = {"q": q.half(), "k": k.to(FP8), "v": v.to(FP8), "k_descale": torch.ones(2, 2)}
    given[leaf].requires_grad_()
    with pytest.raises(UnsupportedError, match="fp8 attention has no gradients, not even for a q"):
        attention(**given)


def test_gradients_that_are_not_recorded_are_none():
    q, k, v = inputs()
    q = q.half().requires_grad_()
    with torch.no_grad():
        out = attention(q, k.to(FP8), v.to(FP8))
    assert not out.requires_grad
    assert torch.equal(out, attention(q.detach(), k.to(FP8), v.to(FP8)))


# --- Fp8KV


def test_a_cache_entry():
    q, k, v = inputs(keys=299)
    kv = autoflash.quantize_kv_fp8(k, v)
    assert isinstance(kv, Fp8KV)
    assert (kv.v_layout, kv.layout, kv.rotation_seed) == ("columns", "bhsd", None)
    assert repr(kv) == f"Fp8KV(2 x 299 keys of 2 heads, v columns, {kv.nbytes} bytes)"
    assert kv.nbytes == 2 * 2 * (299 * 40 + 24 * 304) + 2 * 2 * 2 * 4
    same = autoflash.quantize_fp8(q, k, v, transpose_v=True)
    for name in ("k", "v", "k_descale", "v_descale"):
        assert torch.equal(getattr(kv, name).float(), getattr(same.kv, name).float())
    by_token = autoflash.quantize_kv_fp8(
        *(x.transpose(1, 2).contiguous() for x in (k, v)), layout="bshd"
    )
    assert repr(by_token).startswith("Fp8KV(2 x 299 keys of 2 heads")


def test_a_rotated_entry_meets_a_rotated_query():
    q, k, v = inputs(dim=64)
    kv = autoflash.quantize_kv_fp8(k, v, hadamard=True, seed=5, granularity="block")
    assert kv.rotation_seed == 5
    plain = attention(q.half(), autoflash.quantize_kv_fp8(k, v, granularity="block"))

    def distance(out):
        return ((out - plain).float().norm() / plain.float().norm()).item()

    assert distance(attention(rotate(q, 5).half(), kv)) < 0.2
    assert distance(attention(q.half(), kv)) > 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"v_layout": "transposed"}, "v_layout='transposed': must be one of rows, columns"),
        ({"granularity": "row"}, "granularity='row': must be one of tensor, head, block"),
        ({"seed": -1}, "seed=-1: must be from 0"),
        ({"layout": "sbhd"}, "layout='sbhd': must be one of"),
    ],
)
def test_what_quantize_kv_refuses(options, message):
    _, k, v = inputs()
    with pytest.raises(InvalidInputError, match=message):
        autoflash.quantize_kv_fp8(k, v, **options)
    with pytest.raises(InvalidInputError, match="rounding to fp8 has no gradient"):
        autoflash.quantize_kv_fp8(k.requires_grad_(), v)


def test_k_and_v_that_do_not_go_together_are_refused_by_their_names():
    _, k, v = inputs()
    with pytest.raises(InvalidInputError, match=r"and v \(2, 2, 299, 24\): must have"):
        autoflash.quantize_kv_fp8(k, v[:, :, 1:])
    with pytest.raises(InvalidInputError, match=r"k \(2, 300, 40\) and v"):
        autoflash.quantize_kv_fp8(k[0], v[0])
    with pytest.raises(InvalidInputError, match=r"k is torch\.float16 on cpu, v torch\.float32"):
        autoflash.quantize_kv_fp8(k.half(), v)


# --- explain


def test_explain_says_how_to_tune_it():
    q, k, v = inputs()
    told = explain(q.half(), autoflash.quantize_kv_fp8(k, v), causal=True)
    assert told.problem == (
        "fwd float16/float8_e4m3fn b2 h6/2 s150x300 d40v24 causal head_scales v_columns"
    )
    assert told.kernel == "reference"
    assert "--kv-dtype float8_e4m3fn --scales head --v-layout columns" in told.tune


# --- torch's op


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Its schema check compares by allclose, which torch doesn't have for fp8.
CHECKS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_opcheck(granularity, v_layout, bshd):
    x = quantized(granularity, v_layout, bshd, rows=20, keys=150)
    descales = (x.q_descale, x.k_descale, x.v_descale)
    given = (x.q, x.k, x.v, *descales, torch.float16, v_layout, 0.11, True, bshd, True)
    assert set(torch.library.opcheck(OP, given, test_utils=CHECKS).values()) == {"SUCCESS"}
    given = (x.q, x.k, x.v, None, None, None, torch.bfloat16, v_layout, 0.11, False, bshd, False)
    assert set(torch.library.opcheck(OP, given, test_utils=CHECKS).values()) == {"SUCCESS"}


@pytest.mark.parametrize("v_layout", LAYOUTS)
def test_fake_allocates_as_the_real_one(v_layout):
    for bshd, swap in itertools.product((False, True), repeat=2):
        x = quantized("block", v_layout, bshd)
        (q, k, v), options = arguments(x)
        if swap:
            q = q.transpose(1, 2).contiguous().transpose(1, 2)
        expected = attention(q, k, v, **options, return_lse=True)
        with FakeTensorMode() as mode:
            fake = {
                n: mode.from_tensor(o) if isinstance(o, torch.Tensor) else o
                for n, o in options.items()
            }
            found = attention(*map(mode.from_tensor, (q, k, v)), **fake, return_lse=True)
        for one, other in zip(found, expected, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape, other.stride(), other.dtype,
            )  # fmt: skip
        meta = [
            torch.empty_strided(t.shape, t.stride(), dtype=FP8, device="meta") for t in (q, k, v)
        ]
        meta[1] = meta[1][:1]
        with pytest.raises(InvalidInputError, match="batch of k is 1"):
            attention(*meta, v_layout=v_layout, layout=x.layout)


@pytest.mark.parametrize("v_layout", LAYOUTS)
def test_compiled_equals_eager(v_layout):
    x = quantized("block", v_layout, rows=33, keys=47)
    (q, k, v), options = arguments(x)

    def run(q, k, v, descales):
        out, lse = attention(q, k, v, **descales, v_layout=v_layout, causal=True, return_lse=True)
        return out * 2, lse

    descales = {name: options[name] for name in ("q_descale", "k_descale", "v_descale")}
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, expected in zip(compiled(q, k, v, descales), run(q, k, v, descales), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


def test_compiled_with_a_cache_entry():
    q, k, v = inputs(rows=33, keys=47)
    kv = autoflash.quantize_kv_fp8(k, v)
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q.bfloat16(), kv, causal=True),
                       attention(q.bfloat16(), kv, causal=True))  # fmt: skip


@settings(max_examples=25)
@given(
    rows=st.integers(1, 40), keys=st.integers(1, 300), dim=st.integers(1, 70),
    granularity=st.sampled_from(GRANULARITIES), v_layout=st.sampled_from(LAYOUTS),
    causal=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_any_size(rows, keys, dim, granularity, v_layout, causal, seed):
    x = quantized(granularity, v_layout, rows=rows, keys=keys, dim=dim, dim_v=dim, seed=seed)
    tensors, options = arguments(x)
    out, lse = attention(*tensors, **options, causal=causal, return_lse=True)
    want, want_lse = exact(x, causal)
    close(out, want)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
