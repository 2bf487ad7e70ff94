"""What rounding q, k and v to fp8 costs: root-mean-square errors against fp64 of the unrounded
inputs, by granularity of the scales, with and without the Hadamard rotation. A table, and JSON
under benchmarks/.

usage: fp8_accuracy.py [--seqlens 2k,8k,16k] [--head-dim 128] [--heads 2] [--seeds 3] [--rows 512]
                       [--out FILE]

Inputs (bf16, batch 1, no mask):
  normal    N(0, 1)
  paper     N(0, 1) + N(0, 10^2) in 0.1 % of the entries: FlashAttention-3's (section 4.3)
  outliers  N(0, 1), 0.1 % of the entries times 50
  mean      normal, but v has a mean of 2: sums of many numbers of one sign
  peaked    normal, but the first row of each 128 is four times a key of its own, which takes all
            of its weight; only these rows are compared
All of q, k and v have outliers. Compared are --rows rows of each head, in whole blocks of 128 drawn
by lot, over all heads and seeds.

Methods: torch's attention in bf16, and fp8 as emulated (autoflash.reference_fp8). On a GPU too what
autoflash.attention serves for fp8, and FlashAttention-3's fp8 and bf16 if fa3-fwd is installed. All
fp8 is of the same quantisers.
"""

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_attention import write_results
from rich.console import Console
from rich.table import Table
from torch import Tensor

from autoflash import QuantizedQKV, attention, quantize_fp8
from autoflash.fp8 import SCALE_BLOCK
from autoflash.problem import Problem, parse_length
from autoflash.reference import exact_attention
from autoflash.reference_fp8 import emulate_fp8_attention
from autoflash.runtime.inputs_fp8 import Operands
from autoflash.tuning.bench import implementation

# q, k, v [1, H, S, D] in bf16, and which blocks of 128 query rows are wanted: out of these rows.
Method = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--seqlens", default="2k,8k,16k")
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where the checkout has no git history")
    arguments = parser.parse_args()
    rows = []
    for length in arguments.seqlens.split(","):
        shape = (1, arguments.heads, parse_length("seqlen", length), arguments.head_dim)
        for name in INPUTS:
            rows.append(row(name, shape, arguments.seeds, arguments.rows))
            print(rows[-1]["input"], shape, rows[-1]["rmse"], flush=True)
            out = write_results(rows, "fp8_accuracy.json", arguments)
    Console(width=250).print(table(rows), f"\nwritten: {out}")


def row(name: str, shape: tuple[int, ...], seeds: int, rows: int) -> dict[str, Any]:
    """RMSE of each method on one kind of input."""
    methods = METHODS | (ON_A_GPU if DEVICE == "cuda" else {})
    errors: dict[str, list[Tensor]] = {method: [] for method in methods}
    sizes = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (x.to(DEVICE, torch.bfloat16) for x in INPUTS[name](shape, generator))
        count = max(1, rows // SCALE_BLOCK)
        blocks = torch.randperm(shape[2] // SCALE_BLOCK, generator=generator)[:count].to(DEVICE)
        exact, _ = exact_attention(rows_of(q, blocks), k, v, causal=False, scale=shape[3] ** -0.5)
        step = SCALE_BLOCK if name == "peaked" else 1
        sizes.append(exact[:, :, ::step].square().mean())
        for method, attend in methods.items():
            error = attend(q, k, v, blocks).double() - exact
            errors[method].append(error[:, :, ::step].square().mean())
    return {
        "op": "fwd", "input": name, "batch": shape[0], "heads": shape[1], "seqlen": shape[2],
        "head_dim": shape[3], "seeds": seeds, "rows": rows,
        "rms": root_mean(sizes),
        "rmse": {method: root_mean(found) for method, found in errors.items()},
    }  # fmt: skip


def root_mean(squares: list[Tensor]) -> float:
    return float(f"{torch.stack(squares).mean().sqrt().item():.3e}")


def rows_of(x: Tensor, blocks: Tensor) -> Tensor:
    """The rows of ``blocks`` of x [B, H, S, D]."""
    return x.unflatten(2, (-1, SCALE_BLOCK))[:, :, blocks].flatten(2, 3)


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    return (torch.randn(shape, generator=generator) for _ in range(3))


def paper(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    for x in normal(shape, generator):
        there = torch.rand(shape, generator=generator) < 0.001
        yield x + 10 * torch.randn(shape, generator=generator) * there


def outliers(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    for x in normal(shape, generator):
        yield torch.where(torch.rand(shape, generator=generator) < 0.001, 50 * x, x)


def mean(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    q, k, v = normal(shape, generator)
    return iter((q, k, v + 2))


def peaked(shape: tuple[int, ...], generator: torch.Generator) -> Iterator[Tensor]:
    q, k, v = normal(shape, generator)
    keys = torch.randperm(shape[2], generator=generator)[: shape[2] // SCALE_BLOCK]
    q[:, :, ::SCALE_BLOCK] = 4 * k[:, :, keys]
    return iter((q, k, v))


INPUTS = {
    "normal": normal, "paper": paper, "outliers": outliers, "mean": mean, "peaked": peaked
}  # fmt: skip


def bf16(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(rows_of(q, blocks), k, v)


def emulated(granularity: str, hadamard: bool) -> Method:
    """fp8 with the roundings of a kernel; out isn't rounded to bf16."""

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        x = quantize_fp8(q, k, v, granularity=granularity, hadamard=hadamard)
        q8, q_scale = query(x, blocks)
        return emulate_fp8_attention(
            q8, x.k, x.v, q_scale, x.k_descale, x.v_descale, causal=False, scale=q.shape[3] ** -0.5
        )[0]

    return attend


def served(granularity: str, hadamard: bool) -> Method:
    """autoflash.attention, its v in the layout that its kernels read as it is."""

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        x = quantize_fp8(
            q, k, v, granularity=granularity, hadamard=hadamard, transpose_v=True, permute_keys=True
        )
        q8, q_scale = query(x, blocks)
        out = attention(q8, x.kv, q_descale=q_scale)
        assert isinstance(out, Tensor)
        return out

    return attend


def fa3_fp8(hadamard: bool) -> Method:
    """FlashAttention-3's, with the scales it takes: one per batch and head."""

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        x = quantize_fp8(q, k, v, granularity="head", hadamard=hadamard)
        q8, q_scale = query(x, blocks)
        given = Operands(q8, x.k, x.v, q_scale, x.k_descale, x.v_descale, torch.bfloat16, "rows")
        return fa3("fa3_fp8", q8, x.k, x.v, given)

    return attend


def fa3_bf16(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
    return fa3("fa3", rows_of(q, blocks), k, v, None)


def fa3(name: str, q: Tensor, k: Tensor, v: Tensor, given: Operands | None) -> Tensor:
    (batch, heads, rows, dim), keys = q.shape, k.shape[2]
    dtype = str(q.dtype).removeprefix("torch.")
    problem = Problem(
        batch=batch, heads=heads, kv_heads=heads, seqlen_q=rows, seqlen_k=keys, head_dim=dim,
        head_dim_v=dim, dtype=dtype, scales="head" if given else "",
    )  # fmt: skip
    found = implementation(name, problem, q, k, v, given)()
    assert isinstance(found, tuple)
    out = found[0].transpose(1, 2)
    assert isinstance(out, Tensor)
    return out


def query(x: QuantizedQKV, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of ``blocks`` of q, and their descales."""
    scale = x.q_descale[:, :, blocks] if x.granularity == "block" else x.q_descale
    return rows_of(x.q.view(torch.uint8), blocks).view(x.q.dtype), scale


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WAYS = {
    f"{granularity}{' + Hadamard' if hadamard else ''}": (granularity, hadamard)
    for hadamard in (False, True)
    for granularity in ("tensor", "head", "block")
}
METHODS: dict[str, Method] = {"bf16": bf16}
METHODS |= {f"emulated {name}": emulated(*way) for name, way in WAYS.items()}
ON_A_GPU: dict[str, Method] = {name: served(*way) for name, way in WAYS.items()}
if importlib.util.find_spec("fa3_fwd_interface"):
    ON_A_GPU |= {"FA3 bf16": fa3_bf16, "FA3 head": fa3_fp8(False)}
    ON_A_GPU |= {"FA3 head + Hadamard": fa3_fp8(True)}


def table(rows: list[dict[str, Any]]) -> Table:
    """RMSE per input and method, and how much less block + Hadamard has than tensor."""
    methods = list(rows[0]["rmse"])
    kind = "" if "tensor" in methods else "emulated "
    found = Table(title="RMSE against fp64", show_edge=False)
    for name in ("input", "S", "rms of out", *methods, "tensor / (block + Hadamard)"):
        found.add_column(name, justify="right")
    for one in rows:
        errors = one["rmse"]
        gain = errors[f"{kind}tensor"] / errors[f"{kind}block + Hadamard"]
        cells = (f"{errors[method]:.2e}" for method in methods)
        found.add_row(one["input"], str(one["seqlen"]), f"{one['rms']:.2e}", *cells, f"{gain:.2f}")
    return found


if __name__ == "__main__":
    main()
