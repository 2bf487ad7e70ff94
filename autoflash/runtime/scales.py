"""The scales of an fp8 call: what is refused, with the reason, before anything is launched."""

import torch
from torch import Tensor

from autoflash.errors import InvalidInputError
from autoflash.fp8 import SCALE_BLOCK, scale_blocks


def check_scales(
    q: Tensor,
    k: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    bshd: bool,
) -> None:
    """Raise InvalidInputError unless each descale has a shape, dtype and device that fit.

    q and k are the checked tensors of the call; None stands for 1. Shapes: autoflash.fp8. Strides
    are free, zeros too. Works on real and on symbolic (fake) tensors, and reads no values.
    """
    kv_heads = k.shape[2 if bshd else 1]
    for name, scale, x in (
        ("q_descale", q_descale, q), ("k_descale", k_descale, k), ("v_descale", v_descale, k),
    ):  # fmt: skip
        if scale is not None:
            _check_scale(name, scale, x, kv_heads, bshd)


def scale_strides(scale: Tensor, kv_heads: int) -> tuple[int, int, int, int]:
    """(batch, key/value head, head in its group, block) strides in elements of a checked descale; 0
    where it doesn't vary."""
    if scale.dim() < 2:
        return (0, 0, 0, 0)
    batch, heads, blocks = (*scale.shape, 1)[:3]
    by_batch, by_head, by_block = (*scale.stride(), 0)[:3]
    group = heads // kv_heads
    return (
        by_batch if batch > 1 else 0,
        by_head * group if kv_heads > 1 else 0,
        by_head if group > 1 else 0,
        by_block if blocks > 1 else 0,
    )


def check_scale_values(**scales: Tensor | None) -> None:
    """Raise InvalidInputError where a descale on the CPU holds a number that is not finite and > 0.

    On a GPU that would stop the host until the GPU is done, and isn't looked at: NaN or an
    infinity there gives NaN (or infinities, in a v_descale) in the rows that it serves, 0 and
    negative ones give wrong results.
    Not for fake tensors, which have no values.
    """
    for name, scale in scales.items():
        if scale is None or scale.device.type != "cpu":
            continue
        wrong = scale[~(torch.isfinite(scale) & (scale > 0))]
        if wrong.numel():
            raise InvalidInputError(
                f"{name} holds {wrong[0].item()}: a descale must be finite and positive, 1 where "
                "there is nothing to scale"
            )


def _check_scale(name: str, scale: Tensor, x: Tensor, kv_heads: int, bshd: bool) -> None:
    """``x`` is q, or k for the scales of k and v, which agree in all that is asked of them."""
    batch, heads, rows = x.shape[0], x.shape[2 if bshd else 1], x.shape[1 if bshd else 2]
    shapes = {"per key/value head": (batch, kv_heads)}
    if heads != kv_heads:
        shapes["per query head"] = (batch, heads)
    blocks = (batch, heads, scale_blocks(rows))
    if tuple(scale.shape) not in ((), (1,), *shapes.values(), blocks):
        by_head = "".join(f"{list(shape)} {what}, " for what, shape in shapes.items())
        raise InvalidInputError(
            f"{name} has shape {list(scale.shape)}: must be [] or [1] for the whole tensor, "
            f"{by_head}or {list(blocks)} per block of {SCALE_BLOCK} rows"
        )
    if scale.dtype != torch.float32:
        raise InvalidInputError(f"{name} is {scale.dtype}: must be torch.float32")
    if scale.device != x.device:
        raise InvalidInputError(f"{name} is on {scale.device}, its tensor on {x.device}")
