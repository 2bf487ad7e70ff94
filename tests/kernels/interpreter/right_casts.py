"""Casts to e4m3 as the hardware does them, for Triton's interpreter.

Its own (seen in Triton 3.6 to 3.8) round ties away from zero, cut what is below 2^-6 instead of
rounding it, drop the carry into the exponent (0.122 becomes 0.0625 instead of 0.125), and make
numbers of NaN and infinities.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    """From now on this process's interpreter casts fp32 to e4m3 by cvt.rn.satfinite's rules: to
    nearest, ties to even, 448 for what is more, 0x7f for NaN."""
    original = interpreter._convert_float

    def convert(x, source, target, rounding):
        if target == tl.float8e4nv and source == tl.float32:
            values = torch.from_numpy(x.view(np.float32).copy())
            rounded = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            return rounded.masked_fill(values.isnan(), 0x7F).numpy()
        return original(x, source, target, rounding)

    interpreter._convert_float = convert
