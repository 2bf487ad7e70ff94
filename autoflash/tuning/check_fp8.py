"""The accuracy rule applied to one candidate for fp8: check.py with scales, layouts and what P's
rounding explains."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoflash.dtypes import FP8
from autoflash.fp8 import dequantize, values_by_row
from autoflash.kernels.kernel import Call
from autoflash.problem import FP8_FIELDS, Problem
from autoflash.quantize import quantize_fp8
from autoflash.reference import error_allowance, exact_attention
from autoflash.reference_fp8 import fp8_allowance, lse_allowance
from autoflash.runtime.inputs import all_strides, output_like
from autoflash.runtime.inputs_fp8 import Operands, v_rows
from autoflash.runtime.launcher import Bound, Launcher
from autoflash.runtime.scales import scale_strides
from autoflash.tuning.check import (
    Expected,
    FullProblem,
    Repeat,
    Rows,
    compare,
    hard_inputs,
    make_inputs,
    poisoned_scratch,
)

_LONG_Q, _LONG_K = 128, 16384


@dataclass(frozen=True, kw_only=True)
class Fp8Case(Expected):
    """Operands with what is expected of them."""

    given: Operands

    def why_wrong(self, launcher: Launcher) -> str | None:
        """How the launcher breaks the accuracy rule here, or None."""
        return compare(self, *run_fp8_poisoned(launcher, self.problem, self.given))


def make_operands(problem: Problem, device: str, seed: int = 0) -> Operands:
    """Normal q, k and v of ``problem``, rounded under the scales that fit them."""
    return rounded(problem, *make_inputs(_wide(problem), device, seed))


def rounded(problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Operands:
    """q, k and v as ``problem`` has them: in its dtypes and layout, with scales."""
    layout = problem.v_layout
    x = quantize_fp8(
        q, k, v, granularity=problem.scales, transpose_v=layout != "rows",
        permute_keys=layout == "permuted",
    )  # fmt: skip
    is_fp8 = problem.dtype == FP8
    return Operands(
        q=x.q if is_fp8 else q.to(getattr(torch, problem.dtype)), k=x.k, v=x.v,
        q_descale=x.q_descale if is_fp8 else None, k_descale=x.k_descale, v_descale=x.v_descale,
        out_dtype=getattr(torch, problem.dtype_of_out), v_layout=layout,
    )  # fmt: skip


def fp8_cases(problem: Problem, device: str = "cuda") -> list[Fp8Case]:
    """hard_inputs, rounded, with what is expected of them, and many values of one sign: sums over
    all keys, in which too few bits show."""
    found = hard_inputs(_wide(problem), device, batch=min(problem.batch, 2))
    rows, keys = min(problem.seqlen_q, _LONG_Q), min(problem.seqlen_k, _LONG_K)
    long = replace(
        _wide(problem), batch=1, heads=2 * problem.group, kv_heads=2, seqlen_q=rows, seqlen_k=keys
    )
    q, k, v = make_inputs(long, device, seed=3)
    found.append(("values with a mean", long, (q, k, v + 2)))
    fields = {name: getattr(problem, name) for name in ("dtype", *FP8_FIELDS)}
    cases = []
    for name, wide, (q, k, v) in found:
        relative = replace(wide, **fields)
        cases.append(make_fp8_case(name, relative, rounded(relative, q, k, v)))
    return cases


def make_fp8_case(name: str, problem: Problem, given: Operands) -> Fp8Case:
    """A case with its fp64 answer and the errors that the accuracy rule allows."""
    expected = expect(name, problem, *stand_for(given))
    return Fp8Case(**vars(expected), given=given)


def expect(name: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Expected:
    """What is expected of q, k and v, which are fp64: what the operands of ``problem`` stand for.

    With a q of 16 bits the rule is that of 16 bits, on k and v rounded to as many.
    """
    scale = problem.head_dim**-0.5
    options = {"causal": problem.causal, "scale": scale}
    out, lse = exact_attention(q, k, v, **options)
    if problem.dtype == FP8:
        dtype = getattr(torch, problem.dtype_of_out)
        allowance = fp8_allowance(q, k, v, out, **options, out_dtype=dtype)
        tolerance = Expected.lse_tolerance + lse_allowance(q, k, **options)
        return Expected(
            name=name, problem=problem, out=out, lse=lse, allowance=allowance,
            lse_tolerance=tolerance,
        )  # fmt: skip
    half = (x.to(getattr(torch, problem.dtype)) for x in (q, k, v))
    most = error_allowance(*half, **options, exact=out)
    return Expected(name=name, problem=problem, out=out, lse=lse, allowance=most)


def stand_for(given: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, by rows, in fp64: what the operands stand for."""
    v = values_by_row(given.v, given.v_layout, given.k.shape[2])
    q, k = dequantize(given.q, given.q_descale), dequantize(given.k, given.k_descale)
    return q, k, dequantize(v, given.v_descale)


def run_fp8_poisoned(
    launcher: Launcher, problem: Problem, given: Operands
) -> tuple[Tensor, Tensor]:
    """out and LSE of one launch into buffers full of NaN."""
    out = output_like(given.q, v_rows(given, False), dtype=given.out_dtype).fill_(math.nan)
    lse = torch.full(given.q.shape[:3], math.nan, device=given.q.device)
    q, k, v, *descales = given[:6]
    bound = bind_fp8(launcher, problem, given, out)
    scratch = poisoned_scratch(launcher, problem, q.device)
    Repeat(bound, (q, k, v, out, lse, *descales, *scratch))()
    torch.cuda.synchronize()
    return out, lse


def bind_fp8(launcher: Launcher, problem: Problem, given: Operands, out: Tensor) -> Bound:
    """``launcher`` for these tensors, LSE written."""
    strides: dict[str, tuple[int, ...]] = {}
    strides |= all_strides(False, q=given.q, k=given.k, v=given.v, out=out)
    for name, x in given.descales.items():
        if x is not None:
            strides[name] = scale_strides(x, problem.kv_heads)
    names = frozenset({*strides, "lse"})
    scale = problem.head_dim**-0.5
    return launcher.bind(Call(problem=problem, scale=scale, strides=strides, given=names))


class FullFp8(FullProblem):
    """FullProblem of fp8."""

    def _inputs(self, device: str) -> tuple[Tensor | None, ...]:
        self.given = make_operands(self.problem, device)
        return self.given[:6]

    def _output(self) -> Tensor:
        return output_like(self.q, v_rows(self.given, False), dtype=self.given.out_dtype)

    def _bound(self, launcher: Launcher) -> Bound:
        return bind_fp8(launcher, self.problem, self.given, self.out)

    def _case(self, part: Problem, at: Rows, keys: Rows) -> Expected:
        # One head alone becomes fp64.
        (one, head, rows), (_, kv_head, seen) = at, keys
        q, k, v, *descales = self.given[:6]
        q_descale, k_descale, v_descale = (
            x[one, head if x.shape[1] == q.shape[1] else kv_head]
            if x is not None and x.dim() > 1
            else x
            for x in descales
        )
        given = self.given._replace(
            q=q[one, head], k=k[one, kv_head], v=v[one, kv_head],
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        )  # fmt: skip
        q, k, v = stand_for(given)
        return expect("full size", part, q[:, :, rows], k[:, :, seen], v[:, :, seen])


def _wide(problem: Problem) -> Problem:
    """The same of fp32, before it is rounded."""
    return replace(problem, dtype="float32", **FP8_FIELDS)
