"""torch.ops.autoflash under torch's own checks: schema, fake kernel, tracing, compiling."""

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from autoflash import InvalidInputError, UnsupportedError, attention, ops
from autoflash.ops import may_skip_dispatcher

OP = torch.ops.autoflash.attention_fwd.default


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def contiguous(batch, one, two, dim, seed):
    return randn(batch, one, two, dim, seed=seed)


def swapped(batch, one, two, dim, seed):
    return randn(batch, two, one, dim, seed=seed).transpose(1, 2)


def padded(batch, one, two, dim, seed):
    return randn(batch, one, two, dim + 5, seed=seed)[..., 2 : 2 + dim]


def columns(batch, one, two, dim, seed):
    return randn(batch, one, dim, two, seed=seed).mT


def expanded(batch, one, two, dim, seed):
    return randn(1, one, two, dim, seed=seed).expand(batch, -1, -1, -1)


VIEWS = [contiguous, swapped, padded, columns, expanded]


def tensors(view, bshd, rows=196, keys=257, dim=80, dim_v=40, heads=4, kv_heads=2):
    def one(number, length, width, seed):
        sizes = (length, number) if bshd else (number, length)
        return view(2, *sizes, width, seed)

    return one(heads, rows, dim, 0), one(kv_heads, keys, dim, 1), one(kv_heads, keys, dim_v, 2)


# --- torch's checks


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_opcheck(view, bshd):
    q, k, v = tensors(view, bshd)
    results = torch.library.opcheck(OP, (q, k, v, 0.11, True, bshd, True))
    assert set(results.values()) == {"SUCCESS"}
    assert len(results) == 4


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck_without_lse(causal):
    q, k, v = tensors(contiguous, not causal)
    results = torch.library.opcheck(OP, (q, k, v, 0.11, causal, not causal, False))
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_opcheck_dtypes(dtype):
    q, k, v = (x.to(dtype) for x in tensors(contiguous, False, rows=17, keys=33))
    results = torch.library.opcheck(OP, (q, k, v, -0.11, True, False, True))
    assert set(results.values()) == {"SUCCESS"}


NEEDS = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize("with_dlse", [False, True])
@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("view", [contiguous, swapped], ids=lambda view: view.__name__)
def test_opcheck_backward(view, bshd, with_dlse, needs):
    q, k, v = tensors(view, bshd, rows=33, keys=47, dim=24, dim_v=16)
    out, lse = OP(q, k, v, 0.2, True, bshd, True)
    dlse = lse.cos() if with_dlse else None
    arguments = (out.cos(), dlse, q, k, v, out, lse, 0.2, True, bshd, False, *needs)
    results = torch.library.opcheck(torch.ops.autoflash.attention_bwd.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_gradients_that_are_not_needed_come_back_empty(needs):
    q, k, v = tensors(contiguous, False, rows=33, keys=47, dim=24, dim_v=16)
    out, lse = OP(q, k, v, 0.2, True, False, True)
    bwd = torch.ops.autoflash.attention_bwd.default
    arguments = (out.cos(), None, q, k, v, out, lse, 0.2, True, False, False)
    every, some = bwd(*arguments, True, True), bwd(*arguments, *needs)
    for grad, found, need in zip(every, some, (needs[0], needs[1], needs[1]), strict=True):
        assert torch.equal(found, grad) if need else found.shape == (0,)


@pytest.mark.parametrize("leaves", ["q", "k", "v", "qk", "kv", "qv"])
def test_only_what_asks_for_a_gradient_gets_one(leaves, monkeypatch):
    asked = []
    original = ops.attention_backward
    monkeypatch.setattr(
        ops, "attention_backward", lambda *a, **o: asked.append(1) or original(*a, **o)
    )
    inputs = dict(zip("qkv", tensors(contiguous, False, rows=9, keys=7), strict=True))
    everything = [x.clone().requires_grad_() for x in inputs.values()]
    attention(*everything, causal=True).square().sum().backward()
    for name in leaves:
        inputs[name].requires_grad_()
    attention(**inputs, causal=True).square().sum().backward()
    for (name, x), other in zip(inputs.items(), everything, strict=True):
        if name in leaves:
            assert torch.equal(x.grad, other.grad)
        else:
            assert x.grad is None
    assert len(asked) == 2


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_gradients_lie_as_their_tensors_do(view):
    leaves = [x.detach().requires_grad_() for x in tensors(view, False, rows=33, keys=47)]
    for grad, x in zip(torch.autograd.grad(attention(*leaves).sum(), leaves), leaves, strict=True):
        assert grad.is_contiguous() == (view is not swapped)
        assert (grad.stride(1) < grad.stride(2)) == (x.stride(1) < x.stride(2))


@pytest.mark.parametrize("sizes", [{"rows": 0}, {"keys": 0}, {"rows": 1, "keys": 1}], ids=str)
def test_opcheck_odd_sizes(sizes):
    q, k, v = tensors(contiguous, False, **sizes)
    results = torch.library.opcheck(OP, (q, k, v, 0.11, True, False, True))
    assert set(results.values()) == {"SUCCESS"}


def test_without_lse_the_second_output_is_empty():
    q, k, v = tensors(contiguous, False, rows=5, keys=6)
    out, lse = OP(q, k, v, 0.1, False, False, False)
    assert lse.shape == (0,)
    assert lse.dtype == torch.float32
    with_lse = OP(q, k, v, 0.1, False, False, True)
    assert torch.equal(out, with_lse[0])
    assert with_lse[1].shape == (2, 4, 5)


# --- fake tensors


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_fake_allocates_as_the_real_one(view, bshd, return_lse):
    layout = "bshd" if bshd else "bhsd"
    real = tensors(view, bshd)
    expected = attention(*real, layout=layout, return_lse=return_lse)
    with FakeTensorMode() as mode:
        fake = attention(*map(mode.from_tensor, real), layout=layout, return_lse=return_lse)
    meta = attention(
        *(x.to("meta") if view is not expanded else expanded_meta(x) for x in real),
        layout=layout, return_lse=return_lse,
    )  # fmt: skip
    for found in (fake, meta):
        pairs = zip(*((x,) if not return_lse else x for x in (found, expected)), strict=True)
        for one, other in pairs:
            assert (one.shape, one.stride(), one.dtype) == (
                other.shape, other.stride(), other.dtype,
            )  # fmt: skip


def expanded_meta(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def test_meta_tensors_have_gradients():
    leaves = [x.to("meta").requires_grad_() for x in tensors(contiguous, False)]
    out, lse = attention(*leaves, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", (2, 4, 196, 40), (2, 4, 196))
    grads = torch.autograd.grad(out.sum() + lse.sum(), leaves)
    assert [grad.shape for grad in grads] == [x.shape for x in leaves]


def test_the_fake_refuses_what_the_real_one_refuses():
    q, k, v = (x.to("meta") for x in tensors(contiguous, False))
    with pytest.raises(InvalidInputError, match="batch of k is 1, of q 2"):
        attention(q, k[:1], v)
    with pytest.raises(UnsupportedError, match=r"torch.int32 is not served"):
        attention(*(x.to(torch.int32) for x in (q, k, v)))


# --- compiling


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function, **options):
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("view", VIEWS[:3], ids=lambda view: view.__name__)
def test_compiled_equals_eager(view, layout, causal):
    def run(q, k, v):
        return attention(q, k, v, causal=causal, layout=layout, return_lse=True)

    inputs = tensors(view, layout == "bshd", rows=33, keys=47, dim=24, dim_v=16)
    for found, expected in zip(compiled(run)(*inputs), run(*inputs), strict=True):
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("view", [contiguous, swapped], ids=lambda view: view.__name__)
def test_compiled_gradients_equal_eager(view, layout, causal):
    def run(q, k, v):
        out, lse = attention(q, k, v, causal=causal, layout=layout, return_lse=True, scale=-0.3)
        return out, lse

    leaves = [x.detach().requires_grad_() for x in
              tensors(view, layout == "bshd", rows=33, keys=47, dim=24, dim_v=16)]  # fmt: skip

    def outputs_and_gradients(function):
        out, lse = function(*leaves)
        weights = torch.cos(torch.arange(lse.numel())).view_as(lse)
        grads = torch.autograd.grad((out * out).sum() + (lse * weights).sum(), leaves)
        return [out, lse, *grads]

    eager, traced = outputs_and_gradients(run), outputs_and_gradients(compiled(run))
    for found, expected in zip(traced, eager, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert found.stride() == expected.stride()


def test_compiled_gradient_of_self_attention():
    def run(x):
        return attention(x, x, x, causal=True)

    leaf = randn(2, 4, 9, 16).requires_grad_()
    grads = [
        torch.autograd.grad(function(leaf).square().sum(), leaf)[0]
        for function in (run, compiled(run))
    ]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-6, atol=1e-7)


def test_compiled_once_for_many_lengths():
    run = compiled(attention, dynamic=True)
    counts = []
    for rows in (17, 40, 96):
        q, k, v = tensors(contiguous, False, rows=rows, keys=rows + 3, dim=24, dim_v=16)
        assert torch.equal(run(q, k, v, causal=True), attention(q, k, v, causal=True))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(counts)) == 1


def test_compiled_graph_holds_the_op():
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    q, k, v = tensors(contiguous, False, rows=5, keys=6)
    torch.compile(attention, fullgraph=True, backend=keep)(q, k, v)
    (graph,) = graphs
    calls = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert OP in calls


def test_exported_program():
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, causal=True)

    inputs = tensors(contiguous, False, rows=5, keys=6)
    exported = torch.export.export(Block(), inputs)
    assert torch.equal(exported.module()(*inputs), attention(*inputs, causal=True))


# --- dispatching


def test_cpu_tensors_go_through_the_dispatcher():
    q, k, v = tensors(contiguous, False, rows=5, keys=6)
    assert may_skip_dispatcher(q, k, v) is False


def test_a_dispatch_mode_sees_the_op():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen = []
    q, k, v = tensors(contiguous, False, rows=5, keys=6)
    with Watch():
        watched = attention(q, k, v)
    assert OP in seen
    assert torch.equal(watched, attention(q, k, v))


def test_inference_mode():
    q, k, v = tensors(contiguous, False, rows=5, keys=6)
    expected = attention(q, k, v)
    with torch.inference_mode():
        out = attention(q.clone().requires_grad_(), k, v)
    assert torch.equal(out, expected)
    assert out.is_inference()


def test_checkpointing_recomputes_the_same():
    from torch.utils.checkpoint import checkpoint

    leaves = [x.requires_grad_() for x in tensors(contiguous, False, rows=5, keys=6)]
    plain = torch.autograd.grad(attention(*leaves, causal=True).square().sum(), leaves)
    again = checkpoint(attention, *leaves, causal=True, use_reentrant=False).square().sum()
    for found, expected in zip(torch.autograd.grad(again, leaves), plain, strict=True):
        assert torch.equal(found, expected)


def test_the_lse_is_finite_where_a_key_is_seen():
    q, k, v = tensors(contiguous, False, rows=6, keys=4)
    _, lse = OP(q, k, v, 0.1, True, False, True)
    assert torch.equal(lse == -math.inf, (torch.arange(6) < 2).expand(2, 4, 6))
