"""From tensors to a Problem: what is refused, with the reason, before anything is launched."""

from collections.abc import Iterable

import torch
from torch import Tensor

from autoflash.dtypes import DTYPE_BYTES
from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.kernels.kernel import Access
from autoflash.problem import MAX_HEAD_DIM, Problem

_GPU_DTYPES = (torch.float16, torch.bfloat16)


def check_tensors(q: Tensor, k: Tensor, v: Tensor, bshd: bool) -> None:
    """Raise InvalidInputError or UnsupportedError unless q, k and v make an attention call.

    Works on real and on symbolic (fake) tensors.
    """
    check_shapes(q, k, v, bshd)
    if q.device.type == "cuda" and q.dtype not in _GPU_DTYPES:
        raise UnsupportedError(
            f"{q.dtype} is not served on a GPU: convert to torch.float16 or torch.bfloat16"
        )
    if not q.dtype.is_floating_point or q.dtype.itemsize < 2:
        raise UnsupportedError(f"{q.dtype} is not served: use float16, bfloat16 or float32")


def check_shapes(q: Tensor, k: Tensor, v: Tensor, bshd: bool, *, same_dtype: bool = True) -> None:
    """Raise InvalidInputError unless q, k and v agree in shape, dtype (if they must) and device.

    Works on real and on symbolic (fake) tensors.
    """
    layout = "[batch, seqlen, heads, head_dim]" if bshd else "[batch, heads, seqlen, head_dim]"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise InvalidInputError(
                f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}: expected 4, {layout}"
            )
    for name, x in (("k", k), ("v", v)):
        if same_dtype and x.dtype != q.dtype:
            raise InvalidInputError(f"{name} is {x.dtype}, q is {q.dtype}: they must be the same")
        if x.device != q.device:
            raise InvalidInputError(
                f"{name} is on {x.device}, q on {q.device}: move them to one device"
            )
        if x.shape[0] != q.shape[0]:
            raise InvalidInputError(f"batch of {name} is {x.shape[0]}, of q {q.shape[0]}")
    heads, rows = (2, 1) if bshd else (1, 2)
    if k.shape[rows] != v.shape[rows] or k.shape[heads] != v.shape[heads]:
        raise InvalidInputError(
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must agree in heads and seqlen"
        )
    if k.shape[3] != q.shape[3]:
        raise InvalidInputError(f"head_dim of k is {k.shape[3]}, of q {q.shape[3]}")
    for name, dim in (("head_dim", q.shape[3]), ("head_dim of v", v.shape[3])):
        if dim < 1 or dim > MAX_HEAD_DIM:
            raise InvalidInputError(f"{name} is {dim}: must be from 1 to {MAX_HEAD_DIM}")
    if k.shape[heads] < 1 or q.shape[heads] < 1 or q.shape[heads] % k.shape[heads] != 0:
        raise InvalidInputError(
            f"{q.shape[heads]} query heads are not a multiple of {k.shape[heads]} key/value heads"
        )


def problem_of(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, bshd: bool, op: str = "fwd"
) -> Problem:
    """The Problem of a checked call."""
    heads, rows = (2, 1) if bshd else (1, 2)
    dtype = str(q.dtype).removeprefix("torch.")
    return Problem(
        batch=q.shape[0],
        heads=q.shape[heads],
        kv_heads=k.shape[heads],
        seqlen_q=q.shape[rows],
        seqlen_k=k.shape[rows],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=dtype if dtype in DTYPE_BYTES else "float32",
        causal=causal,
        op=op,
    )


def check_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, bshd: bool
) -> None:
    """Raise InvalidInputError unless these go with a checked q, k, v: dout, out, LSE and its
    gradient."""
    shape = (*q.shape[:3], v.shape[3])
    for name, x in (("dout", dout), ("out", out)):
        if tuple(x.shape) != shape or x.dtype != q.dtype or x.device != q.device:
            raise InvalidInputError(
                f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}: "
                f"expected {shape} {q.dtype} on {q.device}"
            )
    for name, y in (("lse", lse), ("dlse", dlse)):
        if y is not None and (tuple(y.shape) != lse_shape(q, bshd) or y.device != q.device):
            raise InvalidInputError(
                f"{name} is {tuple(y.shape)} on {y.device}: "
                f"expected {lse_shape(q, bshd)} on {q.device}"
            )


def strides_of(x: Tensor, bshd: bool) -> tuple[int, int, int]:
    """(batch, head, row) strides in elements; 0 for a dimension of size one, never stepped."""
    batch, heads, rows = (0, 2, 1) if bshd else (0, 1, 2)
    return (
        x.stride(batch) if x.shape[batch] > 1 else 0,
        x.stride(heads) if x.shape[heads] > 1 else 0,
        x.stride(rows) if x.shape[rows] > 1 else 0,
    )


def all_strides(bshd: bool, **tensors: Tensor) -> dict[str, tuple[int, int, int]]:
    """``strides_of`` each tensor, by the name it has in a Call."""
    return {name: strides_of(x, bshd) for name, x in tensors.items()}


def access_of(tensors: Iterable[Tensor], bshd: bool) -> Access:
    """What a variant may assume about where these tensors lie."""
    aligned = True
    tma = True
    for x in tensors:
        size = x.element_size()
        used = [s for s in strides_of(x, bshd) if s]
        aligned &= x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in used)
        stepped = [x.stride(i) for i in range(3) if x.shape[i] > 1]
        # The copy engine takes strides below 2^40 bytes; an expanded dimension has stride 0.
        tma &= all(0 < s * size < 2**40 for s in stepped)
    return Access(aligned=aligned, tma=aligned and tma)


def has_contiguous_rows(x: Tensor) -> bool:
    """Whether the last dimension lies densely, as the kernels need."""
    return x.stride(3) == 1 or x.shape[3] == 1


def output_like(
    q: Tensor,
    v: Tensor,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """An uninitialised out for q and v: the real and the fake kernel allocate alike.

    Dense, with heads and rows in memory in the order they have in q. So
    q = x.view(B, S, H, D).transpose(1, 2) gives an out that transposes back without a copy.
    """
    batch, one, two, dim = *q.shape[:3], v.shape[3]
    inner = (dim, one * dim) if q.stride(1) < q.stride(2) else (two * dim, dim)
    return torch.empty_strided(
        (batch, one, two, dim),
        (one * two * dim, *inner, 1),
        dtype=dtype or q.dtype,
        device=device or q.device,
    )


def lse_shape(q: Tensor, bshd: bool) -> tuple[int, ...]:
    """[batch, heads, seqlen_q]."""
    return (q.shape[0], q.shape[2], q.shape[1]) if bshd else (q.shape[0], q.shape[1], q.shape[2])
