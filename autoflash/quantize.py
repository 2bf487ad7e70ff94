"""quantize_fp8(): q, k and v of an attention call in e4m3, with their scales."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.fp8 import GRANULARITIES, padded_keys, values_by_row
from autoflash.kernels.kernel import why_too_long
from autoflash.runtime import quantize_torch
from autoflash.runtime.inputs import check_shapes, output_like, problem_of
from autoflash.target import current_target

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LAYOUTS = ("bhsd", "bshd")


@dataclass(frozen=True, kw_only=True)
class QuantizedQKV:
    """q, k and v in float8_e4m3fn: x = descale * x8, descales fp32 (autoflash.fp8).

    ``q`` and ``k`` have the shapes they were given in, and heads and rows in memory in the same
    order. ``v`` too with ``v_layout`` "rows"; with "columns" or "permuted" it is
    [batch, kv_heads, head_dim_v, keys rounded up to 16], contiguous, zeros behind the last key.
    ``rotation_seed``: that of the rotation of q and k, None without one; a k cache must be met by a
    q of the same seed. ``layout`` is "bhsd" or "bshd".
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor
    k_descale: Tensor
    v_descale: Tensor
    granularity: str
    v_layout: str
    rotation_seed: int | None
    layout: str

    def v_by_row(self) -> Tensor:
        """v as q and k lie, whatever its layout: a copy if it is transposed."""
        if self.v_layout == "rows":
            return self.v
        keys = self.k.shape[1 if self.layout == "bshd" else 2]
        v = values_by_row(self.v, self.v_layout, keys)
        return v.transpose(1, 2) if self.layout == "bshd" else v


def quantize_fp8(
    q: Tensor, k: Tensor, v: Tensor, *, granularity: str = "head", transpose_v: bool = False,
    permute_keys: bool = False, hadamard: bool = False, seed: int = 0, layout: str = "bhsd",
) -> QuantizedQKV:  # fmt: skip
    """Round q, k and v to float8_e4m3fn under the scales that fit them.

    A scale is the largest finite magnitude of what it serves over 448, 1 if that is 0; elements
    that aren't finite become NaN. On NVIDIA GPUs from sm_89 on Triton does it: per block one kernel
    for each tensor, which reads it once; per head and per tensor one more before it, for the
    magnitudes. Elsewhere torch does, to the same bits. A first call compiles, and must not be in a
    CUDA graph's capture.

    Args:
        q: [batch, heads, seqlen_q, head_dim], or [batch, seqlen_q, heads, head_dim] with
            layout="bshd"; float16, bfloat16 or float32, any strides.
        k: [batch, kv_heads, seqlen_k, head_dim] (or bshd).
        v: [batch, kv_heads, seqlen_k, head_dim_v] (or bshd).
        granularity: "tensor", "head" (one scale per batch and key/value head, of q too) or "block"
            (one per 128 rows of a head).
        transpose_v: give v as [batch, kv_heads, head_dim_v, seqlen_k rounded up to 16], which fp8
            matrix instructions read without moving anything.
        permute_keys: with transpose_v, the keys of each 16 in autoflash.fp8.key_order.
        hadamard: rotate q and k alike before rounding (incoherent processing: FlashAttention-3,
            section 3.3), which leaves q kᵀ as it is and spreads outliers. Head dims that are no
            power of two are rotated in blocks of the largest one that divides them.
        seed: which random signs the rotation has, 0 to 2^31 - 1: the same on every device.
        layout: "bhsd" or "bshd", of q, k and v.

    Raises:
        InvalidInputError: tensors that make no attention call, other dtypes, unknown options; a
            tensor that wants a gradient while gradients are recorded, since there is none.
        UnsupportedError: a length of about 2^31.
    """
    if layout not in _LAYOUTS:
        raise InvalidInputError(f"layout={layout!r}: must be one of {', '.join(_LAYOUTS)}")
    if granularity not in GRANULARITIES:
        known = ", ".join(GRANULARITIES)
        raise InvalidInputError(f"granularity={granularity!r}: must be one of {known}")
    if permute_keys and not transpose_v:
        raise InvalidInputError("permute_keys=True: only a transposed v has its keys permuted")
    if not 0 <= seed < 2**31:
        raise InvalidInputError(f"seed={seed}: must be from 0 to 2^31 - 1")
    bshd = layout == "bshd"
    check_shapes(q, k, v, bshd)
    if q.dtype not in _DTYPES:
        raise InvalidInputError(f"{q.dtype}: must be float16, bfloat16 or float32")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise InvalidInputError(
            "rounding to fp8 has no gradient: call quantize_fp8 under torch.no_grad(), or detach"
        )
    reason = why_too_long(problem_of(q, k, v, causal=False, bshd=bshd))
    if reason is not None:
        raise UnsupportedError(reason)
    heads, rows = (2, 1) if bshd else (1, 2)
    group = q.shape[heads] // k.shape[heads]
    q8, k8, v8 = (output_like(x, x, dtype=torch.float8_e4m3fn) for x in (q, k, v))
    if transpose_v:
        shape = (v.shape[0], v.shape[heads], v.shape[3], padded_keys(v.shape[rows]))
        v8 = torch.empty(shape, dtype=torch.float8_e4m3fn, device=v.device)

    def by_head(x: Tensor) -> Tensor:
        return x.transpose(1, 2) if bshd else x

    quantize_into = _implementation(q.device)
    rotation = seed if hadamard else None
    q_descale = quantize_into(by_head(q8), by_head(q), granularity, group, rotation, False)
    k_descale = quantize_into(by_head(k8), by_head(k), granularity, 1, rotation, False)
    v_rows = v8.transpose(2, 3) if transpose_v else by_head(v8)
    v_descale = quantize_into(v_rows, by_head(v), granularity, 1, None, permute_keys)
    return QuantizedQKV(
        q=q8, k=k8, v=v8, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
        granularity=granularity,
        v_layout=("permuted" if permute_keys else "columns") if transpose_v else "rows",
        rotation_seed=rotation, layout=layout,
    )  # fmt: skip


QuantizeInto = Callable[[Tensor, Tensor, str, int, int | None, bool], Tensor]


def _implementation(device: torch.device) -> QuantizeInto:
    """The fastest that ``device`` has."""
    if device.type == "cuda":
        target = current_target(device)
        # Before sm_89 there is no instruction that casts to e4m3, and Triton has none.
        if target.vendor == "nvidia" and target.capability >= 89:
            from autoflash.runtime import quantize_triton

            return quantize_triton.quantize_into
    return quantize_torch.quantize_into
