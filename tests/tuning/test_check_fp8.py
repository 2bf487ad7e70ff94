"""The accuracy rule of fp8 as the worker applies it: what it lets through, and what it catches."""

import functools
import math

import pytest
import torch

from autoflash.dtypes import FP8
from autoflash.fp8 import values_by_row
from autoflash.problem import Problem
from autoflash.reference import attention_forward, exact_attention, per_kv_head
from autoflash.reference_fp8 import emulate_fp8_attention, hopper_product, to_e4m3
from autoflash.tuning.check import compare
from autoflash.tuning.check_fp8 import FullFp8, fp8_cases, make_fp8_case, make_operands, stand_for
from autoflash.tuning.worker import checks_of

PROBLEM = Problem(
    batch=4, heads=8, kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=32, head_dim_v=16,
    dtype=FP8, causal=True, scales="block", v_layout="permuted",
)  # fmt: skip
MIXED = Problem(**{**PROBLEM.as_dict(), "dtype": "float16", "kv_dtype": FP8})
NAMES = ["ragged", "outlier channels", "large logits", "values with a mean"]


@functools.cache
def cases(problem=PROBLEM):
    return {case.name: case for case in fp8_cases(problem, "cpu")}


def emulated(case, given=None, **options):
    """What a good kernel gives."""
    given = given or case.given
    v = values_by_row(given.v, given.v_layout, given.k.shape[2])
    out, lse = emulate_fp8_attention(
        given.q, given.k, v, *given[3:6], causal=case.problem.causal,
        scale=case.problem.head_dim**-0.5, **options,
    )  # fmt: skip
    return out.to(given.out_dtype), lse


def added_up_in_14_bits(case, keys):
    """out where the matrix unit adds up P v of each ``keys`` keys, and fp32 these sums."""
    q, k, _ = stand_for(case.given)
    scores = per_kv_head(q, k.mT) * case.problem.head_dim**-0.5
    p = torch.exp(scores - scores.amax(-1, keepdim=True)) * 2**8
    p8 = to_e4m3(p.float()).float()
    v = values_by_row(case.given.v, case.given.v_layout, k.shape[2]).float()
    parts = zip(p8.split(keys, 3), v.split(keys, 2), strict=True)
    out = sum(hopper_product(*part) for part in parts)
    return (case.given.v_descale * out / p.sum(-1, keepdim=True)).to(case.given.out_dtype)


def test_sums_that_swallow_what_is_added_break_the_rule():
    changes = {"seqlen_k": 16384, "causal": False, "scales": "tensor", "heads": 2}
    case = cases(Problem(**{**PROBLEM.as_dict(), **changes}))["values with a mean"]
    assert case.problem.seqlen_k == 16384
    assert compare(case, added_up_in_14_bits(case, 128), case.lse) is None
    reason = compare(case, added_up_in_14_bits(case, 16384), case.lse)
    assert reason.startswith("values with a mean: error ")


@pytest.mark.parametrize("problem", [PROBLEM, MIXED], ids=["fp8", "mixed"])
def test_cases_are_small_relatives(problem):
    found = cases(problem)
    assert list(found) == NAMES
    for name, case in found.items():
        p, given = case.problem, case.given
        batch = 1 if name == "values with a mean" else 2
        assert (p.batch, p.heads, p.kv_heads) == (batch, 8, 2)
        assert p == Problem(**{**problem.as_dict(), "batch": batch, "seqlen_q": p.seqlen_q,
                               "seqlen_k": p.seqlen_k})  # fmt: skip
        assert given.q.dtype == (torch.float16 if problem is MIXED else torch.float8_e4m3fn)
        assert given.k.dtype == given.v.dtype == torch.float8_e4m3fn
        assert given.v.shape == (batch, 2, 16, -(-p.seqlen_k // 16) * 16)
        assert (given.q_descale is None) == (problem is MIXED)
        assert given.k_descale.shape == (batch, 2, -(-p.seqlen_k // 128))
        # A scale that is left out, or counted twice, shows.
        assert given.k_descale.std() > 0
        assert (given.k_descale - 1).abs().min() > 0.5
        assert len(given.v_descale.unique()) == given.v_descale.numel()


@pytest.mark.parametrize("block_keys", [32, 64, 128])
@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("name", NAMES)
def test_a_good_kernel_passes(name, scales, last_first, block_keys):
    problem = Problem(**{**PROBLEM.as_dict(), "scales": scales})
    case = cases(problem)[name]
    out, lse = emulated(case, block_keys=block_keys, last_first=last_first)
    assert compare(case, out, lse) is None
    # With room, but not much.
    excess = ((out.double() - case.out).abs() / case.allowance).max().item()
    assert 0.2 < excess < 0.85


@pytest.mark.parametrize("head_dim", [32, 128, 256])
@pytest.mark.parametrize("name", NAMES)
def test_the_sums_of_hopper_pass(name, head_dim):
    changes = {"head_dim": head_dim, "batch": 1, "heads": 2, "causal": False, "scales": "tensor"}
    case = cases(Problem(**{**PROBLEM.as_dict(), **changes}))[name]
    out, lse = emulated(case, hopper_scores=True)
    assert compare(case, out, lse) is None
    error, plain = ((x - case.lse).abs() for x in (lse, emulated(case)[1]))
    # It is these sums that are wrong, and what is granted them isn't far away.
    assert error.max() > 2 * plain.max()
    if name in ("outlier channels", "large logits") and head_dim > 32:
        assert (error / (case.lse_tolerance + 1e-5 * case.lse.abs())).max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_a_good_mixed_kernel_passes(name):
    case = cases(MIXED)[name]
    q, k, v = (x.float() for x in stand_for(case.given))
    out, lse = attention_forward(q, k, v, causal=True, scale=32**-0.5)
    assert compare(case, out.half(), lse) is None
    assert compare(case, (out * 2).half(), lse).startswith(f"{name}: error ")


@pytest.mark.parametrize("left_out", ["q_descale", "k_descale", "v_descale"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_scale_that_is_dropped_or_counted_twice(name, twice, left_out):
    case = cases()[name]
    scale = getattr(case.given, left_out)
    given = case.given._replace(**{left_out: scale * scale if twice else None})
    assert compare(case, *emulated(case, given)) is not None


def test_scales_of_the_wrong_block():
    case = cases()["ragged"]
    for name in ("k_descale", "v_descale"):
        scale = getattr(case.given, name)
        assert scale.shape[2] > 2
        # As large as they differ in practice.
        wrong = case.given._replace(**{name: scale.roll(1, 2)})
        exact = make_fp8_case("", case.problem, case.given).out
        assert not torch.equal(emulated(case, wrong)[0], emulated(case)[0])
        assert exact.equal(case.out)


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_diagonal_that_is_off_by_one(shift):
    # The first rows see few keys.
    case = cases()["outlier channels"]
    q, k, v = (x.float() for x in stand_for(case.given))
    keys, values = (k[:, :, 1:], v[:, :, 1:]) if shift > 0 else (k[:, :, :-1], v[:, :, :-1])
    out, lse = attention_forward(q, keys, values, causal=True, scale=32**-0.5)
    assert compare(case, out.bfloat16(), lse) is not None


def test_keys_in_the_wrong_order():
    case = cases()["ragged"]
    wrong = case.given._replace(v_layout="columns")
    assert compare(case, *emulated(case, wrong)).startswith("ragged: error ")


def test_an_error_above_the_allowance_of_its_element():
    case = cases()["ragged"]
    allowed = case.allowance[1, 3, 200, 7].item()
    assert allowed < case.allowance.max().item()
    out = case.out.clone()
    out[1, 3, 200, 7] += allowed * 0.99
    assert compare(case, out, case.lse) is None
    out[1, 3, 200, 7] = case.out[1, 3, 200, 7] - allowed * 1.01
    reason = compare(case, out, case.lse)
    assert reason == f"ragged: error {allowed * 1.01:.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_value_that_is_not_finite(value):
    case = cases()["ragged"]
    out, lse = emulated(case)
    out[-1, -1, -1, -1] = value
    assert compare(case, out, lse) == "ragged: out holds NaN or infinity"


def test_a_wrong_lse():
    case = cases()["ragged"]
    out, lse = emulated(case)
    assert compare(case, out, lse / math.log(2)).startswith("ragged: LSE error ")
    # P is scaled by 2^8, which the LSE must not show.
    assert compare(case, out, lse + 8 * math.log(2)).startswith("ragged: LSE error ")
    wrong = lse.clone()
    wrong[0, 0, 5] += 0.2
    assert compare(case, out, wrong).startswith("ragged: LSE error ")


@pytest.mark.parametrize("scales", ["tensor", "head", "block"])
@pytest.mark.parametrize("dtype", [FP8, "float16"])
@pytest.mark.parametrize(("rows", "keys"), [(300, 300), (40, 300), (500, 60)])
def test_the_full_problem_is_checked_at_its_end_middle_and_start(rows, keys, dtype, scales):
    fields = {"batch": 3, "heads": 6, "kv_heads": 2, "dtype": dtype, "kv_dtype": FP8}
    fields |= {"scales": scales, "seqlen_q": rows, "seqlen_k": keys}
    problem = Problem(**{**PROBLEM.as_dict(), **fields})
    full = FullFp8(problem, "cpu", copies=2)
    out, lse = exact_attention(*stand_for(full.given), causal=True, scale=32**-0.5)
    assert full._parts
    for at, case in full._parts:
        torch.testing.assert_close(case.out, out[at], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(case.lse, lse[at], rtol=1e-12, atol=1e-12)
    assert full.out.dtype == (torch.float16 if dtype == "float16" else torch.bfloat16)
    one, other = full._sets
    assert [x is None for x in one] == [x is None for x in other]
    assert (one[5] is None) == (dtype == "float16")


def test_inputs_are_repeatable():
    problem = Problem(**{**PROBLEM.as_dict(), "seqlen_q": 130, "seqlen_k": 150})
    one, same, other = (make_operands(problem, "cpu", seed) for seed in (0, 0, 1))
    assert all(torch.equal(x.float(), y.float()) for x, y in zip(one[:6], same[:6], strict=True))
    assert not torch.equal(one.q.float(), other.q.float())


def test_the_worker_picks_the_checks_of_the_problem():
    assert checks_of(PROBLEM) == checks_of(MIXED) == (FullFp8, fp8_cases)
