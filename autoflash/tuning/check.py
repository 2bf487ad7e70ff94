"""The accuracy rule applied to one candidate: poisoned outputs, ragged sizes, hard inputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from autoflash.kernels.kernel import Call
from autoflash.problem import Problem
from autoflash.reference import error_allowance, exact_attention
from autoflash.runtime.inputs import all_strides, output_like
from autoflash.runtime.launcher import Bound, Launcher

# Lengths of the ragged checks: not multiples of any tile, more than two of the largest.
_RAGGED_Q, _RAGGED_K = 333, 589
_LSE_TOLERANCE = 2e-3
_SLICE_ROWS = 64
# Of a [batch, heads, rows, dim] tensor.
Rows = tuple[slice, slice, slice]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is expected of ``problem``'s result, in fp64, and the errors that are allowed: of out
    (all its elements or each), and of the LSE beside what its size explains."""

    name: str
    problem: Problem
    out: Tensor
    lse: Tensor
    allowance: float | Tensor
    lse_tolerance: float | Tensor = _LSE_TOLERANCE


@dataclass(frozen=True, kw_only=True)
class Case(Expected):
    """Inputs with what is expected of them."""

    q: Tensor
    k: Tensor
    v: Tensor

    def why_wrong(self, launcher: Launcher) -> str | None:
        """How the launcher breaks the accuracy rule here, or None."""
        return why_wrong(launcher, self)


def make_inputs(problem: Problem, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k and v of ``problem``, bhsd and contiguous."""
    generator = torch.Generator(device=device).manual_seed(seed)
    p = problem
    shapes = (
        (p.batch, p.heads, p.seqlen_q, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim_v),
    )
    dtype = getattr(torch, p.dtype)
    q, k, v = (torch.randn(s, device=device, dtype=dtype, generator=generator) for s in shapes)
    return q, k, v


def hard_inputs(
    problem: Problem, device: str, batch: int
) -> list[tuple[str, Problem, tuple[Tensor, Tensor, Tensor]]]:
    """Small relatives of ``problem``: same code, ragged lengths, one with inputs of each kind, as
    (name, problem, (q, k, v))."""
    long_q, long_k = min(problem.seqlen_q, _RAGGED_Q), min(problem.seqlen_k, _RAGGED_K)
    lengths = {
        "ragged": (long_q, long_k),
        # With a causal mask the first rows see no key.
        "outlier channels": (long_q, max(1, min(long_k, long_q * 2 // 3))),
        "large logits": (max(1, long_q // 2 + 1), long_k),
    }
    small = replace(problem, batch=batch, heads=2 * problem.group, kv_heads=2)
    found = []
    for seed, (name, (rows, keys)) in enumerate(lengths.items()):
        relative = replace(small, seqlen_q=rows, seqlen_k=keys)
        q, k, v = make_inputs(relative, device, seed)
        if name == "outlier channels":
            q[..., ::17] *= 20
            v[..., ::13] *= 20
        elif name == "large logits":
            q *= 8
            k[..., 0] -= 30
        found.append((name, relative, (q, k, v)))
    return found


def check_cases(problem: Problem, device: str = "cuda") -> list[Case]:
    """hard_inputs with what is expected of them."""
    found = hard_inputs(problem, device, batch=min(problem.batch, 2))
    return [make_case(name, relative, *x) for name, relative, x in found]


def make_case(name: str, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> Case:
    """A Case with its fp64 answer and the error that the accuracy rule allows."""
    scale = problem.head_dim**-0.5
    out, lse = exact_attention(q, k, v, causal=problem.causal, scale=scale)
    allowance = error_allowance(q, k, v, causal=problem.causal, scale=scale, exact=out)
    return Case(name=name, problem=problem, q=q, k=k, v=v, out=out, lse=lse, allowance=allowance)


def run_poisoned(launcher: Launcher, problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> tuple[
    Tensor, Tensor
]:  # fmt: skip
    """out and LSE of one launch into buffers full of NaN."""
    out = output_like(q, v).fill_(math.nan)
    lse = torch.full(q.shape[:3], math.nan, device=q.device)
    Repeat(bind(launcher, problem, q, k, v, out), (q, k, v, out, lse))()
    torch.cuda.synchronize()
    return out, lse


def why_wrong(launcher: Launcher, case: Case) -> str | None:
    """How the launcher breaks the accuracy rule on ``case``, or None."""
    out, lse = run_poisoned(launcher, case.problem, case.q, case.k, case.v)
    return compare(case, out, lse)


def compare(case: Expected, out: Tensor, lse: Tensor) -> str | None:
    """How (out, lse) break the accuracy rule, or None."""
    if not bool(torch.isfinite(out).all()):
        return f"{case.name}: out holds NaN or infinity"
    error = (out.double() - case.out).abs()
    allowed = torch.as_tensor(case.allowance, dtype=error.dtype, device=error.device)
    if not bool((error <= allowed).all()):
        worst = (error - allowed).argmax()
        most, least = error.flatten()[worst], allowed.expand_as(error).flatten()[worst]
        return f"{case.name}: error {most.item():.2e}, allowed {least.item():.2e}"
    if bool(torch.isnan(lse).any()) or not torch.equal(torch.isinf(lse), torch.isinf(case.lse)):
        return f"{case.name}: LSE is NaN, or infinite where it should not be"
    lse_error = (lse.double() - case.lse).nan_to_num(0.0, 0.0, 0.0).abs()
    allowed = case.lse_tolerance + 1e-5 * case.lse.abs().nan_to_num(0.0, 0.0, 0.0)
    if bool((lse_error > allowed).any()):
        return f"{case.name}: LSE error {lse_error.max().item():.2e}"
    return None


class FullProblem:
    """The problem at its real size: what is timed, with a sample of rows to check.

    ``copies``: sets of all tensors, for timing by turns.
    """

    def __init__(self, problem: Problem, device: str = "cuda", copies: int = 1) -> None:
        self.problem = problem
        q, k, v, *descales = self._inputs(device)
        assert q is not None
        assert k is not None
        assert v is not None
        self.q, self.k, self.v = q, k, v
        self.out = self._output()
        self.lse = torch.empty(self.q.shape[:3], device=device)
        own = (q, k, v, self.out, self.lse, *descales)
        self._sets = [own, *(tuple(map(_copy, own)) for _ in range(copies - 1))]
        self._parts = [part for share in (1.0, 0.5, 0.0) if (part := self._part(share))]

    def launch(self, launcher: Launcher) -> "Repeat":
        """A launch, with its arguments filled in."""
        return self.launches(launcher)[0]

    def launches(self, launcher: Launcher) -> "list[Repeat]":
        """The launch to be timed, on each set of tensors."""
        bound = self._bound(launcher)
        device = self.q.device
        return [
            Repeat(bound, (*tensors, *poisoned_scratch(launcher, self.problem, device)))
            for tensors in self._sets
        ]

    def why_wrong(self, launcher: Launcher) -> str | None:
        """Runs once at full size and compares some rows at the end, in the middle, at the start."""
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)
        self.launch(launcher)()
        torch.cuda.synchronize()
        if bool(torch.isnan(self.out).any()):
            return "full size: out holds NaN"
        reasons = (compare(case, self.out[at], self.lse[at]) for at, case in self._parts)
        return next(filter(None, reasons), None)

    def _inputs(self, device: str) -> tuple[Tensor | None, ...]:
        """q, k, v and what else is read, in the order of the launch's addresses."""
        return make_inputs(self.problem, device)

    def _output(self) -> Tensor:
        """An uninitialised out."""
        return output_like(self.q, self.v)

    def _bound(self, launcher: Launcher) -> Bound:
        """``launcher`` for the tensors."""
        return bind(launcher, self.problem, self.q, self.k, self.v, self.out)

    def _case(self, part: Problem, at: Rows, keys: Rows) -> Expected:
        """What is expected of ``part``: the query rows ``at``, and those of k and v."""
        return make_case("full size", part, self.q[at], self.k[keys], self.v[keys])

    def _part(self, share: float) -> tuple[Rows, Expected] | None:
        """Rows of one head, ``share`` of the way through the problem, and what is expected of them;
        None if they see no key."""
        p = self.problem
        rows = min(_SLICE_ROWS, p.seqlen_q)
        batch, head, first = (
            round(share * most) for most in (p.batch - 1, p.heads - 1, p.seqlen_q - rows)
        )
        # Consecutive rows of a bottom-right mask are again a bottom-right problem, with the keys
        # that the last of them sees.
        keys = p.seqlen_k - (p.seqlen_q - first - rows) if p.causal else p.seqlen_k
        if keys < 1:
            return None
        one = slice(batch, batch + 1)
        heads, kv_heads = (slice(h, h + 1) for h in (head, head // p.group))
        at = (one, heads, slice(first, first + rows))
        part = replace(p, batch=1, heads=1, kv_heads=1, seqlen_q=rows, seqlen_k=keys)
        return at, self._case(part, at, (one, kv_heads, slice(0, keys)))


class Repeat:
    """A call with all its arguments: those of ``kernel.TENSORS``, None for what isn't given, and
    the scratch buffers. They live as long as it does."""

    def __init__(self, bound: Bound, tensors: Sequence[Tensor | None]) -> None:
        self._bound = bound
        self._held = tensors
        self._addresses = tuple(0 if x is None else x.data_ptr() for x in tensors)

    def __call__(self) -> None:
        self._bound(int(torch.cuda.current_stream().cuda_stream), self._addresses)


def bind(
    launcher: Launcher, problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> Bound:
    """``launcher`` for these tensors, LSE written."""
    strides = all_strides(False, q=q, k=k, v=v, out=out)
    scale = problem.head_dim**-0.5
    given = frozenset({*strides, "lse"})
    return launcher.bind(Call(problem=problem, scale=scale, strides=strides, given=given))


def poisoned_scratch(launcher: Launcher, problem: Problem, device: torch.device) -> list[Tensor]:
    """The scratch buffers of ``problem``, each byte 0xff: NaN in every format."""
    found = []
    for shape, kind in launcher.scratch(problem):
        buffer = torch.empty(shape, dtype=kind, device=device)
        buffer.view(torch.uint8).fill_(0xFF)
        found.append(buffer)
    return found


def _copy(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.clone()
