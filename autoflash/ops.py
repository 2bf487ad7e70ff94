"""torch.ops.autoflash: schemas, fake kernels, implementations, autograd.

``Library.define``/``impl`` cost 4 us a call, ``torch.library.custom_op`` 17 us.
"""

from typing import Any

import torch
from torch import Tensor

from autoflash.errors import UnsupportedError
from autoflash.reference import attention_backward, attention_forward
from autoflash.runtime.dispatch import attention_fwd
from autoflash.runtime.dispatch_bwd import attention_bwd
from autoflash.runtime.inputs import check_tensors, lse_shape, output_like

_library = torch.library.Library("autoflash", "DEF")
_library.define(
    "attention_fwd(Tensor q, Tensor k, Tensor v, float scale, bool causal, bool bshd, "
    "bool return_lse) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
# What isn't needed comes back empty, of shape [0].
_library.define(
    "attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, "
    "Tensor lse, float scale, bool causal, bool bshd, bool repeatable, bool need_dq, "
    "bool need_dkv) -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _attention_fwd_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bshd: bool, return_lse: bool
) -> tuple[Tensor, Tensor]:
    # The kernels take the maximum of q kᵀ before scaling, which needs scale > 0.
    if scale <= 0:
        q, scale = (-q, -scale) if scale < 0 else (torch.zeros_like(q), 1.0)
    out, lse = attention_fwd(q, k, v, scale, causal, bshd, return_lse)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _attention_fwd_cpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bshd: bool, return_lse: bool
) -> tuple[Tensor, Tensor]:
    check_tensors(q, k, v, bshd)
    out = output_like(q, v)
    inputs = [x.transpose(1, 2) if bshd else x for x in (q, k, v)]
    result, lse = attention_forward(*inputs, causal=causal, scale=scale)
    out.copy_(result.transpose(1, 2) if bshd else result)
    return out, lse if return_lse else lse.new_empty(0)


def _attention_fwd_fake(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bshd: bool, return_lse: bool
) -> tuple[Tensor, Tensor]:
    del scale, causal
    check_tensors(q, k, v, bshd)
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = q.new_empty(lse_shape(q, bshd) if return_lse else (0,), dtype=dtype)
    return output_like(q, v), lse


def gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, causal: bool, bshd: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the layout of q, by torch; see reference.attention_backward. Differentiable."""
    dout, q, k, v, out = (x.transpose(1, 2) if bshd else x for x in (dout, q, k, v, out))
    grads = attention_backward(dout, dlse, q, k, v, out, lse, causal=causal, scale=scale)
    dq, dk, dv = (g.transpose(1, 2) if bshd else g for g in grads)
    return dq, dk, dv


def _attention_bwd_torch(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, causal: bool, bshd: bool, repeatable: bool, need_dq: bool, need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del repeatable  # torch's always are
    grads = gradients(dout, dlse, q, k, v, out, lse, scale, causal, bshd)
    needed = zip(grads, (q, k, v), (need_dq, need_dkv, need_dkv), strict=True)
    dq, dk, dv = (output_like(x, x).copy_(g) if need else x.new_empty(0) for g, x, need in needed)
    return dq, dk, dv


def _attention_bwd_cuda(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, causal: bool, bshd: bool, repeatable: bool, need_dq: bool, need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (dout, dlse, q, k, v, out, lse)
    arguments = (*tensors, scale, causal, bshd, repeatable, need_dq, need_dkv)
    try:
        grads = attention_bwd(*arguments)
    except UnsupportedError:
        # No kernel serves it: torch does, more slowly.
        return _attention_bwd_torch(*arguments)
    dq, dk, dv = (q.new_empty(0) if grad is None else grad for grad in grads)
    return dq, dk, dv


def _attention_bwd_fake(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    scale: float, causal: bool, bshd: bool, repeatable: bool, need_dq: bool, need_dkv: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    del dout, dlse, out, lse, scale, causal, bshd, repeatable
    needed = zip((q, k, v), (need_dq, need_dkv, need_dkv), strict=True)
    dq, dk, dv = (output_like(x, x) if need else x.new_empty(0) for x, need in needed)
    return dq, dk, dv


_library.impl("attention_fwd", _attention_fwd_cuda, "CUDA")
_library.impl("attention_fwd", _attention_fwd_cpu, "CPU")
torch.library.register_fake("autoflash::attention_fwd", _attention_fwd_fake, lib=_library)
_library.impl("attention_bwd", _attention_bwd_cuda, "CUDA")
_library.impl("attention_bwd", _attention_bwd_torch, "CPU")
torch.library.register_fake("autoflash::attention_bwd", _attention_bwd_fake, lib=_library)


def may_skip_dispatcher(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call may go straight to the kernel: nothing is tracing, transforming or profiling.

    torch's dispatcher takes 7 of the 21 us of a small call (H200), all to find the CUDA function.
    """
    return (
        type(q) is type(k) is type(v) is Tensor
        and q.is_cuda
        and not torch.compiler.is_compiling()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
        and not torch._C._autograd._profiler_enabled()
    )


class DifferentiableAttention(torch.autograd.Function):
    """attention_fwd with a gradient, recomputed from the LSE."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, bshd: bool,
        repeatable: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        skip = may_skip_dispatcher(q, k, v)
        forward = _attention_fwd_cuda if skip else torch.ops.autoflash.attention_fwd
        out, lse = forward(q, k, v, scale, causal, bshd, True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.set_materialize_grads(False)
        ctx.options = (scale, causal, bshd)
        ctx.repeatable = repeatable
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        need_dq, need_dk, need_dv = ctx.needs_input_grad[:3]
        need_dkv = need_dk or need_dv
        if dout is None:
            dout = torch.zeros_like(out)
        tensors = (dout, dlse, q, k, v, out, lse)
        traced = torch.compiler.is_compiling() or bool(torch._C._len_torch_dispatch_stack())
        if torch.is_grad_enabled() and not traced and not dout.is_meta:
            # The gradients will be differentiated themselves: plain torch, which can be.
            dq, dk, dv = gradients(*tensors, *ctx.options)
        else:
            skip = may_skip_dispatcher(dout, q, k)
            backward: Any = _attention_bwd_cuda if skip else torch.ops.autoflash.attention_bwd
            dq, dk, dv = backward(*tensors, *ctx.options, ctx.repeatable, need_dq, need_dkv)
        grads = (dq if need_dq else None, dk if need_dk else None, dv if need_dv else None)
        return (*grads, None, None, None, None)
