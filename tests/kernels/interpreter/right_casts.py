"""Casts to and from e4m3 as the hardware does them, for Triton's interpreter.

Its own (seen in Triton 3.6 to 3.9) round ties away from zero, cut what is below 2^-6 instead of
rounding it, drop the carry into the exponent (0.122 becomes 0.0625 instead of 0.125), and make
numbers of NaN and infinities, and of NaN on the way back. e4m3fnuz it can't name at all.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

# As torch has them: the type, and the largest number.
_KINDS = {
    tl.float8e4nv: (torch.float8_e4m3fn, 448),
    tl.float8e4b8: (torch.float8_e4m3fnuz, 240),
}
_WIDER = {tl.float16: torch.float16, tl.bfloat16: torch.bfloat16, tl.float32: torch.float32}


def mend() -> None:
    """From now on this process's interpreter casts fp32 to e4m3 by cvt.rn.satfinite's rules (to
    nearest, ties to even, the largest number for what is more, NaN for NaN), and e4m3 to wider
    types by its meaning."""
    original = interpreter._convert_float

    def convert(x, source, target, rounding):
        if target in _KINDS and source == tl.float32:
            kind, most = _KINDS[target]
            values = torch.from_numpy(x.view(np.float32).copy())
            rounded = values.clamp(-most, most).to(kind).view(torch.uint8)
            nan = torch.tensor(torch.nan).to(kind).view(torch.uint8)
            return torch.where(values.isnan(), nan, rounded).numpy()
        if source in _KINDS and target in _WIDER:
            values = torch.from_numpy(x.view(np.uint8).copy()).view(_KINDS[source][0])
            wide = values.to(_WIDER[target])
            return wide.view(torch.uint8).numpy().view(f"u{wide.element_size()}").reshape(x.shape)
        return original(x, source, target, rounding)

    interpreter._convert_float = convert
    patch = interpreter._patch_lang_core

    def patch_and_name(*arguments):
        # What it sets here is undone with the rest, or set again.
        patch(*arguments)
        to_ir = tl.dtype.to_ir

        def named(self, builder):
            return builder.get_fp8e4b8_ty() if self == tl.float8e4b8 else to_ir(self, builder)

        tl.dtype.to_ir = named

    interpreter._patch_lang_core = patch_and_name
