"""The accuracy rule applied to the gradients of one candidate, as check.py does to the forward."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.kernels.kernel import TENSORS, Call
from autoflash.problem import Problem
from autoflash.reference import (
    allowance,
    attention_backward,
    attention_forward,
    exact_attention,
    exact_gradients,
    gradient_allowances,
)
from autoflash.runtime.dispatch import attention_fwd
from autoflash.runtime.inputs import all_strides, output_like
from autoflash.runtime.launcher import Launcher
from autoflash.tuning.check import Repeat, hard_inputs, make_inputs, poisoned_scratch

# Rows (for dq) and keys (for dk and dv) that are compared at full size, at each of three places.
_SLICE = 64
_NAMES = ("dq", "dk", "dv")
Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class GradientCase:
    """Inputs of a backward with the gradients that are expected and the errors that are allowed."""

    name: str
    problem: Problem
    inputs: Tensors
    exact: tuple[Tensor, ...]
    allowed: list[float]

    def why_wrong(self, launcher: Launcher) -> str | None:
        """How the launcher breaks the accuracy rule here, or None."""
        grads = poisoned(self.inputs)
        backward(launcher, self.problem, self.inputs, grads)()
        torch.cuda.synchronize()
        return self.compare(tuple(grads[name] for name in _NAMES))

    def compare(self, grads: tuple[Tensor, ...]) -> str | None:
        """How (dq, dk, dv) break the accuracy rule, or None."""
        found = zip(_NAMES, grads, self.exact, self.allowed, strict=True)
        return next(filter(None, (_why_off(self.name, *item) for item in found)), None)


def _why_off(case: str, name: str, grad: Tensor, exact: Tensor, allowed: float) -> str | None:
    if not bool(torch.isfinite(grad).all()):
        return f"{case}: {name} holds NaN or infinity"
    error = (grad.double() - exact).abs().max().item() if grad.numel() else 0.0
    return None if error <= allowed else f"{case}: {name} error {error:.2e}, allowed {allowed:.2e}"


def gradient_cases(problem: Problem, device: str = "cuda") -> list[GradientCase]:
    """Small relatives of ``problem`` with inputs of each kind; some have a gradient of the LSE."""
    cases = []
    # Two batches may hide a wrong stride that three show.
    for number, (name, relative, (q, k, v)) in enumerate(hard_inputs(problem, device, batch=3)):
        generator = torch.Generator(device=device).manual_seed(100 + number)
        shape = (*q.shape[:3], problem.head_dim_v)
        dout = torch.randn(shape, device=device, dtype=q.dtype, generator=generator)
        dlse = None
        if name == "ragged":
            dlse = torch.randn(q.shape[:3], device=device, generator=generator)
        cases.append(make_gradient_case(name, relative, q, k, v, dout, dlse))
    return cases


def make_gradient_case(
    name: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None
) -> GradientCase:
    """A GradientCase; out and LSE are the exact ones, as a forward would have rounded them.

    Expected is what fp64 makes of the tensors that the kernel is given, out as it is rounded: where
    a row attends to one key almost alone, dP - delta is as large as that rounding, and no backward
    that starts from out can know better. Allowed is what plain PyTorch, which keeps P, gets wrong.
    """
    options = {"causal": problem.causal, "scale": problem.head_dim**-0.5}
    out, lse = exact_attention(q, k, v, **options)
    exact = exact_gradients(dout, dlse, q, k, v, **options)
    allowed = gradient_allowances(dout, dlse, q, k, v, exact=exact, **options)
    inputs = {"q": q, "k": k, "v": v, "out": out.to(q.dtype), "lse": lse.float(), "dout": dout}
    if dlse is not None:
        inputs["dlse"] = dlse
    wide = {name: x.double() for name, x in inputs.items()}
    expected = attention_backward(
        wide["dout"], wide.get("dlse"), wide["q"], wide["k"], wide["v"], wide["out"], wide["lse"],
        **options,
    )  # fmt: skip
    return GradientCase(name=name, problem=problem, inputs=inputs, exact=expected, allowed=allowed)


def poisoned(inputs: Tensors) -> Tensors:
    """dq, dk and dv full of NaN."""
    return {name: output_like(x, x).fill_(math.nan) for name, x in _named(inputs).items()}


def _named(inputs: Tensors) -> Tensors:
    return {f"d{name}": inputs[name] for name in "qkv"}


def backward(launcher: Launcher, problem: Problem, inputs: Tensors, grads: Tensors) -> Repeat:
    """The launches of the whole chain, with their arguments filled in."""
    tensors = inputs | grads
    strides = all_strides(False, **{n: x for n, x in tensors.items() if x.dim() == 4})
    scale = problem.head_dim**-0.5
    call = Call(problem=problem, scale=scale, strides=strides, given=frozenset(tensors))
    scratch = poisoned_scratch(launcher, problem, inputs["q"].device)
    given = (tensors.get(name) for name in TENSORS["bwd"])
    return Repeat(launcher.bind(call), (*given, *scratch))


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """out and LSE: what is served, since torch would take minutes for a long problem."""
    if not q.is_cuda:
        return attention_forward(q, k, v, causal=causal, scale=scale)
    out, lse = attention_fwd(q, k, v, scale, causal, False, True)
    assert lse is not None
    return out, lse


class FullGradients:
    """The backward at its real size: what is timed, with samples of rows and keys to check.

    ``copies``: sets of all tensors, for timing by turns.
    """

    def __init__(self, problem: Problem, device: str = "cuda", copies: int = 1) -> None:
        self.problem = problem
        q, k, v = make_inputs(problem, device)
        scale = problem.head_dim**-0.5
        out, lse = _forward(q, k, v, problem.causal, scale)
        generator = torch.Generator(device=device).manual_seed(1)
        dout = torch.randn(out.shape, device=device, dtype=q.dtype, generator=generator)
        self.inputs = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "dout": dout}
        self.grads = poisoned(self.inputs)
        self._more = [
            ({name: x.clone() for name, x in self.inputs.items()}, poisoned(self.inputs))
            for _ in range(copies - 1)
        ]

    def launch(self, launcher: Launcher) -> Repeat:
        """The launches of the chain, as one."""
        return backward(launcher, self.problem, self.inputs, self.grads)

    def launches(self, launcher: Launcher) -> list[Repeat]:
        """What is to be timed, on each set of tensors."""
        sets = ((self.inputs, self.grads), *self._more)
        return [backward(launcher, self.problem, *tensors) for tensors in sets]

    def why_wrong(self, launcher: Launcher) -> str | None:
        """Runs once at full size and compares samples at the end, in the middle, at the start."""
        for grad in self.grads.values():
            grad.fill_(math.nan)
        self.launch(launcher)()
        torch.cuda.synchronize()
        return self.compare()

    def compare(self) -> str | None:
        """How the gradients break the accuracy rule, or None."""
        for name, grad in self.grads.items():
            if bool(torch.isnan(grad).any()):
                return f"full size: {name} holds NaN"
        reasons = (self._compare_part(share) for share in (1.0, 0.5, 0.0))
        return next(filter(None, reasons), None)

    def _compare_part(self, share: float) -> str | None:
        """A few rows, and a few keys, of one key/value head, ``share`` of the way through."""
        p = self.problem
        batch, head = round(share * (p.batch - 1)), round(share * (p.kv_heads - 1))
        rows, keys = min(_SLICE, p.seqlen_q), min(_SLICE, p.seqlen_k)
        row, key = round(share * (p.seqlen_q - rows)), round(share * (p.seqlen_k - keys))
        some_rows, some_keys = slice(row, row + rows), slice(key, key + keys)
        every = slice(None)
        parts = (
            (("dq",), some_rows, every),
            (("dk", "dv"), every, some_keys),
        )
        for names, at_rows, at_keys in parts:
            exact = self._part(batch, head, at_rows, at_keys, torch.float64)
            plain = self._part(batch, head, at_rows, at_keys, self.inputs["q"].dtype)
            for name in names:
                heads = slice(head * p.group, (head + 1) * p.group) if name == "dq" else head
                at = at_rows if name == "dq" else at_keys
                grad = self.grads[name][batch, heads, at]
                allowed = allowance(plain[name], exact[name])
                reason = _why_off("full size", name, grad, exact[name], allowed)
                if reason is not None:
                    return reason
        return None

    def _part(self, batch: int, head: int, rows: slice, keys: slice, dtype: torch.dtype) -> Tensors:
        """The gradients that some rows and keys of a key/value head's group give, by torch, each
        step rounded to ``dtype``: dq is whole with all keys, dk and dv are with all rows."""
        p, scale = self.problem, self.problem.head_dim**-0.5
        heads = slice(head * p.group, (head + 1) * p.group)
        q, out, dout = (self.inputs[n][batch, heads, rows].to(dtype) for n in ("q", "out", "dout"))
        k, v = (self.inputs[n][batch, head, keys].to(dtype) for n in ("k", "v"))
        lse = self.inputs["lse"][batch, heads, rows].to(torch.promote_types(dtype, torch.float32))
        # A row that sees no key has no P, however it would be computed.
        lse = lse.masked_fill(lse == -math.inf, math.inf).unsqueeze(-1)
        hidden = torch.zeros((), dtype=torch.bool, device=q.device)
        if p.causal:
            i = torch.arange(p.seqlen_q, device=q.device)[rows].unsqueeze(1)
            j = torch.arange(p.seqlen_k, device=q.device)[keys]
            hidden = j > i + p.seqlen_k - p.seqlen_q
        weights = torch.exp((q @ k.mT) * scale - lse).to(dtype).masked_fill(hidden, 0.0)
        delta = (dout * out).sum(-1, keepdim=True)
        ds = (weights * (dout @ v.mT - delta)).masked_fill(hidden, 0.0) * scale
        dk = ds.flatten(0, 1).mT @ q.flatten(0, 1)
        dv = weights.flatten(0, 1).mT @ dout.flatten(0, 1)
        return {"dq": ds @ k, "dk": dk, "dv": dv}
