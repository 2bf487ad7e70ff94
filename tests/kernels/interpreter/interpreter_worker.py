"""Runs emitted kernels in Triton's interpreter and measures their errors.

Usage: TRITON_INTERPRET=1 python interpreter_worker.py < cases.jsonl

Reads one case (a JSON object, see test_numerics.py) per line and answers each with one line of
JSON: what was measured, or the traceback. The interpreter is chosen when triton is imported, so
this must be a process of its own.
"""

import json
import math
import os
import sys
import traceback
from types import SimpleNamespace

import torch
from torch import Tensor

from autoflash.codegen.render import render
from autoflash.codegen.source_cache import load
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.reference import error_allowance, exact_attention
from autoflash.space import Config

KERNEL = KERNELS["flash_fwd"]
CONFIG_NAMES = ("BLOCK_M", "BLOCK_N", "LOAD", "GROUP_HEADS", "DIAGONAL_FIRST")
FILL = math.nan


def surrounded(x: Tensor) -> Tensor:
    """A copy of x [B, H, S, D] as a view of a larger buffer of NaN: rows are 8 longer, heads 3."""
    batch, heads, rows, dims = x.shape
    buffer = x.new_full((batch, heads, rows + 3, dims + 8), FILL)
    view = buffer[:, :, :rows, :dims]
    view.copy_(x)
    return view


def make_inputs(problem: Problem, data: str, seed: int) -> list[Tensor]:
    """q, k, v with the character that ``data`` names."""
    generator = torch.Generator().manual_seed(seed)
    p, dtype = problem, getattr(torch, problem.dtype)
    shapes = (
        (p.batch, p.heads, p.seqlen_q, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim_v),
    )
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    if data == "outliers":
        q[..., ::17] *= 20
        v[..., ::13] *= 20
    elif data == "large":
        q *= 40
    elif data == "negative":
        q[..., 0], k[..., 0] = 50, -50
    return [x.to(dtype) for x in (q, k, v)]


class Outputs:
    """Stands in for torch in the emitted module: its ``empty`` gives memory full of NaN.

    The rest of each buffer must still be NaN when the kernel is done.
    """

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, Tensor]] = []
        self.torch = SimpleNamespace(empty=self.empty, float32=torch.float32)

    def empty(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if len(shape) == 4:
            view = surrounded(torch.full(shape, FILL, dtype=dtype, device=device))
            self.buffers.append((view._base, view))
            return view
        # The LSE is contiguous.
        buffer = torch.full((math.prod(shape) + 64,), FILL, dtype=dtype, device=device)
        view = buffer[: math.prod(shape)].view(shape)
        self.buffers.append((buffer, view))
        return view

    def written_outside(self) -> int:
        """How many elements outside the outputs were written."""
        count = 0
        for buffer, view in self.buffers:
            outside = torch.ones_like(buffer, dtype=torch.bool)
            outside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(False)
            count += int((outside & ~buffer.isnan()).sum())
        return count


def measure(case: dict) -> dict:
    """Run one case and compare it with fp64."""
    values = dict(case)
    data, seed = values.pop("data"), values.pop("seed")
    # The other Params don't exist for the interpreter.
    names = {name: values.pop(name) for name in CONFIG_NAMES}
    config = KERNEL.space.parse({**names, "num_warps": 4, "num_stages": 1, "maxnreg": 0})
    problem = Problem(**values)
    q, k, v = make_inputs(problem, data, seed)
    scale = problem.head_dim**-0.5
    compared = problem.seqlen_q
    given = [surrounded(x) for x in (q, k, v)]
    if data == "hidden nan":
        # Keys that only the last block of rows may see.
        compared = (problem.seqlen_q - 1) // config["BLOCK_M"] * config["BLOCK_M"]
        for x in given[1:]:
            x[:, :, max(0, compared + problem.seqlen_k - problem.seqlen_q) :] = math.nan
    out, lse, outside = run(problem, config, given)
    exact_out, exact_lse = exact_attention(q, k, v, causal=problem.causal, scale=scale)
    return {
        **compare(out, lse, exact_out, exact_lse, compared),
        "allowance": error_allowance(q, k, v, causal=problem.causal, scale=scale),
        "score_size": score_size(q, k) * scale,
        "v_size": v.abs().max().item(),
        "rows": compared,
        "written_outside": outside,
    }


def score_size(q: Tensor, k: Tensor) -> float:
    """The largest sum of |q| |k|: roundings of a score are relative to it."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return (q.double().abs() @ keys.double().abs().mT).max().item()


def run(problem: Problem, config: Config, given: list[Tensor]) -> tuple[Tensor, Tensor, int]:
    """out, LSE and the count of stray writes of the emitted module's run()."""
    module = load(render(KERNEL, problem, config))
    outputs = Outputs()
    original, module.torch = module.torch, outputs.torch
    try:
        out, lse = module.run(*given)
    finally:
        module.torch = original
    return out, lse, outputs.written_outside()


def compare(
    out: Tensor, lse: Tensor, exact_out: Tensor, exact_lse: Tensor, rows: int
) -> dict[str, float]:
    """Errors of the first ``rows`` rows."""
    out, lse = out[:, :, :rows].double(), lse[:, :, :rows].double()
    exact_out, exact_lse = exact_out[:, :, :rows], exact_lse[:, :, :rows]
    empty = exact_lse == -math.inf
    error = (out - exact_out).abs()
    lse_error = (lse - exact_lse).abs()[~empty]
    return {
        "error": error.max().item(),
        "lse_error": lse_error.max().item() if lse_error.numel() else 0.0,
        "nan": int(out.isnan().sum() + lse.isnan().sum()),
        "empty_rows": int(empty.sum()),
        "empty_lse_wrong": int((lse[empty] != -math.inf).sum()),
        "empty_out": out[empty].abs().max().item() if empty.any() else 0.0,
    }


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit(__doc__)
    torch.set_num_threads(1)
    for line in sys.stdin:
        try:
            answer = measure(json.loads(line))
        except Exception:  # noqa: BLE001 the test that asked shows it
            answer = {"traceback": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
