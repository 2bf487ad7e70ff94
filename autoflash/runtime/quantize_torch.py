"""Quantisation to e4m3 in torch, on any device: what quantize_kernels.py computes, bit for bit."""

import torch
from torch import Tensor

from autoflash.fp8 import E4M3_MAX, SCALE_BLOCK, key_order, scale_shape
from autoflash.rotation import mix, normaliser


def quantize_into(
    out: Tensor, x: Tensor, granularity: str, group: int, seed: int | None, permuted: bool
) -> Tensor:
    """Fill ``out`` with x / descale in e4m3, and return the descale (shape: fp8.scale_shape).

    x [B, H, S, D] is fp16, bf16 or fp32, out [B, H, P, D] float8_e4m3fn with P >= S; both with any
    strides. Rows from S on become zero; with ``permuted`` they lie in fp8.key_order. With a
    ``seed`` x is rotated first (rotation.rotate). Values / scale never exceed 448; what isn't
    finite becomes NaN and doesn't count for a scale; a scale of nothing but zeros is 1.
    """
    batch, heads, rows, dim = x.shape
    x = x.float() if seed is None else mix(x.float(), seed)
    magnitudes = x.abs()
    finite = magnitudes < torch.inf
    magnitudes = magnitudes.where(finite, 0.0)
    shape = scale_shape(granularity, batch, heads, rows, group)
    scale = scale_of(_largest(magnitudes, granularity, group).reshape(shape))
    y = x * _by_row(1.0 / scale, granularity, group, rows)
    y = y.clamp(-E4M3_MAX, E4M3_MAX).where(finite, torch.nan).to(torch.float8_e4m3fn)
    # Bytes, since torch can't fill and index every kind of fp8 tensor.
    padded = torch.zeros((batch, heads, out.shape[2], dim), dtype=torch.uint8, device=x.device)
    padded[:, :, :rows] = y.view(torch.uint8)
    if permuted:
        padded = padded[:, :, key_order(out.shape[2], x.device)]
    out.view(torch.uint8).copy_(padded)
    return scale if seed is None else scale * normaliser(dim)


def scale_of(amax: Tensor) -> Tensor:
    """The scale under which ``amax`` is 448. Below 2^-110 nothing is left of x, nor need be:
    1 / scale stays finite."""
    return torch.where(amax > 0, (amax * (1 / E4M3_MAX)).clamp_min(2.0**-110), 1.0)


def _largest(x: Tensor, granularity: str, group: int) -> Tensor:
    """Maxima of x [B, H, S, D] >= 0 by scale; 0 of nothing."""
    batch, heads, rows, dim = x.shape
    if granularity == "tensor":
        return x.amax() if x.numel() else x.new_zeros(1)
    size = SCALE_BLOCK if granularity == "block" else max(rows, 1)
    blocks = -(-rows // size) if granularity == "block" else 1
    x = torch.nn.functional.pad(x, (0, 0, 0, blocks * size - rows))
    x = x.reshape(batch, heads, blocks, size, dim).amax((3, 4))
    return x if granularity == "block" else x.reshape(batch, heads // group, group).amax(2)


def _by_row(scale: Tensor, granularity: str, group: int, rows: int) -> Tensor:
    """Broadcasts against [B, H, S, D]."""
    if granularity == "tensor":
        return scale
    if granularity == "head":
        return scale.repeat_interleave(group, 1)[:, :, None, None]
    return scale.repeat_interleave(SCALE_BLOCK, 2)[:, :, :rows, None]
