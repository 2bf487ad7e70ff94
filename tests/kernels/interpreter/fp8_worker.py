"""Runs emitted flash_fwd_fp8 kernels in Triton's interpreter and measures their errors.

Usage: TRITON_INTERPRET=1 python fp8_worker.py < cases.jsonl

Reads one case (a JSON object, see test_fp8.py) per line and answers each with one line of JSON:
what was measured, or the traceback.
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
from autoflash.fp8 import key_order, padded_keys
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.tuning.check_fp8 import expect, rounded, stand_for
from tests.kernels.interpreter.interpreter_worker import Outputs
from tests.kernels.interpreter.right_casts import mend

KERNEL = KERNELS["flash_fwd_fp8"]
CONFIG_NAMES = ("BLOCK_M", "BLOCK_N", "GROUP_HEADS", "FNUZ")
NAN = 0x7F


def make_inputs(problem: Problem, data: str, seed: int) -> list[Tensor]:
    """q, k, v in fp32 with the character that ``data`` names."""
    generator = torch.Generator().manual_seed(seed)
    p = problem
    shapes = (
        (p.batch, p.heads, p.seqlen_q, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim),
        (p.batch, p.kv_heads, p.seqlen_k, p.head_dim_v),
    )
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    # So that each scale is another.
    q[:, ::2] *= 0.5
    k[:, :, 128:] *= 4
    v[:, :, 128:] *= 16
    v[:, 1:] *= 3
    if data == "outliers":
        q[..., ::17] *= 20
        v[..., ::13] *= 20
    elif data == "large":
        q *= 40
    elif data == "dominant":
        # Each row looks at one key.
        k[:, :, p.seqlen_k // 2] *= 30
    elif data == "not finite":
        q[0, -1, p.seqlen_q // 3, 0] = math.inf
        k[-1, 0, p.seqlen_k // 2, -1] = math.nan
        for at in {0, p.seqlen_k // 3, p.seqlen_k - 1}:
            v[0, -1, at, at % p.head_dim_v] = -math.inf
    return [q, k, v]


def surrounded(x: Tensor) -> Tensor:
    """A copy of x as a view of a larger buffer of NaN: rows are 16 longer, heads 3 rows."""
    *outer, rows, dims = x.shape
    if x.dtype != torch.float8_e4m3fn:
        buffer = x.new_full((*outer, rows + 3, dims + 16), math.nan)
    else:
        bits = torch.full((*outer, rows + 3, dims + 16), NAN, dtype=torch.uint8)
        buffer = bits.view(torch.float8_e4m3fn)
    view = buffer[..., :rows, :dims]
    view.copy_(x)
    return view


def with_nan_behind(v: Tensor, problem: Problem) -> Tensor:
    """A transposed v with NaN for the keys behind the last one."""
    keys = padded_keys(problem.seqlen_k)
    order = key_order(keys) if problem.v_layout == "permuted" else torch.arange(keys)
    bits = v.view(torch.uint8).clone()
    bits[..., order >= problem.seqlen_k] = NAN
    return bits.view(v.dtype)


def lying(lie: str, scale: Tensor | None) -> Tensor | None:
    """The same scales as they may be given."""
    if scale is None or lie == "dense":
        return scale
    if scale.dim() == 3:
        return scale.transpose(0, 2).contiguous().transpose(0, 2)
    if scale.dim() == 2:
        # Of a tensor with more in it.
        wide = torch.full((*scale.shape, 3), math.nan)
        wide[..., 1] = scale
        return wide[..., 1]
    return scale


def measure(case: dict) -> dict:
    """Run one case and compare it with fp64."""
    values = dict(case)
    data, seed, lie = values.pop("data"), values.pop("seed"), values.pop("lie")
    dropped, by_query_head = values.pop("dropped"), values.pop("by_query_head")
    # The other Params don't exist for the interpreter.
    names = {name: values.pop(name) for name in CONFIG_NAMES}
    config = KERNEL.space.parse({**names, "num_warps": 4, "num_stages": 1, "maxnreg": 0})
    problem = Problem(**values)
    given = rounded(problem, *make_inputs(problem, data, seed))
    if dropped:
        given = given._replace(**{dropped: None})
    if by_query_head and given.q_descale is not None and given.q_descale.dim() == 2:
        wide = given.q_descale.repeat_interleave(problem.group, 1)
        factors = 2.0 ** (torch.arange(wide.shape[1]) % 3)
        given = given._replace(q_descale=wide * factors)
    expected = expect("", problem, *stand_for(given))
    v = with_nan_behind(given.v, problem) if problem.v_layout != "rows" else given.v
    tensors = [surrounded(x) for x in (given.q, given.k, v)]
    descales = [lying(lie, x) for x in given[3:6]]
    out, lse, outside = run(problem, config, tensors, descales)
    nan = expected.out.isnan()
    error = (out.double() - expected.out).abs()[~nan]
    allowed = torch.as_tensor(expected.allowance).expand_as(nan)[~nan]
    empty = expected.lse == -math.inf
    lse_bad = expected.lse.isnan() | (expected.lse == math.inf)
    lse_error = (lse.double() - expected.lse).abs()[~empty & ~lse_bad]
    return {
        "excess": (error / allowed).max().item() if error.numel() else 0.0,
        "error": error.max().item() if error.numel() else 0.0,
        "nan_differs": int((out.isnan() != nan).sum()),
        "nan": int(nan.sum()),
        "lse_nan_differs": int((lse.isnan() != lse_bad).sum()),
        "lse_error": lse_error.max().item() if lse_error.numel() else 0.0,
        "lse_size": expected.lse[~empty & ~lse_bad].abs().max().item() if lse_error.numel() else 0,
        "empty_rows": int(empty.sum()),
        "empty_wrong": int((lse[empty] != -math.inf).sum() + (out[empty] != 0).sum()),
        "written_outside": outside,
    }


def run(
    problem: Problem, config: Config, tensors: list[Tensor], descales: list[Tensor | None]
) -> tuple[Tensor, Tensor, int]:
    """out, LSE and the count of stray writes of the emitted module's run()."""
    module = load(render(KERNEL, problem, config))
    outputs = Outputs()
    names = ("bfloat16", "float16", "uint8", "float8_e4m3fn")
    outputs.torch = SimpleNamespace(
        **vars(outputs.torch), **{name: getattr(torch, name) for name in names}
    )
    original, module.torch = module.torch, outputs.torch
    try:
        out, lse = module.run(*tensors, *descales)
    finally:
        module.torch = original
    return out, lse, outputs.written_outside()


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
