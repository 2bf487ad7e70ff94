"""Runs the emitted backward in Triton's interpreter and measures its errors.

Usage: TRITON_INTERPRET=1 python backward_worker.py < cases.jsonl

As interpreter_worker.py: one case (see test_backward.py) per line, one line of JSON per answer.
"""

import json
import math
import os
import sys
import traceback
from typing import Any

import torch
from torch import Tensor

from autoflash.codegen.render import render
from autoflash.codegen.source_cache import load
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.reference import exact_attention, exact_gradients, gradient_allowances
from autoflash.space import Config
from tests.kernels.interpreter.interpreter_worker import (
    Outputs,
    make_inputs,
    score_size,
    surrounded,
)

KERNEL = KERNELS["flash_bwd"]
TILES = ("DKDV_BLOCK_M", "DKDV_BLOCK_N", "DQ_BLOCK_M", "DQ_BLOCK_N", "GROUP_HEADS", "LOAD")
OTHERS = {"DKDV_WARPS": 4, "DKDV_STAGES": 1, "DQ_WARPS": 4, "DQ_STAGES": 1}


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Run one case and compare it with fp64."""
    values = dict(case)
    data, seed, with_dlse = (values.pop(name) for name in ("data", "seed", "dlse"))
    config = Config(**{name: values.pop(name) for name in TILES}, **OTHERS)
    KERNEL.space.parse(config)
    problem = Problem(**values, op="bwd")
    q, k, v = make_inputs(problem, data, seed)
    scale, causal = problem.head_dim**-0.5, problem.causal
    generator = torch.Generator().manual_seed(seed + 1)
    dout = torch.randn(*q.shape[:3], problem.head_dim_v, generator=generator).to(q.dtype)
    if data == "expanded dout":
        dout = dout[:1, :1, :1].expand(dout.shape)
    dlse = torch.randn(q.shape[:3], generator=generator) if with_dlse else None
    out, lse = exact_attention(q, k, v, causal=causal, scale=scale)
    exact = exact_gradients(dout, dlse, q, k, v, causal=causal, scale=scale)
    allowed = gradient_allowances(dout, dlse, q, k, v, causal=causal, scale=scale, exact=exact)

    given = {"q": q, "k": k, "v": v, "out": out.to(q.dtype), "dout": dout}
    given = {name: surrounded(x) for name, x in given.items()}
    if data == "expanded dout":
        given["dout"] = dout
    if data == "hidden nan":
        spoil(problem, given)
    grads, outside = run(problem, config, given, lse.float(), dlse)
    return {
        "errors": [(x.double() - y).abs().max().item() for x, y in zip(grads, exact, strict=True)],
        "term_sizes": term_sizes(problem, q, k, v, dout, dlse, out, lse),
        "score_size": score_size(q, k) * scale,
        "allowed": allowed,
        "nan": sum(int(x.isnan().sum()) for x in grads),
        "empty_rows": int((lse == -math.inf).sum()),
        "empty_dq": grads[0][lse == -math.inf].abs().sum().item(),
        "written_outside": outside,
    }


def term_sizes(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None,
    out: Tensor, lse: Tensor,
) -> list[float]:  # fmt: skip
    """The largest sums of the terms of dq, dk and dv without their signs: what a relative error of
    P or dS is relative to."""
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    scale = problem.head_dim**-0.5
    p = torch.exp(q @ k.mT * scale - lse.nan_to_num(neginf=math.inf).unsqueeze(-1))
    delta = (dout.abs() * out.abs()).sum(-1) + (0 if dlse is None else dlse.abs())
    if problem.causal:
        p = p.tril(problem.seqlen_k - problem.seqlen_q)
    ds = p * (dout.abs() @ v.abs().mT + delta.unsqueeze(-1)) * scale
    terms = [ds @ k.abs(), ds.mT @ q.abs(), p.mT @ dout.abs()]
    summed = [x.unflatten(1, (-1, problem.group)).sum(2) for x in terms[1:]]
    return [x.max().item() for x in (terms[0], *summed)]


def spoil(problem: Problem, given: dict[str, Tensor]) -> None:
    """NaN in what no gradient depends on: rows of a causal problem that see no key."""
    rows = max(0, problem.seqlen_q - problem.seqlen_k)
    for name in ("q", "out", "dout"):
        given[name][:, :, :rows] = math.nan


def run(
    problem: Problem, config: Config, given: dict[str, Tensor], lse: Tensor, dlse: Tensor | None
) -> tuple[list[Tensor], int]:
    """dq, dk, dv and the count of stray writes of the emitted module's run()."""
    module = load(render(KERNEL, problem, config))
    outputs = Outputs()
    original, module.torch = module.torch, outputs.torch
    try:
        flat = [x if x is None else within_nan(x) for x in (lse, dlse)]
        q, k, v, out, dout = (given[name] for name in ("q", "k", "v", "out", "dout"))
        grads = module.run(q, k, v, out, flat[0], dout, flat[1])
    finally:
        module.torch = original
    return list(grads), outputs.written_outside()


def within_nan(x: Tensor) -> Tensor:
    """A contiguous copy of ``x`` with NaN before and behind it in memory."""
    buffer = torch.full((x.numel() + 64,), math.nan, dtype=x.dtype)
    view = buffer[32 : 32 + x.numel()].view(x.shape)
    view.copy_(x)
    return view


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
