"""attention() and explain(): documentation and validation, nothing else."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.ops import DifferentiableAttention, may_skip_dispatcher
from autoflash.runtime.dispatch import attention_fwd

_LAYOUTS = ("bhsd", "bshd")
_attention_fwd = torch.ops.autoflash.attention_fwd.default


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    deterministic: bool = False,
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, softmax(scale * q kᵀ) v, by the best kernel known for this GPU and shape.

    Args:
        q: [batch, heads, seqlen_q, head_dim], or [batch, seqlen_q, heads, head_dim] with
            layout="bshd". float16 or bfloat16 on a GPU, any floating type on the CPU. Any strides;
            a last dimension that isn't contiguous is copied first.
        k: [batch, kv_heads, seqlen_k, head_dim] (or bshd); heads must be a multiple of kv_heads.
        v: [batch, kv_heads, seqlen_k, head_dim_v] (or bshd). Head dims go from 1 to 256.
        causal: hide key j from row i unless j <= i + seqlen_k - seqlen_q (bottom-right).
        scale: factor of the scores; 1 / sqrt(head_dim) by default.
        deterministic: gradients that are the same bit for bit each time, as out always is; slower
            on some GPUs. torch.use_deterministic_algorithms asks for it too.
        return_lse: also return the log-sum-exp of each row: [batch, heads, seqlen_q], float32
            (float64 for float64 inputs), natural logarithm.
        layout: "bhsd" or "bshd".

    The other arguments are not served yet: a value other than the default raises UnsupportedError.

    Returns:
        out, like q but with head_dim_v and heads and rows in memory in q's order; or (out, lse).
        A row that sees no key has out = 0 and lse = -inf.

    Gradients flow to q, k and v, from out and from the LSE, recomputed in memory O(N); only those
    that are needed. They can be differentiated once more, which torch does.

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
        or max_seqlen_q is not None or max_seqlen_k is not None or q_descale is not None
        or k_descale is not None or v_descale is not None
    ):  # fmt: skip
        raise _unserved(
            window=window if window != (-1, -1) else None, softcap=softcap or None,
            alibi_slopes=alibi_slopes, sinks=sinks, bias=bias, score_mod=score_mod,
            mask_mod=mask_mod, block_mask=block_mask, dropout_p=dropout_p or None,
            cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k, q_descale=q_descale, k_descale=k_descale,
            v_descale=v_descale,
        )  # fmt: skip
    bshd = layout == "bshd"
    if not bshd and layout != "bhsd":
        raise InvalidInputError(f"layout={layout!r}: must be one of {', '.join(_LAYOUTS)}")
    if scale is None:
        scale = _default_scale(q)
    elif not math.isfinite(scale):
        raise _not_finite(scale)
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
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, layout: str = "bhsd",
    op: str = "fwd", **others: Any,
) -> Explanation:  # fmt: skip
    """Which kernel ``attention`` with these arguments runs, from which layer, and how to tune it.

    With op "bwd", which one computes its gradients, all three of them, for a gradient of out that
    lies as out does. Compiles and launches nothing. Raises like ``attention``.
    """
    from autoflash.runtime.choose import choose, expected_loss, losses_elsewhere, tune_command
    from autoflash.runtime.inputs import access_of, check_tensors, output_like, problem_of
    from autoflash.target import current_target

    _check_others(others)
    if layout not in _LAYOUTS:
        raise InvalidInputError(f"layout={layout!r}: must be one of {', '.join(_LAYOUTS)}")
    bshd = layout == "bshd"
    check_tensors(q, k, v, bshd)
    problem = problem_of(q, k, v, causal=causal, bshd=bshd, op=op)
    if q.device.type != "cuda":
        # What would be tuned is the 16-bit problem: GPUs are served no other.
        tunable = problem if q.element_size() == 2 else replace(problem, dtype="bfloat16")
        return Explanation(
            problem=problem.label(), target=q.device.type, kernel="reference", config={},
            how="reference", layer="torch", why="kernels need a GPU", path=None,
            tune=tune_command(tunable) + " --target h100",
        )  # fmt: skip
    from autoflash.codegen.render import render
    from autoflash.codegen.source_cache import emit

    target = current_target(q.device)
    access = access_of((q, k, v, output_like(q, v, "meta")), bshd)
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
        served = name in ("scale", "return_lse", "deterministic")
        if not served and value != parameters[name].default:
            raise _unserved(**{name: value})
