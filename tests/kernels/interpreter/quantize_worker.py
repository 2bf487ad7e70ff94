"""Runs the quantisation kernels in Triton's interpreter beside the same in torch.

Usage: TRITON_INTERPRET=1 python quantize_worker.py < cases.jsonl

Reads one case (a JSON object, see test_quantize.py) per line and answers each with one line of
JSON: how many bytes of the two results differ, or the traceback.
"""

import json
import os
import sys
import traceback

import torch
from torch import Tensor

from autoflash.runtime import quantize_torch, quantize_triton
from tests.e4m3 import is_nan
from tests.kernels.interpreter.right_casts import mend

GUARD = 0x55


def make_input(case: dict) -> Tensor:
    """x [B, H, S, D] as a view with the strides that ``case`` names."""
    generator = torch.Generator().manual_seed(case["seed"])
    shape = (case["batch"], case["heads"], case["rows"], case["dim"])
    x = torch.randn(shape, generator=generator)
    data = case["data"]
    if data == "outliers":
        x[torch.rand(shape, generator=generator) < 0.001] *= 50
    elif data == "zero blocks":
        x[:, ::2] = 0
        x[:, :, :128] = 0
    elif data == "not finite":
        drawn = torch.rand(shape, generator=generator)
        for i, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
            x[(drawn > i / 50) & (drawn < i / 50 + 0.005)] = value
    elif data == "all nan":
        x[:] = torch.nan
    elif data == "tiny":
        x *= 1e-38
    elif data == "ties":
        # Halfway between e4m3 numbers, under a scale of one.
        x = torch.randint(-448 * 4, 448 * 4, shape, generator=generator) / 4.0
        x[..., 0] = 448
    x = x.to(getattr(torch, case["dtype"]))
    if case["strides"] == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if case["strides"] == "columns":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if case["strides"] == "slice":
        wide = torch.full((*shape[:3], shape[3] + 6), torch.nan, dtype=x.dtype)
        wide[..., 3 : 3 + shape[3]] = x
        return wide[..., 3 : 3 + shape[3]]
    return x


def measure(case: dict) -> dict:
    x = make_input(case)
    batch, heads, rows, dim = x.shape
    keys = -(-rows // 16) * 16 if case["transposed"] else rows
    count = batch * heads * keys * dim
    results, outside = [], 0
    for module in (quantize_triton, quantize_torch):
        # Guards before and behind the output must stay.
        buffer = torch.full((count + 64,), GUARD, dtype=torch.uint8)
        inner = buffer[32 : 32 + count].view(torch.float8_e4m3fn)
        out = inner.view(batch, heads, dim, keys).mT if case["transposed"] else inner.view(x.shape)
        descale = module.quantize_into(
            out, x, case["granularity"], case["group"], case["rotation"], case["permuted"]
        )
        results.append((out.contiguous().view(torch.uint8), descale))
        outside += int((buffer[:32] != GUARD).sum() + (buffer[32 + count :] != GUARD).sum())
    (got, got_scale), (want, want_scale) = results
    return {
        "different": int((got != want).sum()),
        "different_scales": int((got_scale != want_scale).sum()),
        "same_shapes": got_scale.shape == want_scale.shape,
        "outside": outside,
        "nan": int(is_nan(got).sum()),
    }


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit(__doc__)
    torch.set_num_threads(1)
    mend()
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception:  # noqa: BLE001 the test that asked shows it
            answer = {"traceback": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
