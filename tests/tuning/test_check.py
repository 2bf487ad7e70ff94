"""The accuracy rule as the worker applies it: what it lets through, and what it catches."""

import functools
import math

import pytest
import torch

from autoflash.problem import Problem
from autoflash.reference import attention_forward, error_allowance, exact_attention
from autoflash.tuning.check import FullProblem, check_cases, compare, make_case, make_inputs

PROBLEM = Problem(
    batch=4, heads=8, kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=32, head_dim_v=16,
    dtype="float16", causal=True,
)  # fmt: skip
NAMES = ["ragged", "outlier channels", "large logits"]


@functools.cache
def cases():
    return {case.name: case for case in check_cases(PROBLEM, "cpu")}


def answer(case):
    """What a good kernel gives: computed in fp32, rounded once."""
    problem = case.problem
    return attention_forward(
        case.q, case.k, case.v, causal=problem.causal, scale=problem.head_dim**-0.5
    )


def test_inputs_are_normal_and_repeatable():
    problem = Problem(**{**PROBLEM.as_dict(), "seqlen_q": 500, "seqlen_k": 700})
    q, k, v = make_inputs(problem, "cpu")
    assert q.shape == (4, 8, 500, 32)
    assert k.shape == (4, 2, 700, 32)
    assert v.shape == (4, 2, 700, 16)
    for x in (q, k, v):
        assert x.dtype == torch.float16
        assert x.is_contiguous()
        assert abs(x.float().mean().item()) < 0.02
        assert abs(x.float().std().item() - 1) < 0.02
    assert all(map(torch.equal, make_inputs(problem, "cpu"), (q, k, v)))
    assert not torch.equal(make_inputs(problem, "cpu", seed=1)[0], q)


def test_cases_are_small_relatives():
    assert list(cases()) == NAMES
    for case in cases().values():
        p = case.problem
        assert (p.batch, p.heads, p.kv_heads, p.group) == (2, 8, 2, 4)
        assert (p.head_dim, p.head_dim_v, p.dtype, p.causal) == (32, 16, "float16", True)
        assert case.q.shape == (2, 8, p.seqlen_q, 32)
        # Ragged: a multiple of no tile.
        assert p.seqlen_q % 16 != 0
        assert p.seqlen_k % 16 != 0
    lengths = [(case.problem.seqlen_q, case.problem.seqlen_k) for case in cases().values()]
    assert lengths == [(333, 589), (333, 222), (167, 589)]


def test_the_hard_inputs_are_hard():
    outliers = cases()["outlier channels"]
    assert outliers.q[..., ::17].abs().mean() > 10 * outliers.q[..., 1::17].abs().mean()
    assert outliers.v[..., ::13].abs().mean() > 10 * outliers.v[..., 1::13].abs().mean()
    # Its first rows see no key.
    assert torch.isinf(outliers.lse).any(-1).all()
    large = cases()["large logits"]
    assert large.lse.abs().max() > 5 * cases()["ragged"].lse.abs().max()


def test_short_problems_have_short_cases():
    short = Problem(**{**PROBLEM.as_dict(), "batch": 1, "seqlen_q": 1, "seqlen_k": 1})
    for case in check_cases(short, "cpu"):
        assert (case.problem.batch, case.problem.seqlen_q, case.problem.seqlen_k) == (1, 1, 1)
        assert compare(case, *answer(case)) is None


def test_a_case_knows_its_answer():
    case = cases()["ragged"]
    options = {"causal": True, "scale": 32**-0.5}
    out, lse = exact_attention(case.q, case.k, case.v, **options)
    assert torch.equal(case.out, out)
    assert torch.equal(case.lse, lse)
    assert case.allowance == error_allowance(case.q, case.k, case.v, **options)
    assert 1e-3 < case.allowance < 0.02


@pytest.mark.parametrize("name", NAMES)
def test_a_good_kernel_passes(name):
    assert compare(cases()[name], *answer(cases()[name])) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite(value):
    case = cases()["ragged"]
    out, lse = answer(case)
    out[-1, -1, -1, -1] = value
    assert compare(case, out, lse) == "ragged: out holds NaN or infinity"


def test_an_error_above_the_allowance():
    case = cases()["ragged"]
    out, lse = answer(case)
    out = case.out.clone()
    out[1, 3, 200, 7] += case.allowance * 0.99
    assert compare(case, out, lse) is None
    out[1, 3, 200, 7] = case.out[1, 3, 200, 7] - case.allowance * 1.01
    reason = compare(case, out, lse)
    assert reason == f"ragged: error {case.allowance * 1.01:.2e}, allowed {case.allowance:.2e}"


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_diagonal_that_is_off_by_one(shift):
    case = cases()["ragged"]
    keys = case.k[:, :, 1:] if shift > 0 else case.k
    values = case.v[:, :, 1:] if shift > 0 else case.v
    if shift < 0:
        keys, values = case.k[:, :, :-1], case.v[:, :, :-1]
    out, lse = attention_forward(case.q, keys, values, causal=True, scale=32**-0.5)
    assert compare(case, out, lse).startswith("ragged: error ")


def test_a_wrong_lse():
    case = cases()["ragged"]
    out, lse = answer(case)
    wrong = lse.clone()
    wrong[0, 0, 5] += 0.003
    assert compare(case, out, wrong).startswith("ragged: LSE error 3.0")
    wrong = lse.clone()
    wrong[0, 0, 5] += 0.001
    assert compare(case, out, wrong) is None
    # Base 2 instead of e.
    assert compare(case, out, lse / math.log(2)).startswith("ragged: LSE error ")


@pytest.mark.parametrize(
    ("name", "row", "value"),
    [
        ("ragged", 5, math.nan),
        ("ragged", 5, -math.inf),
        ("ragged", 5, math.inf),
        # Rows 0 to 110 of that case see no key.
        ("outlier channels", 0, 0.0),
        ("outlier channels", 110, math.nan),
        ("outlier channels", 111, -math.inf),
    ],
)
def test_an_lse_that_is_infinite_in_the_wrong_place(name, row, value):
    case = cases()[name]
    out, lse = answer(case)
    lse[1, 2, row] = value
    expected = f"{name}: LSE is NaN, or infinite where it should not be"
    assert compare(case, out, lse) == expected


def test_rows_that_see_no_key_must_be_zero():
    case = cases()["outlier channels"]
    out, lse = answer(case)
    assert compare(case, out, lse) is None
    out[0, 0, 0] = 1.0
    assert compare(case, out, lse).startswith("outlier channels: error 1.00e+00, allowed ")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (300, 200), (40, 300), (500, 60)])
def test_the_full_problem_is_checked_at_its_end_middle_and_start(causal, rows, keys):
    fields = {"batch": 3, "heads": 6, "kv_heads": 2, "causal": causal}
    problem = Problem(**{**PROBLEM.as_dict(), **fields, "seqlen_q": rows, "seqlen_k": keys})
    full = FullProblem(problem, "cpu")
    out, lse = exact_attention(full.q, full.k, full.v, causal=causal, scale=32**-0.5)
    places = []
    for at, case in full._parts:
        torch.testing.assert_close(case.out, out[at], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(case.lse, lse[at], rtol=1e-12, atol=1e-12)
        places.append((at[0].start, at[1].start, at[2].stop))
    expected = [(2, 5, rows), (1, 2, round((rows - min(64, rows)) / 2) + min(64, rows)),
                (0, 0, min(64, rows))]  # fmt: skip
    seen = [place for place in expected if not causal or keys - rows + place[2] > 0]
    assert places == seen


def test_the_last_rows_of_a_bottom_right_mask_are_one_again():
    """What the check at full size rests on."""
    problem = Problem(**{**PROBLEM.as_dict(), "batch": 1, "seqlen_q": 100, "seqlen_k": 90})
    q, k, v = make_inputs(problem, "cpu")
    whole, whole_lse = exact_attention(q, k, v, causal=True, scale=32**-0.5)
    part = Problem(**{**problem.as_dict(), "heads": 1, "kv_heads": 1, "seqlen_q": 30})
    case = make_case("last", part, q[:, -1:, -30:], k[:, -1:], v[:, -1:])
    torch.testing.assert_close(case.out, whole[:, -1:, -30:], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(case.lse, whole_lse[:, -1:, -30:], rtol=1e-12, atol=1e-12)
