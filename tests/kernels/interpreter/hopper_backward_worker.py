"""Runs what goes before and after flash_bwd_ws in Triton's interpreter and measures its errors.

Usage: TRITON_INTERPRET=1 python hopper_backward_worker.py < cases.jsonl

As interpreter_worker.py: one case (see test_backward.py) per line, one line of JSON per answer.
"""

import json
import math
import os
import sys
import traceback
from typing import Any

import torch

from autoflash.codegen.render import render
from autoflash.codegen.source_cache import load
from autoflash.kernels import KERNELS
from autoflash.kernels.flash_bwd_ws_space import lead_rows, padded_rows
from autoflash.kernels.kernel import ALIGNED, Argument, Call, Pointer
from autoflash.problem import Problem
from autoflash.runtime.inputs import strides_of
from autoflash.target import NAMED_TARGETS
from tests.kernels.interpreter.interpreter_worker import surrounded

KERNEL = KERNELS["flash_bwd_ws"]
TARGET = NAMED_TARGETS["h100"]


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """The largest errors of -delta, lse2 and dq, and what was written where it should not be."""
    fields = dict(case)
    with_dlse, seed = fields.pop("dlse"), fields.pop("seed")
    problem = Problem(**fields, op="bwd")
    generator = torch.Generator().manual_seed(seed)
    shape = (problem.batch, problem.heads, problem.seqlen_q)
    dtype = getattr(torch, problem.dtype)
    out, dout = (
        surrounded(torch.randn(*shape, problem.head_dim, generator=generator).to(dtype))
        for _ in range(2)
    )
    lse, dlse = (torch.randn(shape, generator=generator) for _ in range(2))
    lse[..., 0] = -math.inf
    given = {"out": out, "dout": dout, "lse": lse} | ({"dlse": dlse} if with_dlse else {})
    made = {s.name: torch.full(s.shape, math.nan) for s in KERNEL.scratch(problem)}
    run("flash_bwd_ws_prepare", problem, given | made)
    padded, lead = padded_rows(problem), lead_rows(problem)
    rows = slice(lead, lead + problem.seqlen_q)
    minus_delta = torch.zeros(*shape[:2], padded)
    minus_delta[..., rows] = -(out.double() * dout.double()).sum(-1)
    minus_delta[..., rows] += dlse if with_dlse else 0
    lse2 = torch.full((*shape[:2], padded), math.inf)
    lse2[..., rows] = lse * math.log2(math.e)
    lse2[..., lead] = math.inf
    finite = lse2 < math.inf
    zeros = made["sums"][:, :, rows].abs().max().item()
    answer = {
        "minus_delta": (made["minus_delta"] - minus_delta).abs().max().item(),
        "lse2": (made["lse2"] - lse2)[finite].abs().sum().item(),
        "infinite": int((made["lse2"][~finite] != math.inf).sum()),
        "sums": zeros,
    }
    made["sums"] = torch.randn(made["sums"].shape, generator=generator)
    dq = surrounded(torch.full_like(out, math.nan))
    run("flash_bwd_ws_convert", problem, made | {"dq": dq})
    expected = (made["sums"][:, :, rows] * 0.3).to(dtype)
    stray = int((~dq._base.isnan()).sum() - (~dq.isnan()).sum())  # type: ignore[union-attr]
    return answer | {"dq": (dq.float() - expected.float()).abs().max().item(), "stray": stray}


def run(name: str, problem: Problem, tensors: dict[str, torch.Tensor]) -> None:
    """One function of the rendered file, with the arguments that its declaration binds."""
    config = KERNEL.default(problem, TARGET)
    (function,) = (f for f in KERNEL.functions(problem, config) if f.name == name)
    strides = {n: strides_of(x, False) for n, x in tensors.items() if x.dim() == 4}
    call = Call(problem=problem, scale=0.3, strides=strides, given=frozenset(tensors))

    def value(argument: Argument) -> Any:
        if isinstance(argument, Pointer):
            # Without a dlse the address is null; the interpreter wants a tensor.
            return tensors.get(argument.tensor, tensors.get("lse"))
        return argument

    assert KERNEL.adapt(config, ALIGNED) == config
    arguments = [value(argument) for argument in function.bind(call)]
    code = getattr(load(render(KERNEL, problem, config)), name)
    code[(function.grid(problem, TARGET),)](*arguments, **function.constexprs)


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
