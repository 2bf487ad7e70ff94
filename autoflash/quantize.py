"""quantize_fp8(): q, k and v of an attention call in e4m3, with their scales; quantize_kv_fp8(): k
and v alone, packed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.fp8 import GRANULARITIES, V_LAYOUTS, Fp8KV, padded_keys, values_by_row
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

    @property
    def kv(self) -> Fp8KV:
        """k and v with their scales, as one: what ``attention`` takes in their place."""
        return Fp8KV(
            k=self.k, v=self.v, k_descale=self.k_descale, v_descale=self.v_descale,
            v_layout=self.v_layout, rotation_seed=self.rotation_seed, layout=self.layout,
        )  # fmt: skip

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
    if permute_keys and not transpose_v:
        raise InvalidInputError("permute_keys=True: only a transposed v has its keys permuted")
    _check(q, k, v, granularity, seed, layout)
    v_layout = ("permuted" if permute_keys else "columns") if transpose_v else "rows"
    kv = _quantize_kv(k, v, granularity, v_layout, seed if hadamard else None, layout)
    heads = 2 if layout == "bshd" else 1
    group = q.shape[heads] // k.shape[heads]
    q8, q_descale = _quantize(q, granularity, group, kv.rotation_seed, layout)
    return QuantizedQKV(
        q=q8, k=kv.k, v=kv.v, q_descale=q_descale, k_descale=kv.k_descale, v_descale=kv.v_descale,
        granularity=granularity, v_layout=v_layout, rotation_seed=kv.rotation_seed, layout=layout,
    )  # fmt: skip


def quantize_kv_fp8(
    k: Tensor, v: Tensor, *, granularity: str = "head", v_layout: str | None = None,
    hadamard: bool = False, seed: int = 0, layout: str = "bhsd",
) -> Fp8KV:  # fmt: skip
    """k and v alone, packed as kernels read them: an entry of a cache, or what q of 16 bits meets.

    Rounds as ``quantize_fp8`` does, with its arguments, and raises like it.

    Args:
        k: [batch, kv_heads, seqlen_k, head_dim] (or bshd), as ``quantize_fp8`` takes it.
        v: [batch, kv_heads, seqlen_k, head_dim_v] (or bshd).
        granularity: "tensor", "head" or "block".
        v_layout: "rows", "columns" or "permuted" (see ``attention``); by default what the kernels
            of k's device read without moving anything.
        hadamard: rotate k; q must then be rotated by the same seed.
        seed: of the rotation.
        layout: "bhsd" or "bshd", of k and v, and of the calls that the entry is for.
    """
    if v_layout is not None and v_layout not in V_LAYOUTS:
        known = ", ".join(V_LAYOUTS)
        raise InvalidInputError(f"v_layout={v_layout!r}: must be one of {known}")
    if k.dim() != 4 or k.shape[:3] != v.shape[:3]:
        raise InvalidInputError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)}: must have 4 dimensions and agree in all "
            "but the last"
        )
    if (k.dtype, k.device) != (v.dtype, v.device):
        raise InvalidInputError(
            f"k is {k.dtype} on {k.device}, v {v.dtype} on {v.device}: they must be the same"
        )
    _check(k, k, v, granularity, seed, layout)
    ready = v_layout or _ready_layout(k.device)
    return _quantize_kv(k, v, granularity, ready, seed if hadamard else None, layout)


def _check(q: Tensor, k: Tensor, v: Tensor, granularity: str, seed: int, layout: str) -> None:
    if layout not in _LAYOUTS:
        raise InvalidInputError(f"layout={layout!r}: must be one of {', '.join(_LAYOUTS)}")
    if granularity not in GRANULARITIES:
        known = ", ".join(GRANULARITIES)
        raise InvalidInputError(f"granularity={granularity!r}: must be one of {known}")
    if not 0 <= seed < 2**31:
        raise InvalidInputError(f"seed={seed}: must be from 0 to 2^31 - 1")
    bshd = layout == "bshd"
    check_shapes(q, k, v, bshd)
    if q.dtype not in _DTYPES:
        raise InvalidInputError(f"{q.dtype}: must be float16, bfloat16 or float32")
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise InvalidInputError(
            "rounding to fp8 has no gradient: call it under torch.no_grad(), or detach"
        )
    reason = why_too_long(problem_of(q, k, v, causal=False, bshd=bshd))
    if reason is not None:
        raise UnsupportedError(reason)


def _quantize_kv(
    k: Tensor, v: Tensor, granularity: str, v_layout: str, rotation: int | None, layout: str
) -> Fp8KV:
    k8, k_descale = _quantize(k, granularity, 1, rotation, layout)
    if v_layout == "rows":
        v8, v_descale = _quantize(v, granularity, 1, None, layout)
    else:
        by_head = _by_head(v, layout)
        batch, heads, keys, dim = by_head.shape
        shape = (batch, heads, dim, padded_keys(keys))
        v8 = torch.empty(shape, dtype=torch.float8_e4m3fn, device=v.device)
        quantize_into = _implementation(v.device)
        permuted = v_layout == "permuted"
        v_descale = quantize_into(v8.transpose(2, 3), by_head, granularity, 1, None, permuted)
    return Fp8KV(
        k=k8, v=v8, k_descale=k_descale, v_descale=v_descale, v_layout=v_layout,
        rotation_seed=rotation, layout=layout,
    )  # fmt: skip


def _quantize(
    x: Tensor, granularity: str, group: int, rotation: int | None, layout: str
) -> tuple[Tensor, Tensor]:
    """x in fp8, lying as it does, and its descale."""
    x8 = output_like(x, x, dtype=torch.float8_e4m3fn)
    quantize_into = _implementation(x.device)
    into, by_head = _by_head(x8, layout), _by_head(x, layout)
    return x8, quantize_into(into, by_head, granularity, group, rotation, False)


def _by_head(x: Tensor, layout: str) -> Tensor:
    return x.transpose(1, 2) if layout == "bshd" else x


def _ready_layout(device: torch.device) -> str:
    """What the kernels of ``device`` read without moving anything."""
    if device.type == "cuda" and current_target(device).capability == 90:
        return "permuted"
    return "columns"


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
