"""fp8 attention on the GPU: every kernel and config that the tuner may pick, and what is served."""

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import autoflash
from autoflash.dtypes import FP8
from autoflash.fp8 import key_order, values_by_row
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Problem
from autoflash.reference_fp8 import exact_fp8_attention
from autoflash.runtime import dispatch
from autoflash.runtime.inputs_fp8 import Operands
from autoflash.runtime.launcher import Launcher
from autoflash.space import Config
from autoflash.target import current_target
from autoflash.tuning.check import compare
from autoflash.tuning.check_fp8 import (
    FullFp8,
    expect,
    fp8_cases,
    make_operands,
    rounded,
    run_fp8_poisoned,
    stand_for,
)
from tests.gpu.support import any_config_of, loaded, poison, run_seed

SEED = run_seed()
LAYOUTS = ("rows", "columns", "permuted")
SCALES = ("tensor", "head", "block")
# dtype, kv_dtype, out_dtype
KINDS = ((FP8, "", ""), (FP8, "", "float16"), ("bfloat16", FP8, ""), ("float16", FP8, ""))
SHAPES = [
    # head_dim, head_dim_v, group, rows, keys, batch
    (64, 64, 1, 2048, 2048, 12),
    (128, 128, 4, 1000, 1000, 4),
    (128, 96, 1, 777, 900, 16),
    (192, 128, 2, 640, 500, 8),
    (256, 256, 1, 1024, 1024, 6),
    (96, 96, 8, 130, 1100, 8),
    (40, 72, 3, 333, 333, 2),
    (80, 80, 1, 40, 40, 2),
    (8, 8, 1, 17, 17, 2),
    (128, 128, 1, 1, 5000, 4),
]
EACH = pytest.mark.parametrize("name", [k.name for k in KERNELS.values() if k.fp8])


def problem_of(index: int, kind: tuple[str, str, str], **fields: object) -> Problem:
    dim, dim_v, group, rows, keys, batch = SHAPES[index]
    dtype, kv_dtype, out_dtype = kind
    values = {
        "batch": batch, "heads": 2 * group, "kv_heads": 2, "seqlen_q": rows, "seqlen_k": keys,
        "head_dim": dim, "head_dim_v": dim_v, "dtype": dtype, "kv_dtype": kv_dtype,
        "out_dtype": out_dtype, **fields,
    }  # fmt: skip
    return Problem(**values)


@pytest.fixture(autouse=True)
def has_e4m3() -> None:
    target = current_target()
    if target.vendor != "nvidia" or target.capability < 89:
        pytest.skip(f"{target.arch} has no e4m3")


# --- kernels


def check(kernel: Kernel, problem: Problem, config: Config, launcher: Launcher) -> None:
    print(f"{kernel.name}: {problem.label()} {config}")
    for case in fp8_cases(problem):
        assert case.why_wrong(launcher) is None, (problem.label(), config)
    full = FullFp8(problem)
    assert full.why_wrong(launcher) is None, (problem.label(), config)
    first, first_lse = run_fp8_poisoned(launcher, problem, full.given)
    for _ in range(20):
        again, again_lse = run_fp8_poisoned(launcher, problem, full.given)
        assert torch.equal(first, again), "not bitwise repeatable"
        assert torch.equal(first_lse, again_lse), "not bitwise repeatable"


def configs_of(kernel: Kernel, problem: Problem) -> list[Config]:
    reason = kernel.serves(problem, current_target())
    if reason is not None:
        pytest.skip(reason)
    return kernel.space.configs(problem, current_target())


@EACH
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(filter(None, kind)))
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_a_config_of_each_problem_meets_the_accuracy_rule(
    name: str, index: int, causal: bool, kind: tuple[str, str, str]
) -> None:
    lot = random.Random(f"{SEED} {name} {index} {causal} {kind}")
    print(f"seed {SEED}")
    choice = {"scales": lot.choice(SCALES), "v_layout": lot.choice(LAYOUTS)}
    problem = problem_of(index, kind, causal=causal, **choice)
    configs = configs_of(KERNELS[name], problem)
    drawn = lot.sample(configs, len(configs))
    check(KERNELS[name], problem, *next(loaded(KERNELS[name], problem, drawn)))


@pytest.mark.full
@EACH
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(filter(None, kind)))
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("index", range(len(SHAPES)))
def test_every_config_meets_the_accuracy_rule(
    name: str, index: int, v_layout: str, scales: str, kind: tuple[str, str, str]
) -> None:
    for causal in (False, True):
        problem = problem_of(index, kind, causal=causal, scales=scales, v_layout=v_layout)
        configs = configs_of(KERNELS[name], problem)
        for config, launcher in loaded(KERNELS[name], problem, configs):
            check(KERNELS[name], problem, config, launcher)


# --- what is served


def attend(given: Operands, causal: bool, **options: object) -> tuple[Tensor, Tensor]:
    """attention after poisoning."""
    poison(given.q.numel())
    q, k, v, *_ = given
    out, lse = autoflash.attention(
        q, k, v, **given.descales, v_layout=given.v_layout, out_dtype=given.out_dtype,
        causal=causal, return_lse=True, **options,
    )  # fmt: skip
    return out, lse


def held(problem: Problem, given: Operands, found: tuple[Tensor, Tensor]) -> None:
    """Holds out and LSE to the accuracy rule."""
    case = expect("served", problem, *stand_for(given))
    assert compare(case, *found) is None


@pytest.fixture(params=["served", *(k.name for k in KERNELS.values() if k.fp8)])
def each_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What is served, then any config of one kernel where that can run, with a printed seed."""
    if request.param != "served":
        monkeypatch.setattr(dispatch, "choose", any_config_of(request.param))
    dispatch.forget()
    yield request.param
    dispatch.forget()


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(filter(None, kind)))
def test_served(kind: tuple[str, str, str], v_layout: str, scales: str) -> None:
    for index, causal in itertools.product((1, 2, 6, 7, 9), (False, True)):
        problem = problem_of(index, kind, causal=causal, scales=scales, v_layout=v_layout)
        given = make_operands(problem, "cuda", seed=index)
        held(problem, given, attend(given, causal))


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("v_layout", LAYOUTS)
def test_layouts_views_and_rows_that_are_not_aligned(v_layout: str) -> None:
    problem = problem_of(1, KINDS[0], causal=True, scales="head", v_layout=v_layout)
    given = make_operands(problem, "cuda")
    expected = attend(given, True)
    held(problem, given, expected)

    def moved(x: Tensor) -> Tensor:
        wide = torch.full((*x.shape[:3], x.shape[3] + 13), 0x7F, dtype=torch.uint8, device="cuda")
        wide[..., 3 : 3 + x.shape[3]] = x.view(torch.uint8)
        return wide[..., 3 : 3 + x.shape[3]].view(x.dtype)

    shifted = given._replace(q=moved(given.q), k=moved(given.k), v=moved(given.v))
    held(problem, given, attend(shifted, True))

    # By token: rows of heads side by side; a transposed v stays as it is.
    def by_token(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous()

    tokens = given._replace(q=by_token(given.q), k=by_token(given.k))
    if v_layout == "rows":
        tokens = tokens._replace(v=by_token(given.v))
    out, lse = attend(tokens, True, layout="bshd")
    held(problem, given, (out.transpose(1, 2), lse))
    expanded = given._replace(
        k=given.k[:, :1].expand(-1, 2, -1, -1), v=given.v[:, :1].expand(-1, 2, -1, -1)
    )
    held(problem, expanded, attend(expanded, True))


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("kind", KINDS[::2], ids=["fp8", "mixed"])
@pytest.mark.parametrize("left_out", ["q_descale", "k_descale", "v_descale"])
def test_descales_left_out_by_query_head_and_strided(
    kind: tuple[str, str, str], left_out: str
) -> None:
    for scales in SCALES:
        problem = problem_of(1, kind, causal=True, scales=scales, v_layout="columns")
        given = make_operands(problem, "cuda")._replace(**{left_out: None})
        held(problem, given, attend(given, True))
        strided = {
            name: x.repeat_interleave(2, -1)[..., ::2] if x.dim() > 1 else x
            for name, x in given.descales.items()
            if x is not None
        }
        held(problem, given, attend(given._replace(**strided), True))
        if given.q_descale is not None and scales == "head":
            each = given.q_descale.repeat_interleave(4, 1) * torch.linspace(0.5, 2, 8).cuda()
            other = given._replace(q_descale=each)
            held(problem, other, attend(other, True))


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("scale", [0.2, -0.2, 0.0])
def test_scale(scale: float) -> None:
    problem = problem_of(1, KINDS[0], scales="block", v_layout="permuted")
    given = make_operands(problem, "cuda")
    out, lse = attend(given, False, scale=scale)
    q, k, v = stand_for(given)
    factor = scale * problem.head_dim**0.5
    case = expect("scale", problem, q * factor, k, v)
    assert compare(case, out, lse) is None


def case_11() -> tuple[list[Tensor], dict[str, Tensor]]:
    """B=2, Hq=8, Hk=2, S=256, D=128; scales per kv head, unequal between heads."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, h, 256, 128, generator=generator) for h in (8, 2, 2)]
    unequal = torch.tensor([[1.0, 0.5], [0.75, 2.0]], device="cuda")
    scales = {"q_descale": 0.5, "k_descale": 0.25, "v_descale": 0.5}
    fp8 = [x.to(torch.float8_e4m3fn).cuda() for x in tensors]
    return fp8, {name: s * unequal for name, s in scales.items()}


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("ones", [False, True])
def test_case_11_scales_count_once(ones: bool) -> None:
    (q, k, v), scales = case_11()
    if ones:
        scales = {name: torch.ones_like(x) for name, x in scales.items()}
    problem = Problem(
        batch=2, heads=8, kv_heads=2, seqlen_q=256, seqlen_k=256, head_dim=128, head_dim_v=128,
        dtype=FP8, scales="head",
    )  # fmt: skip
    given = Operands(q, k, v, *scales.values(), torch.bfloat16, "rows")
    found = attend(given, False)
    held(problem, given, found)
    quarter = given._replace(v_descale=scales["v_descale"] / 4)
    assert torch.equal(attend(quarter, False)[0] * 4, found[0])


@pytest.mark.usefixtures("each_kernel")
def test_case_11_one_dominant_key() -> None:
    (q, k, v), scales = case_11()
    wide = k.float()
    rows = q.float()[:, ::4, 7]
    wide[:, :, 100] = 30 * rows / rows.norm(dim=-1, keepdim=True)
    k = wide.clamp(-448, 448).to(torch.float8_e4m3fn)
    problem = Problem(
        batch=2, heads=8, kv_heads=2, seqlen_q=256, seqlen_k=256, head_dim=128, head_dim_v=128,
        dtype=FP8, scales="head",
    )  # fmt: skip
    given = Operands(q, k, v, *scales.values(), torch.bfloat16, "rows")
    held(problem, given, attend(given, False))


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("v_layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS[::2], ids=["fp8", "mixed"])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_reaches_just_the_rows_that_see_it(
    causal: bool, kind: tuple[str, str, str], v_layout: str
) -> None:
    problem = problem_of(1, kind, causal=causal, scales="block", v_layout=v_layout)
    q, k, v = (x.float() for x in stand_for(make_operands(problem, "cuda")))
    q[0, -1, 333, 0] = math.nan
    k[-1, 0, 500, 5] = math.inf
    for at in (3, 470, 999):
        v[0, 1, at, at % 128] = math.nan
    given = rounded(problem, q, k, v)
    out, lse = attend(given, causal)
    by_row = values_by_row(given.v, v_layout, problem.seqlen_k)
    want, want_lse = exact_fp8_attention(
        given.q, given.k, by_row, *given[3:6], causal=causal, scale=problem.head_dim**-0.5
    )
    assert torch.equal(out.isnan(), want.isnan())
    assert torch.equal(lse.isnan(), want_lse.isnan())
    assert bool(want.isnan().any())


@pytest.mark.usefixtures("each_kernel")
def test_what_lies_behind_the_last_key_counts_for_nothing() -> None:
    for v_layout in ("columns", "permuted"):
        problem = problem_of(2, KINDS[0], causal=True, scales="head", v_layout=v_layout)
        given = make_operands(problem, "cuda")
        found = attend(given, True)
        order = key_order(given.v.shape[3]) if v_layout == "permuted" else None
        keys = torch.arange(given.v.shape[3]) if order is None else order
        bits = given.v.view(torch.uint8)
        bits[..., (keys >= problem.seqlen_k).cuda()] = 0x7F
        assert torch.equal(attend(given, True)[0], found[0])


@pytest.mark.usefixtures("each_kernel")
def test_an_attention_sink_leaves_the_others_their_weight() -> None:
    """A first key with most of the weight: walked last, it doesn't push the others out of e4m3."""
    keys = 16384
    problem = Problem(
        batch=1, heads=2, kv_heads=2, seqlen_q=128, seqlen_k=keys, head_dim=64, head_dim_v=64,
        dtype=FP8, scales="head",
    )  # fmt: skip
    q = torch.ones(1, 2, 128, 64, device="cuda")
    k = torch.zeros(1, 2, keys, 64, device="cuda")
    # The others each have e^-13 of its weight, together 4 %.
    k[:, :, 0] = 13.0 / 8
    v = torch.ones(1, 2, keys, 64, device="cuda")
    v[:, :, 0] = 0
    given = rounded(problem, q, k, v)
    out, _ = attend(given, False)
    want, _ = exact_fp8_attention(
        given.q, given.k, given.v, *given[3:6], causal=False, scale=64**-0.5
    )
    assert want.mean().item() > 0.02
    torch.testing.assert_close(out.double(), want, rtol=0.05, atol=0.0)


def test_fp8kv_a_graph_streams_and_a_compiled_model() -> None:
    problem = problem_of(1, KINDS[2], scales="head")
    q, k, v = (x.bfloat16() for x in stand_for(make_operands(problem, "cuda")))
    kv = autoflash.quantize_kv_fp8(k, v)
    expected = autoflash.attention(q, kv, causal=True)
    compiled = torch.compile(autoflash.attention, fullgraph=True)
    assert torch.equal(compiled(q, kv, causal=True), expected)
    static = q.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = autoflash.attention(static, kv, causal=True)
    static.copy_(2 * q)
    graph.replay()
    assert torch.equal(out, autoflash.attention(2 * q, kv, causal=True))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        later = q * 2
        found = autoflash.attention(later, kv, causal=True)
    side.synchronize()
    assert torch.equal(found, out)
    told = autoflash.explain(q, kv, causal=True)
    assert KERNELS[told.kernel].fp8
    assert f"v_{kv.v_layout}" in told.problem or kv.v_layout == "rows"


def test_long_tensors_take_64_bit_offsets() -> None:
    """Heads that start behind 2^31 elements."""
    keys = 1 << 23
    k = torch.zeros(1, 3, keys, 128, dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    k[:, 2, -128:] = (16 * torch.randn(128, 128, device="cuda")).to(torch.float8_e4m3fn)
    q = torch.randn(1, 3, 16, 128, device="cuda").to(torch.float8_e4m3fn)
    v = k
    out, lse = autoflash.attention(q, k, v, return_lse=True)
    one = slice(2, 3)
    want, want_lse = exact_fp8_attention(
        q[:, one], k[:, one, -4096:], v[:, one, -4096:], None, None, None, causal=False,
        scale=128**-0.5,
    )  # fmt: skip
    # The others are zeros: each adds a weight of 1 to the sum, and nothing to out.
    total = want_lse.exp() + (keys - 4096)
    torch.testing.assert_close(lse[:, one].double(), total.log(), rtol=0.0, atol=0.1)
    expected = want * (want_lse.exp() / total).unsqueeze(-1)
    assert expected.abs().max() > 5
    torch.testing.assert_close(out[:, one].double(), expected, rtol=0.0, atol=3.0)


def test_tuned_is_what_serves() -> None:
    problem = problem_of(7, KINDS[0], causal=True, scales="head", v_layout="columns")
    results = autoflash.tune([problem], trials=4, budget_s=120)
    assert results[0].record is not None
    dispatch.forget()
    given = make_operands(problem, "cuda")
    held(problem, given, attend(given, True))
    told = autoflash.explain(*given[:3], **given.descales, v_layout=given.v_layout, causal=True)
    assert (told.how, told.kernel) == ("tuned", results[0].record.kernel)
