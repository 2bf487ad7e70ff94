"""Gradients on the GPU: the accuracy rule, layouts, tracing, repeatability, memory."""

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import autoflash
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.reference import exact_gradients, gradient_allowances
from autoflash.runtime import dispatch
from autoflash.runtime.inputs import problem_of
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS, current_target
from autoflash.tuning.check_bwd import FullGradients, gradient_cases
from tests.gpu.support import loaded, poison, run_seed, tensors

# Comparisons bit for bit are between gradients that promise to repeat.
SAME = {"deterministic": True}
BOTH_DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
BOTH_MASKS = pytest.mark.parametrize("causal", [False, True])
# head_dim, head_dim_v, heads, kv_heads, rows, keys
SHAPES = [
    (64, 64, 4, 4, 257, 257),
    (128, 96, 6, 2, 257, 300),
    (192, 128, 9, 3, 130, 257),
    (64, 128, 8, 1, 300, 129),
    (256, 256, 2, 1, 200, 333),
    (72, 40, 4, 2, 1025, 1025),
    (63, 63, 2, 2, 65, 127),
    (8, 8, 2, 1, 17, 15),
    (1, 1, 2, 2, 33, 33),
    (64, 64, 2, 2, 5, 2),
    (32, 32, 2, 2, 1, 1),
]


@pytest.fixture(autouse=True)
def fresh_plans() -> Iterator[None]:
    dispatch.forget()
    yield
    dispatch.forget()


def inputs_of(
    shape: tuple[int, ...], dtype: torch.dtype, batch: int = 3, seed: int = 0
) -> list[Tensor]:
    """q, k, v and dout."""
    dim, dim_v, heads, kv_heads, rows, keys = shape
    return tensors(
        (batch, heads, rows, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, dim_v),
        (batch, heads, rows, dim_v), dtype=dtype, seed=seed,
    )  # fmt: skip


def assert_right(
    grads: tuple[Tensor, ...], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool,
    dlse: Tensor | None = None, scale: float | None = None,
) -> None:  # fmt: skip
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    exact = exact_gradients(dout, dlse, q, k, v, causal=causal, scale=scale)
    allowed = gradient_allowances(dout, dlse, q, k, v, causal=causal, scale=scale, exact=exact)
    for name, grad, expected, limit in zip("qkv", grads, exact, allowed, strict=True):
        assert bool(torch.isfinite(grad).all()), f"d{name} holds NaN or infinity"
        error = (grad.double() - expected).abs().max().item()
        assert error <= limit, f"d{name}: error {error:.2e}, allowed {limit:.2e}"


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None = None, **options: object
) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = autoflash.attention(*leaves, return_lse=True, **options)
    poison(q.numel())
    if dlse is None:
        return torch.autograd.grad(out, leaves, dout)
    return torch.autograd.grad((out, lse), leaves, (dout, dlse))


@BOTH_MASKS
@BOTH_DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_meet_the_accuracy_rule(
    shape: tuple[int, ...], dtype: torch.dtype, causal: bool
) -> None:
    q, k, v, dout = inputs_of(shape, dtype)
    assert_right(gradients(q, k, v, dout, causal=causal), q, k, v, dout, causal)


@BOTH_MASKS
@pytest.mark.parametrize("dim", [8, 40, 63, 64, 72, 80, 96, 128, 160, 192, 256])
@pytest.mark.parametrize("length", [1, 2, 15, 17, 63, 65, 127, 129, 1025])
def test_lengths_that_are_no_multiple_of_a_tile(length: int, dim: int, causal: bool) -> None:
    dtype = torch.float16 if (length + dim) % 2 else torch.bfloat16
    q, k, v, dout = inputs_of((dim, dim, 2, 1, length, length), dtype)
    assert_right(gradients(q, k, v, dout, causal=causal), q, k, v, dout, causal)


@BOTH_MASKS
def test_gradient_of_the_lse(causal: bool) -> None:
    q, k, v, dout = inputs_of((64, 64, 4, 2, 130, 200), torch.bfloat16)
    dlse = torch.randn(q.shape[:3], device="cuda")
    grads = gradients(q, k, v, dout, dlse, causal=causal)
    assert_right(grads, q, k, v, dout, causal, dlse)
    one = dlse[:1, :1, :1].expand(dlse.shape)
    assert_right(gradients(q, k, v, dout, one, causal=causal), q, k, v, dout, causal, one)


@pytest.mark.parametrize("scale", [-0.3, 0.0, 0.01])
def test_any_scale(scale: float) -> None:
    q, k, v, dout = inputs_of((64, 64, 4, 2, 130, 200), torch.float16)
    grads = gradients(q, k, v, dout, causal=True, scale=scale)
    assert_right(grads, q, k, v, dout, True, scale=scale)


@pytest.mark.parametrize("sign", [-1, 1])
def test_logits_far_from_zero(sign: int) -> None:
    q, k, v, dout = inputs_of((128, 128, 1, 1, 1, 256), torch.bfloat16, batch=1)
    q[..., 0], k[..., 0] = 448, sign * 544
    assert_right(gradients(q, k, v, dout), q, k, v, dout, False)


@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv", "qkv"])
def test_only_what_is_needed_is_computed(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, dout = inputs_of((64, 64, 4, 2, 130, 200), torch.bfloat16)
    every = dict(zip("qkv", gradients(q, k, v, dout, causal=True, **SAME), strict=True))
    inputs = {"q": q, "k": k, "v": v}
    leaves = [inputs[name].requires_grad_() for name in wanted]
    out = autoflash.attention(q, k, v, causal=True, **SAME)
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        grads = torch.autograd.grad(out, leaves, dout)
        torch.cuda.synchronize()
    for name, grad in zip(wanted, grads, strict=True):
        assert torch.equal(grad, every[name])
    ran = {event.name for event in profile.events() or [] if event.name.startswith("flash_bwd")}
    kernel = KERNELS[autoflash.explain(q, k, v, causal=True, op="bwd", **SAME).kernel]
    problem = problem_of(q, k, v, causal=True, bshd=False, op="bwd")
    results = {f"d{name}" for name in wanted}
    functions = kernel.functions(problem, kernel.default(problem, current_target()))
    expected = {f.name for f in functions if f.results & results}
    assert ran == expected


@pytest.mark.parametrize("kind", ["expanded", "permuted", "slice", "rows"])
def test_dout_may_lie_anyhow(kind: str) -> None:
    q, k, v, dout = inputs_of((128, 128, 4, 1, 32, 40), torch.float16)
    if kind == "expanded":
        dout = dout[:1, :1, :1, :1].expand(dout.shape)
    elif kind == "rows":
        dout = dout[:, :, :1].expand(dout.shape)
    elif kind == "permuted":
        dout = dout.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        dout = torch.cat([dout, dout + 1], dim=-1)[..., 3 : 3 + 128]
    grads = gradients(q, k, v, dout)
    assert_right(grads, q, k, v, dout.contiguous(), False)
    found, same = (gradients(q, k, v, x, **SAME) for x in (dout, dout.contiguous()))
    for one, other in zip(found, same, strict=True):
        assert torch.equal(one, other)


def test_slices_of_wide_tensors() -> None:
    wide = tensors((2, 4, 100, 511), (2, 4, 100, 511), (2, 4, 100, 511), dtype=torch.bfloat16)
    q, k, v = (x[..., 1:65] for x in wide)
    dout = torch.randn_like(q)
    assert_right(gradients(q, k, v, dout, causal=True), q, k, v, dout, True)


def test_layout_bshd_lies_as_its_tensors() -> None:
    q, k, v, dout = (
        x.transpose(1, 2).contiguous() for x in inputs_of((64, 64, 4, 2, 130, 200), torch.bfloat16)
    )
    grads = gradients(q, k, v, dout, causal=True, layout="bshd")
    assert all(grad.is_contiguous() for grad in grads)
    swapped = [x.transpose(1, 2) for x in (*grads, q, k, v, dout)]
    assert_right(tuple(swapped[:3]), *swapped[3:], True)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows_keys", [(0, 5), (5, 0)])
def test_empty_lengths_give_zeros(rows_keys: tuple[int, int]) -> None:
    q, k, v, dout = inputs_of((64, 64, 4, 2, *rows_keys), torch.float16)
    for grad, x in zip(gradients(q, k, v, dout), (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert not bool(grad.any())


def test_rows_that_see_no_key_pass_no_gradient() -> None:
    q, k, v, dout = inputs_of((64, 64, 2, 2, 300, 129), torch.float16)
    clean = gradients(q, k, v, dout, causal=True, **SAME)
    dout[:, :, : 300 - 129] = float("nan")
    q[:, :, : 300 - 129] = float("nan")
    found = gradients(q, k, v, dout, causal=True, **SAME)
    assert not bool(found[0][:, :, : 300 - 129].any())
    for one, other in zip(found, clean, strict=True):
        assert torch.equal(one, other)
    served = gradients(q, k, v, dout, causal=True)
    assert not bool(served[0][:, :, : 300 - 129].any())
    assert all(bool(torch.isfinite(grad).all()) for grad in served)


def test_offsets_beyond_32_bits() -> None:
    rows, stride_heads = 24000, 700
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GB")
    storage = torch.zeros(rows, stride_heads, 128, dtype=torch.bfloat16, device="cuda")
    k = storage.permute(1, 0, 2)[-1:].unsqueeze(0)
    k.copy_(torch.randn_like(k))
    q, v, dout = tensors(*[(1, 1, 256, 128), (1, 1, rows, 128), (1, 1, 256, 128)],
                         dtype=torch.bfloat16)  # fmt: skip
    assert_right(gradients(q, k, v, dout, causal=True), q, k, v, dout, True)
    found, expected = (gradients(q, x, v, dout, causal=True, **SAME) for x in (k, k.contiguous()))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_compiled_forward_and_backward() -> None:
    q, k, v, dout = inputs_of((80, 80, 4, 2, 196, 257), torch.bfloat16)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return autoflash.attention(q, k, v, causal=True, deterministic=True) * 1.0

    compiled = torch.compile(run, fullgraph=True)
    for one, other in zip(*(
        torch.autograd.grad(function(*leaves), leaves, dout)
        for function in (run, compiled)
        for leaves in [[x.detach().requires_grad_() for x in (q, k, v)]]
    ), strict=True):  # fmt: skip
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


def test_autocast_and_checkpointing() -> None:
    layer = torch.nn.Linear(64, 3 * 64, device="cuda")
    x = torch.randn(2, 100, 64, device="cuda", requires_grad=True)

    def block(x: Tensor) -> Tensor:
        q, k, v = layer(x).view(2, 100, 3, 4, 16).unbind(2)
        out = autoflash.attention(q, k, v, causal=True, layout="bshd", deterministic=True)
        return out.flatten(2)

    with torch.autocast("cuda", dtype=torch.bfloat16):
        plain = torch.autograd.grad(block(x).float().square().sum(), [x, *layer.parameters()])
        again = checkpoint(block, x, use_reentrant=False).float().square().sum()
        found = torch.autograd.grad(again, [x, *layer.parameters()])
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one, other)


def test_double_backward() -> None:
    q, k, v, _ = inputs_of((32, 32, 2, 1, 33, 40), torch.float16, batch=1)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = autoflash.attention(*leaves, causal=True)
    first = torch.autograd.grad(out.float().square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.float().square().sum() for x in first), leaves)
    assert all(bool(torch.isfinite(x).all()) and bool(x.any()) for x in second)


@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_graph_replays(deterministic: bool) -> None:
    q, k, v, dout = inputs_of((64, 64, 4, 2, 256, 256), torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def run() -> tuple[Tensor, ...]:
        out = autoflash.attention(*leaves, causal=True, deterministic=deterministic)
        return torch.autograd.grad(out, leaves, dout)

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = run()
    dout.mul_(-2)
    graph.replay()
    assert_right(grads, q, k, v, dout, True)
    graph.replay()
    assert_right(grads, q, k, v, dout, True)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 64, 12, 12, 1024, 1024), torch.float16),
        ((128, 128, 16, 2, 1024, 1024), torch.bfloat16),
    ],
    ids=str,
)
def test_bitwise_repeatable(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, dout = inputs_of(shape, dtype, batch=2)
    first = gradients(q, k, v, dout, **SAME)
    for _ in range(200):
        for one, other in zip(gradients(q, k, v, dout, **SAME), first, strict=True):
            assert torch.equal(one, other)


def test_torch_asks_for_deterministic_gradients() -> None:
    q, k, v, dout = inputs_of((64, 64, 4, 2, 1024, 1024), torch.bfloat16)
    expected = gradients(q, k, v, dout, **SAME)
    torch.use_deterministic_algorithms(True)
    try:
        found = gradients(q, k, v, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("deterministic", [False, True])
def test_memory_is_linear_in_the_length(deterministic: bool) -> None:
    taken = []
    for length in (4096, 8192):
        q, k, v, dout = inputs_of((64, 64, 4, 4, length, length), torch.bfloat16, batch=1)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = autoflash.attention(*leaves, deterministic=deterministic)
        torch.autograd.grad(out, leaves, dout, retain_graph=True)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(out, leaves, dout)
        taken.append(torch.cuda.max_memory_allocated() - before)
        # Three gradients and delta, and dq in fp32 where it is summed up by additions.
        sums = 0 if deterministic else 2 * grads[0].nbytes + 4 * 4 * (length + 128)
        most = sum(x.nbytes for x in grads) + 4 * 4 * length + sums
        assert taken[-1] <= most + (4 << 20)
    assert taken[1] < 2.2 * taken[0]


def config_problems() -> list[Problem]:
    return [
        Problem(
            batch=2, heads=heads, kv_heads=kv_heads, seqlen_q=rows, seqlen_k=keys, head_dim=dim,
            head_dim_v=dim_v, dtype=dtype, causal=causal, op="bwd",
        )
        for dim, dim_v, heads, kv_heads, rows, keys in SHAPES
        for dtype in ("float16", "bfloat16")
        for causal in (False, True)
    ]  # fmt: skip


CONFIG_CASES = [
    (name, index)
    for index, problem in enumerate(config_problems())
    for name in ("flash_bwd", "flash_bwd_ws", "flash_bwd_split")
    if KERNELS[name].serves(problem, NAMED_TARGETS["h200"]) is None
]


@pytest.mark.parametrize(("name", "index"), CONFIG_CASES)
def test_a_config_of_each_problem_meets_the_accuracy_rule(name: str, index: int) -> None:
    kernel, problem, target = KERNELS[name], config_problems()[index], current_target()
    reason = kernel.serves(problem, target)
    if reason is not None:
        pytest.skip(reason)
    seed = run_seed() + index
    configs = kernel.space.configs(problem, target)
    drawn = random.Random(seed).sample(configs, min(20, len(configs)))
    config, launcher = next(loaded(kernel, problem, drawn))
    print(f"seed {seed}: {problem.label()}: {config}")
    for case in gradient_cases(problem):
        assert case.why_wrong(launcher) is None, (problem.label(), config)
    assert FullGradients(problem).why_wrong(launcher) is None, (problem.label(), config)


@pytest.mark.parametrize(
    ("name", "dim"),
    [*(("flash_bwd_ws", dim) for dim in (64, 96, 128)),
     *(("flash_bwd_split", dim) for dim in (64, 128, 192, 256))],
)  # fmt: skip
@pytest.mark.parametrize("causal", [False, True])
def test_configs_of_the_hopper_kernels_meet_the_accuracy_rule(
    name: str, dim: int, causal: bool
) -> None:
    kernel, target = KERNELS[name], current_target()
    problem = Problem(
        batch=3, heads=6, kv_heads=2, seqlen_q=1234, seqlen_k=1500, head_dim=dim, head_dim_v=dim,
        dtype="bfloat16", causal=causal, op="bwd",
    )  # fmt: skip
    reason = kernel.serves(problem, target)
    if reason is not None:
        pytest.skip(reason)
    cases, full = gradient_cases(problem), FullGradients(problem)
    # The order of tiles alone changes no code.
    configs = {Config(**{**c, "GROUP_MB": 1}) for c in kernel.space.configs(problem, target)}
    assert len(configs) > 4
    seed = run_seed()
    print(f"seed {seed}")
    drawn = random.Random(seed).sample(sorted(configs, key=str), min(8, len(configs)))
    for config, launcher in loaded(kernel, problem, drawn):
        for case in (*cases, full):
            assert case.why_wrong(launcher) is None, config
