"""torch.ops.autoflash: schemas, fake kernels, implementations, autograd.

``Library.define``/``impl`` cost 4 us a call, ``torch.library.custom_op`` 17 us.
"""

from typing import Any

import torch
from torch import Tensor

from autoflash.errors import UnsupportedError
from autoflash.fp8 import dequantize, values_by_row
from autoflash.reference import attention_backward, attention_forward
from autoflash.runtime.dispatch import attention_fwd
from autoflash.runtime.dispatch_bwd import attention_bwd
from autoflash.runtime.dispatch_fp8 import attention_fwd_fp8, tell_once
from autoflash.runtime.inputs import check_tensors, lse_shape, output_like
from autoflash.runtime.inputs_fp8 import Operands, check_operands, v_rows
from autoflash.runtime.scales import check_scale_values

_library = torch.library.Library("autoflash", "DEF")
_library.define(
    "attention_fwd(Tensor q, Tensor k, Tensor v, float scale, bool causal, bool bshd, "
    "bool return_lse) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.define(
    "attention_fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, ScalarType out_dtype, str v_layout, float scale, bool causal, bool bshd, "
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


def attention_fwd_fp8_cuda(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None,
    v_descale: Tensor | None, out_dtype: torch.dtype, v_layout: str,
    scale: float, causal: bool, bshd: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op on a GPU."""
    given = Operands(q, k, v, q_descale, k_descale, v_descale, out_dtype, v_layout)
    positive, size = given, scale
    if scale <= 0:
        # As in _attention_fwd_cuda.
        positive = given._replace(q=_negated(q) if scale < 0 else torch.zeros_like(q))
        size = -scale or 1.0
    try:
        out, lse = attention_fwd_fp8(positive, size, causal, bshd, return_lse)
    except UnsupportedError as error:
        # No kernel serves it: torch does, more slowly.
        result = _attention_fwd_fp8_torch(*given, scale, causal, bshd, return_lse)
        tell_once(str(error))
        return result
    return out, q.new_empty(0, dtype=torch.float32) if lse is None else lse


def _negated(x: Tensor) -> Tensor:
    """-x, which torch can't say of fp8: its sign is a bit."""
    return -x if x.dtype.itemsize > 1 else (x.view(torch.uint8) ^ 0x80).view(x.dtype)


def _attention_fwd_fp8_torch(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None,
    v_descale: Tensor | None, out_dtype: torch.dtype, v_layout: str,
    scale: float, causal: bool, bshd: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    given = Operands(q, k, v, q_descale, k_descale, v_descale, out_dtype, v_layout)
    check_operands(given, bshd)
    check_scale_values(**given.descales)
    out = output_like(q, v_rows(given, bshd), dtype=out_dtype)
    q, k = (x.transpose(1, 2) if bshd else x for x in (q, k))
    by_row = v_layout == "rows" and bshd
    v = v.transpose(1, 2) if by_row else values_by_row(v, v_layout, k.shape[2])
    pairs = ((q, q_descale), (k, k_descale), (v, v_descale))
    inputs = [dequantize(x, descale, torch.float32) for x, descale in pairs]
    result, lse = attention_forward(*inputs, causal=causal, scale=scale)
    out.copy_(result.transpose(1, 2) if bshd else result)
    return out, lse if return_lse else lse.new_empty(0)


def _attention_fwd_fp8_fake(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Tensor | None, k_descale: Tensor | None,
    v_descale: Tensor | None, out_dtype: torch.dtype, v_layout: str,
    scale: float, causal: bool, bshd: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    del scale, causal
    given = Operands(q, k, v, q_descale, k_descale, v_descale, out_dtype, v_layout)
    check_operands(given, bshd)
    lse = q.new_empty(lse_shape(q, bshd) if return_lse else (0,), dtype=torch.float32)
    return output_like(q, v_rows(given, bshd), dtype=out_dtype), lse


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
_library.impl("attention_fwd_fp8", attention_fwd_fp8_cuda, "CUDA")
_library.impl("attention_fwd_fp8", _attention_fwd_fp8_torch, "CPU")
torch.library.register_fake("autoflash::attention_fwd_fp8", _attention_fwd_fp8_fake, lib=_library)
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
