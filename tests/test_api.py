"""attention() and explain() on the CPU: values, layouts, gradients and refusals."""

import inspect
import math

import pytest
import torch

import autoflash
from autoflash import InvalidInputError, UnsupportedError, attention, explain
from autoflash.api import Explanation
from autoflash.reference import attention_forward


def make(batch=2, heads=6, kv_heads=2, rows=7, keys=11, dim=16, dim_v=8, dtype=torch.float32,
         layout="bhsd", device="cpu"):  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v))
    tensors = []
    for h, s, d in shapes:
        x = torch.randn(batch, h, s, d, generator=generator, dtype=torch.float64).to(dtype)
        tensors.append((x.transpose(1, 2).contiguous() if layout == "bshd" else x).to(device))
    return tensors


def dense(q, k, v, causal=False, scale=None):
    """out and LSE in fp64, all scores at once; bhsd."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("bhid,bhjd->bhij", q, k) * (
        q.shape[-1] ** -0.5 if scale is None else scale
    )
    if causal:
        offset = k.shape[2] - q.shape[2]
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(offset + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1).nan_to_num(0.0) @ v, torch.logsumexp(scores, -1)


def bhsd(x, layout):
    return x.transpose(1, 2) if layout == "bshd" else x


# --- values


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (6, 1)])
def test_value(heads, kv_heads, causal, layout):
    q, k, v = make(heads=heads, kv_heads=kv_heads, layout=layout)
    out, lse = attention(q, k, v, causal=causal, layout=layout, return_lse=True)
    expected, expected_lse = dense(*(bhsd(x, layout) for x in (q, k, v)), causal)
    torch.testing.assert_close(bhsd(out, layout).double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-6)
    assert out.shape == (*q.shape[:3], v.shape[3])
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("scale", [None, 0.5, -0.5, 0.0, 0, 1])
def test_scale(scale):
    q, k, v = make()
    out, lse = attention(q, k, v, scale=scale, causal=True, return_lse=True)
    expected, expected_lse = dense(q, k, v, True, scale)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-6)


def test_scale_zero_is_the_mean():
    q, k, v = make(heads=2, kv_heads=2)
    out, lse = attention(q, k, v, scale=0.0, return_lse=True)
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(k.shape[2])))


def test_without_lse_the_output_comes_alone():
    q, k, v = make()
    alone = attention(q, k, v)
    assert torch.equal(alone, attention(q, k, v, return_lse=True)[0])
    assert torch.equal(alone, attention(q, k, v, deterministic=True))


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("dtype", "lse_dtype"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_dtypes(dtype, lse_dtype, layout):
    q, k, v = make(dtype=dtype, layout=layout)
    out, lse = attention(q, k, v, causal=True, return_lse=True, layout=layout)
    assert (out.dtype, lse.dtype) == (dtype, lse_dtype)
    expected, expected_lse = dense(*(bhsd(x, layout) for x in (q, k, v)), True)
    eps = max(torch.finfo(dtype).eps, 1e-14)
    torch.testing.assert_close(bhsd(out, layout).double(), expected, rtol=eps, atol=eps / 4)
    lse_eps = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(lse.double(), expected_lse, rtol=lse_eps, atol=lse_eps)
    empty = torch.ops.autoflash.attention_fwd(q, k, v, 1.0, True, layout == "bshd", False)[1]
    assert (empty.shape, empty.dtype) == ((0,), lse_dtype)


def test_causal_is_bottom_right():
    q, k, v = make(rows=2, keys=5)
    out = attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, 1:], attention(q[:, :, 1:], k, v))
    torch.testing.assert_close(out[:, :, :1], attention(q[:, :, :1], k[:, :, :4], v[:, :, :4]))


def test_rows_without_keys_give_zero_and_minus_infinity():
    q, k, v = make(rows=5, keys=3)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out[:, :, :2], torch.zeros_like(out[:, :, :2]))
    assert torch.equal(lse[:, :, :2], torch.full_like(lse[:, :, :2], -math.inf))
    assert bool(torch.isfinite(lse[:, :, 2:]).all())


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("sizes", [{"keys": 0}, {"rows": 0}, {"batch": 0}], ids=str)
def test_empty(sizes, layout):
    q, k, v = make(layout=layout, **sizes)
    out, lse = attention(q, k, v, layout=layout, return_lse=True)
    assert torch.equal(out, torch.zeros(*q.shape[:3], 8))
    assert torch.equal(lse, torch.full(bhsd(q, layout).shape[:3], -math.inf))


def strided_views(layout):
    """The same values as make(), lying in memory in other ways."""
    q, k, v = make(layout=layout)
    padded = torch.full((*q.shape[:3], 40), math.nan)
    padded[..., 3:19] = q
    yield "padded rows", (padded[..., 3:19], k, v)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    yield "heads and rows swapped", (turned, k, v)
    yield "last dimension strided", (q, k.mT.contiguous().mT, v.mT.contiguous().mT)
    yield "reversed batch order", (q.transpose(0, 2).contiguous().transpose(0, 2), k, v)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_strides_change_nothing(layout):
    expected = attention(*make(layout=layout), causal=True, layout=layout)
    for name, tensors in strided_views(layout):
        out = attention(*tensors, causal=True, layout=layout)
        torch.testing.assert_close(out, expected, msg=lambda text, name=name: f"{name}: {text}")


def test_expanded_keys():
    q, k, v = make(heads=6, kv_heads=1)
    expanded = attention(q, k.expand(-1, 6, -1, -1), v.expand(-1, 6, -1, -1))
    torch.testing.assert_close(expanded, attention(q, k, v))


# --- the strides of out


def test_out_is_dense_in_the_order_of_q():
    b, h, s, dv = 2, 6, 7, 8
    q, k, v = make()
    rows_inner, heads_inner = (h * s * dv, s * dv, dv, 1), (h * s * dv, dv, h * dv, 1)
    assert attention(q, k, v).stride() == rows_inner
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    out = attention(turned, k, v)
    assert out.shape == (b, h, s, dv)
    assert out.stride() == heads_inner
    assert out.transpose(1, 2).is_contiguous()
    padded = torch.zeros(2, 6, 7, 40)[..., :16].copy_(q)
    assert attention(padded, k, v).stride() == rows_inner


def test_out_of_bshd_is_dense_in_the_order_of_q():
    q, k, v = make(layout="bshd")
    out = attention(q, k, v, layout="bshd")
    assert out.shape == (2, 7, 6, 8)
    assert out.is_contiguous()
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert attention(turned, k, v, layout="bshd").transpose(1, 2).is_contiguous()


# --- gradients


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("causal", "rows", "keys", "scale"),
    [(False, 3, 4, None), (True, 3, 4, None), (True, 5, 3, -0.7), (True, 1, 4, 0.3)],
)
def test_gradcheck(causal, rows, keys, scale, layout):
    leaves = make(batch=1, heads=6, rows=rows, keys=keys, dim=4, dim_v=3, dtype=torch.float64,
                  layout=layout)  # fmt: skip
    leaves = [x.requires_grad_() for x in leaves]

    def both(q, k, v):
        out, lse = attention(q, k, v, causal=causal, scale=scale, layout=layout, return_lse=True)
        # Of rows that see no key the LSE is no number: numerically it has no derivative.
        return out, lse[:, :, max(0, rows - keys) if causal else 0 :]

    assert torch.autograd.gradcheck(both, leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("keys", [3, 9])
def test_gradient_through_the_lse(keys, causal):
    leaves = [x.requires_grad_() for x in make(keys=keys, dtype=torch.float64)]
    weights = torch.cos(torch.arange(2 * 6 * 7)).view(2, 6, 7).double()

    def loss(out, lse):
        return (out * out).sum() + torch.where(lse == -math.inf, 0.0, lse * weights).sum()

    out, lse = attention(*leaves, causal=causal, return_lse=True)
    grads = torch.autograd.grad(loss(out, lse), leaves)
    if causal and keys < 7:
        # Through a softmax of nothing but -inf autograd gives NaN: leave those rows out.
        q, k, v = leaves
        first = 7 - keys
        seen, seen_lse = dense(q[:, :, first:], k, v, True)
        expected = (seen * seen).sum() + (seen_lse * weights[:, :, first:]).sum()
    else:
        expected = loss(*dense(*leaves, causal))
    for grad, exact in zip(grads, torch.autograd.grad(expected, leaves), strict=True):
        torch.testing.assert_close(grad, exact, rtol=1e-12, atol=1e-12)


def test_gradient_through_the_lse_alone():
    leaves = [x.requires_grad_() for x in make(dtype=torch.float64)]
    _, lse = attention(*leaves, return_lse=True)
    dq, dk, dv = torch.autograd.grad(lse.sum(), leaves)
    q, k, v = leaves
    expected = torch.autograd.grad(dense(q, k, v)[1].sum(), (q, k))
    torch.testing.assert_close(dq, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dk, expected[1], rtol=1e-12, atol=1e-12)
    assert torch.equal(dv, torch.zeros_like(v))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_leaf_is_enough(which):
    tensors = make(dtype=torch.float64)
    leaf = tensors[which].requires_grad_()
    attention(*tensors).square().sum().backward()
    (expected,) = torch.autograd.grad(dense(*tensors)[0].square().sum(), leaf)
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-12)
    assert [x.grad is None for x in tensors] == [index != which for index in range(3)]


def test_no_graph_under_no_grad():
    tensors = [x.requires_grad_() for x in make()]
    with torch.no_grad():
        out, lse = attention(*tensors, return_lse=True)
    assert not out.requires_grad
    assert not lse.requires_grad
    assert torch.equal(out, attention(*tensors))


def test_self_attention_of_one_tensor():
    x = make(heads=2, kv_heads=2, keys=7, dim_v=16, dtype=torch.float64)[0].requires_grad_()
    (grad,) = torch.autograd.grad(attention(x, x, x, causal=True).square().sum(), x)
    (expected,) = torch.autograd.grad(dense(x, x, x, True)[0].square().sum(), x)
    torch.testing.assert_close(grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [False, True])
def test_second_derivatives(causal, layout):
    leaves = make(batch=1, heads=2, kv_heads=1, rows=3, keys=4, dim=3, dim_v=2,
                  dtype=torch.float64, layout=layout)  # fmt: skip
    leaves = [x.requires_grad_() for x in leaves]

    def out(q, k, v):
        return attention(q, k, v, causal=causal, layout=layout)

    assert torch.autograd.gradgradcheck(out, leaves)


# --- what the mask hides


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", ["k", "v", "both"])
def test_what_the_mask_hides_does_not_count(which, value):
    """Row 3 of 7 is the last to look at keys 0 to 7 of 11: spoil the rest."""
    q, k, v = make(dtype=torch.float64)
    clean, clean_lse = attention(q, k, v, causal=True, return_lse=True)
    if which != "v":
        k[:, :, 8:] = value
    if which != "k":
        v[:, :, 8:] = value
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(out[:, :, :4], clean[:, :, :4])
    assert torch.equal(lse[:, :, :4], clean_lse[:, :, :4])
    # The rows below see it.
    assert not bool(torch.isfinite(out[:, :, 4:]).all())


@pytest.mark.parametrize("which", ["k", "v", "both"])
def test_what_the_mask_hides_has_no_part_in_dq(which):
    tensors = make(dtype=torch.float64)
    clean = [x.clone().requires_grad_() for x in tensors]
    (expected,) = torch.autograd.grad(attention(*clean, causal=True).square().sum(), clean[0])
    for x in {"k": tensors[1:2], "v": tensors[2:], "both": tensors[1:]}[which]:
        x[:, :, 8:] = math.nan
    leaves = [x.requires_grad_() for x in tensors]
    (dq,) = torch.autograd.grad(attention(*leaves, causal=True).square().sum(), leaves[0])
    torch.testing.assert_close(dq[:, :, :4], expected[:, :, :4], rtol=1e-12, atol=1e-12)
    assert bool(torch.isnan(dq[:, :, 4:]).all())


# --- refusals: before anything runs


@pytest.fixture
def nothing_runs(monkeypatch):
    def run(*args, **kwargs):
        raise AssertionError("attention was computed")

    monkeypatch.setattr("autoflash.ops.attention_forward", run)


UNSERVED = {
    "window": (128, 0),
    "softcap": 30.0,
    "alibi_slopes": torch.ones(6),
    "sinks": torch.ones(6),
    "bias": torch.zeros(7, 11),
    "score_mod": lambda score, b, h, i, j: score,
    "mask_mod": lambda b, h, i, j: i >= j,
    "block_mask": object(),
    "dropout_p": 0.1,
    "cu_seqlens_q": torch.tensor([0, 7]),
    "cu_seqlens_k": torch.tensor([0, 11]),
    "max_seqlen_q": 7,
    "max_seqlen_k": 11,
}
SERVED = {
    *("causal", "scale", "deterministic", "return_lse", "layout"),
    *("q_descale", "k_descale", "v_descale", "v_layout", "out_dtype"),
}


def test_every_argument_is_served_or_refused():
    arguments = set(inspect.signature(attention).parameters) - {"q", "k", "v"}
    assert arguments == set(UNSERVED) | SERVED


@pytest.mark.parametrize("call", [attention, explain], ids=["attention", "explain"])
@pytest.mark.parametrize("name", UNSERVED)
def test_unserved(name, call, nothing_runs):
    with pytest.raises(UnsupportedError) as caught:
        call(*make(), **{name: UNSERVED[name]})
    assert str(caught.value) == f"not served yet: {name}; leave it at its default"
    assert isinstance(caught.value, NotImplementedError)


@pytest.mark.parametrize(
    ("name", "value"), [("softcap", -1.0), ("softcap", math.nan), ("dropout_p", -0.5),
                        ("window", (0, 0)), ("window", (-1, 0)), ("max_seqlen_q", 0)],
)  # fmt: skip
def test_odd_values_of_unserved_arguments(name, value, nothing_runs):
    with pytest.raises(UnsupportedError, match=rf"^not served yet: {name};"):
        attention(*make(), **{name: value})


def test_several_unserved(nothing_runs):
    with pytest.raises(UnsupportedError, match=r"^not served yet: window, softcap, dropout_p;"):
        attention(*make(), softcap=1.0, dropout_p=0.5, window=(4, 4))


def test_defaults_of_unserved_arguments_are_taken():
    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(attention).parameters.items()
        if name in UNSERVED
    }
    q, k, v = make()
    assert torch.equal(attention(q, k, v, **defaults), attention(q, k, v))


def tensors_but(**changes):
    q, k, v = make()
    tensors = {"q": q, "k": k, "v": v}
    tensors.update({name: change(tensors[name]) for name, change in changes.items()})
    return tensors.values()


WRONG = [
    ("rank 3", {"q": lambda x: x[0]},
     "q has 3 dimensions, shape (6, 7, 16): expected 4, [batch, heads, seqlen, head_dim]"),
    ("rank 5", {"k": lambda x: x[None]},
     "k has 5 dimensions, shape (1, 2, 2, 11, 16): expected 4, [batch, heads, seqlen, head_dim]"),
    ("rank 0", {"v": lambda x: x.sum()},
     "v has 0 dimensions, shape (): expected 4, [batch, heads, seqlen, head_dim]"),
    ("dtype of k", {"k": lambda x: x.half()},
     "k is torch.float16, q is torch.float32: they must be the same"),
    ("dtype of v", {"v": lambda x: x.double()},
     "v is torch.float64, q is torch.float32: they must be the same"),
    ("batch of k", {"k": lambda x: x[:1]}, "batch of k is 1, of q 2"),
    ("batch of v", {"v": lambda x: x[:1]}, "batch of v is 1, of q 2"),
    ("seqlen of v", {"v": lambda x: x[:, :, :-1]},
     "k (2, 2, 11, 16) and v (2, 2, 10, 8) must agree in heads and seqlen"),
    ("heads of v", {"v": lambda x: x[:, :1]},
     "k (2, 2, 11, 16) and v (2, 1, 11, 8) must agree in heads and seqlen"),
    ("head_dim of k", {"k": lambda x: x[..., :8]}, "head_dim of k is 8, of q 16"),
    ("head_dim 257", {"q": lambda x: x.new_zeros(2, 6, 7, 257),
                      "k": lambda x: x.new_zeros(2, 2, 11, 257)},
     "head_dim is 257: must be from 1 to 256"),
    ("head_dim 257 of v", {"v": lambda x: x.new_zeros(2, 2, 11, 257)},
     "head_dim of v is 257: must be from 1 to 256"),
    ("head_dim 0 of v", {"v": lambda x: x[..., :0]}, "head_dim of v is 0: must be from 1 to 256"),
    ("heads", {"q": lambda x: x[:, :5]},
     "5 query heads are not a multiple of 2 key/value heads"),
    ("fewer heads than kv heads", {"q": lambda x: x[:, :1]},
     "1 query heads are not a multiple of 2 key/value heads"),
    ("no heads", {"q": lambda x: x[:, :0]},
     "0 query heads are not a multiple of 2 key/value heads"),
    ("no kv heads", {"k": lambda x: x[:, :0], "v": lambda x: x[:, :0]},
     "6 query heads are not a multiple of 0 key/value heads"),
    ("devices", {"k": lambda x: x.to("meta")}, "k is on meta, q on cpu: move them to one device"),
    ("device of v", {"v": lambda x: x.to("meta")},
     "v is on meta, q on cpu: move them to one device"),
    ("device of q", {"q": lambda x: x.to("meta")},
     "k is on cpu, q on meta: move them to one device"),
]  # fmt: skip


@pytest.mark.parametrize("call", [attention, explain], ids=["attention", "explain"])
@pytest.mark.parametrize(
    ("changes", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
def test_tensors_that_make_no_call(changes, message, call, nothing_runs):
    with pytest.raises(InvalidInputError) as caught:
        call(*tensors_but(**changes))
    assert str(caught.value) == message


@pytest.mark.parametrize("grad", [False, True])
def test_refusals_come_with_gradients_too(grad, nothing_runs):
    q, k, v = make()
    with pytest.raises(InvalidInputError, match="batch of k is 1, of q 2"):
        attention(q.requires_grad_(grad), k[:1], v[:1])


def test_the_message_names_the_layout():
    q, k, v = make(layout="bshd")
    with pytest.raises(InvalidInputError, match=r"expected 4, \[batch, seqlen, heads, head_dim\]$"):
        attention(q[0], k, v, layout="bshd")
    with pytest.raises(InvalidInputError, match="7 query heads are not a multiple of 11"):
        attention(q, k, v)


@pytest.mark.parametrize("dim", [(2, 6, 7, 0), ()], ids=str)
def test_no_head_dim(dim, nothing_runs):
    _, k, v = make()
    with pytest.raises(InvalidInputError) as caught:
        attention(torch.zeros(dim), k, v)
    assert str(caught.value) == f"q has shape {dim}: its last dimension is head_dim"


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2],
    ids=str,
)  # fmt: skip
def test_dtypes_that_are_refused(dtype, nothing_runs):
    q, k, v = (torch.zeros(x.shape).to(dtype) for x in make())
    with pytest.raises(UnsupportedError) as caught:
        attention(q, k, v)
    assert str(caught.value) == f"{dtype} is not served: use float16, bfloat16 or float32"


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan])
def test_scale_is_finite(scale, nothing_runs):
    with pytest.raises(InvalidInputError) as caught:
        attention(*make(), scale=scale)
    assert str(caught.value) == f"scale={scale!r}: must be finite"


@pytest.mark.parametrize("call", [attention, explain], ids=["attention", "explain"])
@pytest.mark.parametrize("layout", ["sbhd", "", "BHSD", None])
def test_unknown_layout(layout, call, nothing_runs):
    with pytest.raises(InvalidInputError) as caught:
        call(*make(), layout=layout)
    assert str(caught.value) == f"layout={layout!r}: must be one of bhsd, bshd"


def test_an_unknown_argument_is_no_argument():
    with pytest.raises(TypeError, match="is_causal"):
        attention(*make(), is_causal=True)
    with pytest.raises(InvalidInputError, match=r"^attention\(\) has no argument 'is_causal'$"):
        explain(*make(), is_causal=True)


# --- explain


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_explain_on_the_cpu(layout, nothing_runs):
    q, k, v = make(layout=layout, dtype=torch.bfloat16)
    found = explain(q, k, v, causal=True, layout=layout, scale=0.1, return_lse=True)
    assert found.problem == "fwd bfloat16 b2 h6/2 s7x11 d16v8 causal"
    assert (found.kernel, found.how, found.layer, found.path) == (
        "reference", "reference", "torch", None,
    )  # fmt: skip
    assert found.tune == (
        "autoflash tune --batch 2 --heads 6 --kv-heads 2 --seqlen-q 7 --seqlen-k 11 "
        "--head-dim 16 --head-dim-v 8 --dtype bfloat16 --causal --target h100"
    )
    text = str(found)
    assert found.problem in text
    assert found.why in text
    assert found.tune in text


def test_explain_of_the_gradients(nothing_runs):
    q, k, v = make(dtype=torch.bfloat16)
    found = explain(q, k, v, op="bwd")
    assert found.problem == "bwd bfloat16 b2 h6/2 s7x11 d16v8"
    assert found.tune.endswith("--dtype bfloat16 --op bwd --target h100")
    with pytest.raises(InvalidInputError, match=r"^op='back': must be one of fwd, bwd$"):
        explain(q, k, v, op="back")


def test_an_explanation_tells_the_pipeline_if_there_is_one():
    fields = {"problem": "p", "target": "t", "kernel": "k", "config": {"A": 1}, "how": "default"}
    fields |= {"layer": "kernel", "why": "w", "path": None, "tune": "autoflash tune"}
    plain = str(Explanation(**fields))
    assert plain.endswith("\n  tune: autoflash tune")
    told = str(Explanation(**fields, pipeline=("1 warp loads", "2 compute")))
    assert told == plain + "\n  pipeline:\n    1 warp loads\n    2 compute"


def test_the_package_gives_what_it_names():
    for name in autoflash.__all__:
        assert getattr(autoflash, name).__class__ is not None
    assert autoflash.attention is attention
    assert autoflash.__version__ == autoflash.version.VERSION
    with pytest.raises(AttributeError, match="no attribute 'atention'"):
        autoflash.atention  # noqa: B018 - the look-up is the test


def test_the_cpu_answers_what_the_reference_says():
    q, k, v = make(dtype=torch.float16)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    expected = attention_forward(q, k, v, causal=True, scale=0.25)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_explain_refuses_what_attention_refuses():
    q = torch.ones(1, 1, 2, 8)
    with pytest.raises(InvalidInputError):
        explain(q, q, q, scale=math.inf)


def test_a_row_that_sees_no_key_adds_nothing_whatever_it_holds():
    q, k, v = (torch.randn(1, 2, n, 8, dtype=torch.float64) for n in (5, 3, 3))
    q[:, :, :2] = math.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, causal=True)
    for grad in torch.autograd.grad(out.square().sum(), leaves)[1:]:
        assert bool(torch.isfinite(grad).all())


def test_the_loss_of_a_neighbours_config_in_words():
    from autoflash.api import _loss_in_words

    assert "is not known" in _loss_in_words([])
    assert _loss_in_words([0.021]) == (
        "; on another problem where it was tried it was 2.1% slower than the best (at most 2.1%)"
    )
    assert _loss_in_words([0.0, 0.02, 0.3]) == (
        "; on 3 other problems where it was tried it was 2.0% slower than the best (at most 30.0%)"
    )
