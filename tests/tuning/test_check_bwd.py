"""The accuracy rule for gradients as the worker applies it: what it lets through and what not."""

import functools

import pytest
import torch

from autoflash.problem import Problem
from autoflash.reference import attention_backward, plain_gradients
from autoflash.tuning.check_bwd import FullGradients, gradient_cases

PROBLEM = Problem(
    batch=2, heads=4, kv_heads=2, seqlen_q=300, seqlen_k=200, head_dim=32, head_dim_v=16,
    dtype="float16", causal=True, op="bwd",
)  # fmt: skip
NAMES = ["ragged", "outlier channels", "large logits"]


@functools.cache
def cases():
    return {case.name: case for case in gradient_cases(PROBLEM, "cpu")}


def answer(case, **changes):
    """What a good kernel gives: computed in fp32, rounded once; with changed inputs, a bad one."""
    inputs = {"dlse": None, **case.inputs, **changes}
    order = ("dout", "dlse", "q", "k", "v", "out", "lse")
    options = {"causal": case.problem.causal, "scale": case.problem.head_dim**-0.5}
    return attention_backward(*(inputs[name] for name in order), **options)


def test_cases_are_small_relatives_of_three_batches():
    assert list(cases()) == NAMES
    for case in cases().values():
        p = case.problem
        assert (p.op, p.batch, p.heads, p.kv_heads) == ("bwd", 3, 4, 2)
        assert [tuple(x.shape) for x in case.exact] == [
            (3, 4, p.seqlen_q, 32), (3, 2, p.seqlen_k, 32), (3, 2, p.seqlen_k, 16),
        ]  # fmt: skip
        assert all(x.dtype == torch.float64 for x in case.exact)
        assert min(case.allowed) >= 1e-3
    assert [("dlse" in case.inputs) for case in cases().values()] == [True, False, False]


@pytest.mark.parametrize("name", NAMES)
def test_a_good_kernel_passes(name):
    assert cases()[name].compare(answer(cases()[name])) is None


@pytest.mark.parametrize("name", NAMES)
def test_the_yardstick_passes(name):
    case = cases()[name]
    inputs = {"dlse": None, **case.inputs}
    grads = plain_gradients(
        *(inputs[n] for n in ("dout", "dlse", "q", "k", "v")),
        causal=True, scale=PROBLEM.head_dim**-0.5,
    )  # fmt: skip
    assert case.compare(grads) is None


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_gradient_is_named(name, index):
    case = cases()[name]
    grads = list(answer(case))
    which = ("dq", "dk", "dv")[index]
    good = grads[index]
    grads[index] = good.clone()
    grads[index][-1, -1, -1, -1] += 10 * case.allowed[index]
    assert case.compare(tuple(grads)).startswith(f"{name}: {which} error ")
    grads[index] = good.clone()
    grads[index][0, 0, 0, 0] = float("nan")
    assert case.compare(tuple(grads)) == f"{name}: {which} holds NaN or infinity"


def test_typical_faults_are_caught():
    case = cases()["ragged"]
    assert "dq error" in case.compare(answer(case, dlse=None))
    assert case.compare(answer(case, lse=case.inputs["lse"] + 0.05)) is not None
    assert case.compare(answer(case, out=case.inputs["out"] * 0.9)) is not None
    dq, dk, dv = answer(case)
    assert "dk error" in case.compare((dq, dk.flip(1), dv))
    assert "dv error" in case.compare((dq, dk, dv / PROBLEM.group))


@pytest.mark.parametrize("causal", [False, True])
def test_samples_at_full_size(causal):
    problem = Problem(**{**PROBLEM.as_dict(), "causal": causal})
    full = FullGradients(problem, "cpu")
    assert full.compare() == "full size: dq holds NaN"
    order = ("dout", "q", "k", "v", "out", "lse")
    dout, *others = (full.inputs[name] for name in order)
    scale = problem.head_dim**-0.5
    grads = attention_backward(dout, None, *others, causal=causal, scale=scale)
    for grad, found in zip(full.grads.values(), grads, strict=True):
        grad.copy_(found)
    assert full.compare() is None
    for name, at in (("dq", (-1, -1, -1)), ("dk", (0, 0, 0)), ("dv", (-1, -1, -1))):
        kept = full.grads[name][at].clone()
        full.grads[name][at] += 1
        assert full.compare().startswith(f"full size: {name} error ")
        full.grads[name][at] = kept
    assert full.compare() is None
