"""attention() and explain(): documentation and validation, nothing else."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.fp8 import Fp8KV
from autoflash.ops import DifferentiableAttention, attention_fwd_fp8_cuda, may_skip_dispatcher
from autoflash.problem import Problem
from autoflash.runtime import inputs
from autoflash.runtime.dispatch import attention_fwd
from autoflash.runtime.inputs_fp8 import (
    Operands,
    check_operands,
    operands,
    problem_of_fp8,
    v_as_called,
    v_rows,
)

_LAYOUTS = ("bhsd", "bshd")
# The arguments of attention, beside those that explain has too, whose every value is served.
_SERVED = (
    *("scale", "return_lse", "deterministic"),
    *("q_descale", "k_descale", "v_descale", "v_layout", "out_dtype"),
)
_FP8 = torch.float8_e4m3fn
_attention_fwd = torch.ops.autoflash.attention_fwd.default
_attention_fwd_fp8: Any = torch.ops.autoflash.attention_fwd_fp8.default


def attention(
    q: Tensor,
    k: Tensor | Fp8KV,
    v: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    score_mod: Any = None,
    mask_mod: Any = None,
    block_mask: Any = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    v_layout: str = "rows",
    out_dtype: torch.dtype | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * q kᵀ) v, by the best kernel known for this GPU and shape.

    Args:
        q: [batch, heads, seqlen_q, head_dim], or [batch, seqlen_q, heads, head_dim] with
            layout="bshd". float16 or bfloat16 on a GPU, any floating type on the CPU; float8_e4m3fn
            on both. Any strides; a last dimension that isn't contiguous is copied first.
        k: [batch, kv_heads, seqlen_k, head_dim] (or bshd); heads must be a multiple of kv_heads. As
            q, or in float8_e4m3fn beside a q of 16 bits. An Fp8KV stands for k and v.
        v: [batch, kv_heads, seqlen_k, head_dim_v] (or bshd), like k. Head dims go from 1 to 256.
        causal: hide key j from row i unless j <= i + seqlen_k - seqlen_q (bottom-right).
        scale: factor of the scores; 1 / sqrt(head_dim) by default.
        q_descale: of a q in fp8, which stands for q_descale * q: fp32, [] or [1] for all of q,
            [batch, kv_heads] or [batch, heads], or [batch, heads, ceil(seqlen_q / 128)], one for
            128 rows. None is 1. On the CPU it must be finite and positive; on a GPU, where looking
            would stop the host, what isn't finite gives what isn't, and others wrong results.
        k_descale: of a k in fp8: [] or [1], [batch, kv_heads], or
            [batch, kv_heads, ceil(seqlen_k / 128)].
        v_descale: the same of v.
        v_layout: "rows", or how a v in fp8 lies as [batch, kv_heads, head_dim_v, seqlen_k rounded
            up to 16] whatever ``layout``: "columns" with the keys in their order, "permuted" inside
            each 16 in that of autoflash.fp8.key_order. What lies behind the last key counts for
            nothing.
        out_dtype: of out, with a q in fp8: torch.bfloat16 (default) or torch.float16.
        deterministic: gradients that are the same bit for bit each time, as out always is; slower
            on some GPUs. torch.use_deterministic_algorithms asks for it too.
        return_lse: also return the log-sum-exp of each row: [batch, heads, seqlen_q], float32
            (float64 for float64 inputs), natural logarithm.
        layout: "bhsd" or "bshd".

    The other arguments are not served yet: a value other than the default raises UnsupportedError.

    Returns:
        out, like q but with head_dim_v and heads and rows in memory in q's order; or (out, lse).
        A row that sees no key has out = 0 and lse = -inf.

    Where no kernel serves fp8 (the CPU, GPUs before sm_89), torch computes in fp32 what q, k and v
    stand for.

    Gradients flow to q, k and v, from out and from the LSE, recomputed in memory O(N); only those
    that are needed. They can be differentiated once more, which torch does. Fp8 attention has none,
    not even for a q of 16 bits: it refuses tensors that want one while gradients are recorded.

    Raises:
        InvalidInputError: shapes, dtypes, devices or values that make no attention call.
        UnsupportedError: a request that no variant serves.
        MissingRecordError: in lock mode, when this problem has no exact record, or no entry of the
            lock file; before anything is launched.
        LockError: the lock file can't be read, or what it locks can't be run just as it was.
    """
    if (
        softcap or dropout_p or window != (-1, -1) or alibi_slopes is not None
        or sinks is not None or bias is not None or score_mod is not None or mask_mod is not None
        or block_mask is not None or cu_seqlens_q is not None or cu_seqlens_k is not None
        or max_seqlen_q is not None or max_seqlen_k is not None
    ):  # fmt: skip
        raise _unserved(
            window=window if window != (-1, -1) else None, softcap=softcap or None,
            alibi_slopes=alibi_slopes, sinks=sinks, bias=bias, score_mod=score_mod,
            mask_mod=mask_mod, block_mask=block_mask, dropout_p=dropout_p or None,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
        )  # fmt: skip
    bshd = layout == "bshd"
    if not bshd and layout != "bhsd":
        raise InvalidInputError(f"layout={layout!r}: must be one of {', '.join(_LAYOUTS)}")
    if scale is None:
        scale = _default_scale(q)
    elif not math.isfinite(scale):
        raise _not_finite(scale)
    if (
        v is None or not isinstance(k, Tensor) or k.dtype is _FP8 or q.dtype is _FP8
        or v.dtype is _FP8 or q_descale is not None or k_descale is not None
        or v_descale is not None or out_dtype is not None or v_layout != "rows"
    ):  # fmt: skip
        descales = (q_descale, k_descale, v_descale)
        given = operands(q, k, v, descales, out_dtype, v_layout, layout)
        if given is not None:
            result = _attention_fp8(given, scale, causal, bshd, return_lse)
            return result if return_lse else result[0]
        assert isinstance(k, Tensor)
        assert v is not None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        # torch.compile refuses an autograd.Function that is given one tensor twice.
        k = k.view_as(k) if k is q else k
        v = v.view_as(v) if v is q or v is k else v
        out, lse = DifferentiableAttention.apply(q, k, v, scale, causal, bshd, deterministic)  # type: ignore[no-untyped-call]
    elif scale > 0 and may_skip_dispatcher(q, k, v):
        out, lse = attention_fwd(q, k, v, scale, causal, bshd, return_lse)
    else:
        out, lse = _attention_fwd(q, k, v, scale, causal, bshd, return_lse)
    return (out, lse) if return_lse else out


def _attention_fp8(
    given: Operands, scale: float, causal: bool, bshd: bool, return_lse: bool
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in given.tensors):
        raise UnsupportedError(
            "fp8 attention has no gradients, not even for a q of 16 bits: call it under "
            "torch.no_grad(), or detach q, k, v and their descales"
        )
    skip = may_skip_dispatcher(given.q, given.k, given.v)
    forward = attention_fwd_fp8_cuda if skip else _attention_fwd_fp8
    out, lse = forward(*given, scale, causal, bshd, return_lse)
    return out, lse


def _default_scale(q: Tensor) -> float:
    head_dim = q.shape[-1] if q.dim() else 0
    if head_dim < 1:
        raise InvalidInputError(f"q has shape {tuple(q.shape)}: its last dimension is head_dim")
    return float(head_dim**-0.5)


def _not_finite(scale: float) -> InvalidInputError:
    return InvalidInputError(f"scale={scale!r}: must be finite")


def _unserved(**given: Any) -> UnsupportedError:
    names = ", ".join(name for name, value in given.items() if value is not None)
    return UnsupportedError(f"not served yet: {names}; leave it at its default")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What would run for a call, and why.

    ``how``: tuned, neighbour, predicted, default or locked (or reference, on the CPU). ``layer``:
    where that came from: user, site, shipped, kernel or lock. ``path``: the emitted file.
    ``tune``: the command that tunes this problem. ``pipeline``: how a program of the kernel divides
    its work, in lines. ``expected_loss``: of a neighbour's config, what it lost against the best on
    the other problems where it was tried, in the median, as a fraction of time; None where no trial
    says.
    """

    problem: str
    target: str
    kernel: str
    config: dict[str, bool | int | str]
    how: str
    layer: str
    why: str
    path: Path | None
    tune: str
    pipeline: tuple[str, ...] = ()
    expected_loss: float | None = None

    def __str__(self) -> str:
        config = " ".join(f"{name}={value}" for name, value in self.config.items())
        text = (
            f"{self.problem} on {self.target}: {self.kernel} [{self.how}, from {self.layer}]\n"
            f"  why: {self.why}\n  config: {config}\n  file: {self.path}\n  tune: {self.tune}"
        )
        return "\n    ".join([text + ("\n  pipeline:" if self.pipeline else ""), *self.pipeline])


def explain(
    q: Tensor, k: Tensor | Fp8KV, v: Tensor | None = None, *, causal: bool = False,
    layout: str = "bhsd", op: str = "fwd", **others: Any,
) -> Explanation:  # fmt: skip
    """Which kernel ``attention`` with these arguments runs, from which layer, and how to tune it.

    With op "bwd", which one computes its gradients, all three of them, for a gradient of out that
    lies as out does. Compiles and launches nothing. Raises like ``attention``.
    """
    from autoflash.runtime.choose import choose, expected_loss, losses_elsewhere, tune_command
    from autoflash.target import current_target

    _check_others(others)
    if layout not in _LAYOUTS:
        raise InvalidInputError(f"layout={layout!r}: must be one of {', '.join(_LAYOUTS)}")
    problem, tensors = _problem_and_tensors(q, k, v, causal, layout == "bshd", op, others)
    if q.device.type != "cuda":
        # What would be tuned is the 16-bit problem: GPUs are served no other.
        served = problem.is_fp8 or q.element_size() == 2
        tunable = problem if served else replace(problem, dtype="bfloat16")
        return Explanation(
            problem=problem.label(), target=q.device.type, kernel="reference", config={},
            how="reference", layer="torch", why="kernels need a GPU", path=None,
            tune=tune_command(tunable) + " --target h100",
        )  # fmt: skip
    from autoflash.codegen.render import render
    from autoflash.codegen.source_cache import emit

    target = current_target(q.device)
    access = inputs.access_of(tensors, layout == "bshd")
    if op == "bwd":
        same = bool(others.get("deterministic")) or torch.are_deterministic_algorithms_enabled()
        access = replace(access, repeatable=same)
    choice = choose(problem, target, access)
    losses = losses_elsewhere(choice) if choice.how == "neighbour" else []
    return Explanation(
        problem=problem.label(),
        target=target.name,
        kernel=choice.kernel.name,
        config=dict(choice.config),
        how=choice.how,
        layer=choice.layer,
        why=choice.why + (_loss_in_words(losses) if choice.how == "neighbour" else ""),
        path=emit(render(choice.kernel, problem, choice.config)),
        tune=tune_command(problem),
        pipeline=tuple(choice.kernel.pipeline(problem, choice.config)),
        expected_loss=expected_loss(losses),
    )


def _problem_and_tensors(
    q: Tensor, k: Tensor | Fp8KV, v: Tensor | None, causal: bool, bshd: bool, op: str,
    others: dict[str, Any],
) -> tuple[Problem, tuple[Tensor, ...]]:  # fmt: skip
    """The Problem of a call, and q, k, v and out as a kernel is given them; checked."""
    descales = [others.get(name) for name in ("q_descale", "k_descale", "v_descale")]
    fp8 = (others.get("out_dtype"), others.get("v_layout", "rows"))
    given = operands(q, k, v, descales, *fp8, "bshd" if bshd else "bhsd")
    if given is None:
        assert isinstance(k, Tensor)
        assert v is not None
        inputs.check_tensors(q, k, v, bshd)
        problem = inputs.problem_of(q, k, v, causal=causal, bshd=bshd, op=op)
        return problem, (q, k, v, inputs.output_like(q, v, "meta"))
    check_operands(given, bshd)
    problem = replace(problem_of_fp8(given, causal=causal, bshd=bshd), op=op)
    out = inputs.output_like(q, v_rows(given, bshd), "meta", given.out_dtype)
    return problem, (q, given.k, v_as_called(given, bshd), out)


def _loss_in_words(losses: list[float]) -> str:
    from autoflash.runtime.choose import expected_loss

    if not losses:
        return "; what that loses is not known: no trial of its config on another problem"
    several = f"{len(losses)} other problems" if len(losses) > 1 else "another problem"
    return (
        f"; on {several} where it was tried it was {expected_loss(losses):.1%} slower than "
        f"the best (at most {max(losses):.1%})"
    )


def _check_others(others: dict[str, Any]) -> None:
    import inspect

    parameters = inspect.signature(attention).parameters
    for name, value in others.items():
        if name not in parameters:
            raise InvalidInputError(f"attention() has no argument {name!r}")
        if name == "scale" and value is not None and not math.isfinite(value):
            raise _not_finite(value)
        if name not in _SERVED and value != parameters[name].default:
            raise _unserved(**{name: value})
