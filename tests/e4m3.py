"""Bits of float8_e4m3fn, compared: torch has no arithmetic for them."""

import torch
from torch import Tensor


def place(bits: Tensor) -> Tensor:
    """Of e4m3 numbers in their order; of NaN the same for all."""
    magnitude = (bits & 0x7F).int()
    return torch.where(bits > 0x7F, -magnitude, magnitude).masked_fill(is_nan(bits), 1000)


def is_nan(bits: Tensor) -> Tensor:
    return bits & 0x7F == 0x7F
