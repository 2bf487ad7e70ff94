"""From the tensors of an fp8 call to a Problem: what is refused before anything is launched."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autoflash.dtypes import FP8
from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.fp8 import GRANULARITIES, V_LAYOUTS, Fp8KV, padded_keys
from autoflash.problem import Problem
from autoflash.runtime.inputs import check_shapes
from autoflash.runtime.scales import check_scales

_FP8 = torch.float8_e4m3fn
_HALF_DTYPES = (torch.float16, torch.bfloat16)
_BY_DIMS = {2: "head", 3: "block"}


class Operands(NamedTuple):
    """What attention is given where k and v are fp8: the arguments of the op, but for the scale and
    the flags."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_descale: Tensor | None
    k_descale: Tensor | None
    v_descale: Tensor | None
    out_dtype: torch.dtype
    v_layout: str

    @property
    def tensors(self) -> list[Tensor]:
        """All that are given."""
        return [x for x in self[:6] if x is not None]

    @property
    def descales(self) -> dict[str, Tensor | None]:
        """By their names."""
        return {name: getattr(self, name) for name in ("q_descale", "k_descale", "v_descale")}


def operands(
    q: Tensor, k: Tensor | Fp8KV, v: Tensor | None, descales: Sequence[Tensor | None],
    out_dtype: torch.dtype | None, v_layout: str, layout: str,
) -> Operands | None:  # fmt: skip
    """The operands of a call, with an Fp8KV unpacked and the default out_dtype; None if nothing of
    it is fp8, nor asked to be.

    ``descales`` are those of q, k and v. Raises InvalidInputError for an Fp8KV that is given more
    than a q, and for what only fp8 has.
    """
    q_descale, k_descale, v_descale = descales
    if isinstance(k, Fp8KV):
        kv = k
        if v is not None or k_descale is not None or v_descale is not None or v_layout != "rows":
            raise InvalidInputError(
                "an Fp8KV stands for k and v, their descales and v_layout: leave these out"
            )
        if kv.layout != layout:
            raise InvalidInputError(f"layout={layout!r}: the Fp8KV was made of {kv.layout!r}")
        k, v, k_descale, v_descale = kv.k, kv.v, kv.k_descale, kv.v_descale
        v_layout = kv.v_layout
    elif v is None:
        raise InvalidInputError("v is missing: only an Fp8KV stands for both k and v")
    elif not (_is_8_bit(q) or _is_8_bit(k) or _is_8_bit(v)):
        named = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        given = [name for name, x in named.items() if x is not None]
        given += ["v_layout"] if v_layout != "rows" else []
        if given:
            raise InvalidInputError(f"{given[0]} is for k and v in {_FP8}: k is {k.dtype}")
        if out_dtype is not None and out_dtype != q.dtype:
            raise InvalidInputError(f"out_dtype={out_dtype}: out is like q here, {q.dtype}")
        return None
    if out_dtype is None:
        out_dtype = torch.bfloat16 if q.dtype == _FP8 else q.dtype
    return Operands(q, k, v, q_descale, k_descale, v_descale, out_dtype, v_layout)


def check_operands(given: Operands, bshd: bool) -> None:
    """Raise InvalidInputError or UnsupportedError unless these make an attention call.

    Works on real and on symbolic (fake) tensors; reads no values.
    """
    q, k, v = given.q, given.k, given.v
    for name, x in (("q", q), ("k", k), ("v", v)):
        if _is_8_bit(x) and x.dtype != _FP8:
            raise UnsupportedError(f"{name} is {x.dtype}, which is not served: use {_FP8}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != _FP8:
            raise InvalidInputError(
                f"{name} is {x.dtype}: in fp8 attention k and v are both {_FP8} (q may have 16 "
                "bits)"
            )
    if q.dtype not in (_FP8, *_HALF_DTYPES):
        raise InvalidInputError(
            f"q is {q.dtype}: beside k and v in fp8 it must be {_FP8} (autoflash.quantize_fp8), "
            "torch.float16 or torch.bfloat16"
        )
    if given.q_descale is not None and q.dtype != _FP8:
        raise InvalidInputError(f"q_descale is for a q in fp8, and q is {q.dtype}")
    allowed = _HALF_DTYPES if q.dtype == _FP8 else (q.dtype,)
    if given.out_dtype not in allowed:
        known = " or ".join(map(str, allowed))
        raise InvalidInputError(f"out_dtype={given.out_dtype} with q {q.dtype}: must be {known}")
    if given.v_layout not in V_LAYOUTS:
        known = ", ".join(V_LAYOUTS)
        raise InvalidInputError(f"v_layout={given.v_layout!r}: must be one of {known}")
    check_shapes(q, k, _checked_rows(given, bshd), bshd, same_dtype=False)
    check_scales(q, k, *given[3:6], bshd)


def v_rows(given: Operands, bshd: bool) -> Tensor:
    """v as k lies, a view: of a permuted one with its keys in the order that it has them in."""
    if given.v_layout == "rows":
        return given.v
    v = given.v[..., : given.k.shape[1 if bshd else 2]].transpose(2, 3)
    return v.transpose(1, 2) if bshd else v


def v_as_called(given: Operands, bshd: bool) -> Tensor:
    """v with its dimensions in the order of q's: of a transposed one a dim counts as a row."""
    return given.v.transpose(1, 2) if bshd and given.v_layout != "rows" else given.v


def problem_of_fp8(given: Operands, *, causal: bool, bshd: bool) -> Problem:
    """The Problem of a checked call."""
    q, k = given.q, given.k
    heads, rows = (2, 1) if bshd else (1, 2)
    found = [_BY_DIMS.get(x.dim(), "tensor") for x in given[3:6] if x is not None]
    return Problem(
        batch=q.shape[0],
        heads=q.shape[heads],
        kv_heads=k.shape[heads],
        seqlen_q=q.shape[rows],
        seqlen_k=k.shape[rows],
        head_dim=q.shape[3],
        head_dim_v=v_rows(given, bshd).shape[3],
        dtype=str(q.dtype).removeprefix("torch."),
        causal=causal,
        kv_dtype=FP8,
        out_dtype=str(given.out_dtype).removeprefix("torch."),
        scales=max(["tensor", *found], key=GRANULARITIES.index),
        v_layout=given.v_layout,
    )


def _is_8_bit(x: Tensor) -> bool:
    return x.dtype.is_floating_point and x.dtype.itemsize == 1


def _checked_rows(given: Operands, bshd: bool) -> Tensor:
    v, k = given.v, given.k
    if given.v_layout == "rows" or k.dim() != 4:
        return v
    keys = padded_keys(k.shape[1 if bshd else 2])
    if v.dim() != 4 or v.shape[3] != keys:
        raise InvalidInputError(
            f"v has shape {tuple(v.shape)}: with v_layout={given.v_layout!r} it must be [batch, "
            f"kv_heads, head_dim_v, {keys}], the last being seqlen_k rounded up to 16"
        )
    return v_rows(given, bshd)
