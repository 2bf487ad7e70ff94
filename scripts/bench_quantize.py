"""The quantisation kernels beside a copy, interleaved in one process: a table, and JSON under
benchmarks/.

usage: bench_quantize.py [--head-dims 64,128,256] [--seqlens 4k,16k] [--dtype bfloat16]
                         [--rounds 9] [--out FILE]

One tensor of batch x seqlen = 16384 tokens, heads x head_dim = 2048. Rates are of the bytes that
move over the median time (L2 flushed before each launch): read once per block, twice per tensor and
head, and written once. The copy is torch's, of the same tensor. The host row is the time of one
whole call on small tensors, from Python.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_attention import HIDDEN, TOKENS, host_us, write_results
from rich.console import Console
from rich.table import Table

from autoflash import quantize_fp8
from autoflash.problem import parse_length
from autoflash.runtime.quantize_triton import quantize_into
from autoflash.tuning.timing import Timer

# Rotation's seed, out transposed, keys permuted.
FORMS: dict[str, tuple[int | None, bool, bool]] = {
    "rows": (None, False, False),
    "rotated": (0, False, False),
    "columns": (None, True, False),
    "permuted": (None, True, True),
}
GRANULARITIES = ("tensor", "head", "block")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqlens", default="4k,16k")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where the checkout has no git history")
    arguments = parser.parse_args()
    rows = [host_row()]
    for head_dim in map(int, arguments.head_dims.split(",")):
        for length in arguments.seqlens.split(","):
            seqlen = parse_length("seqlen", length)
            shape = (TOKENS // seqlen, HIDDEN // head_dim, seqlen, head_dim)
            rows.append(row(shape, getattr(torch, arguments.dtype), arguments.rounds))
            print(json.dumps(rows[-1]), flush=True)
            out = write_results(rows, "quantize.json", arguments)
    Console(width=150).print(table(rows[1:]), f"\nwritten: {out}")


def row(shape: tuple[int, ...], dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Median ms and TB/s of the copy and of each granularity and form."""
    x = torch.randn(shape, device="cuda", dtype=dtype)
    copy = torch.empty_like(x)
    launches: dict[str, Callable[[], object]] = {"copy": lambda: copy.copy_(x)}
    for granularity in GRANULARITIES:
        for form, (seed, transposed, permuted) in FORMS.items():
            out = torch.empty(shape, device="cuda", dtype=torch.float8_e4m3fn)
            if transposed:
                out = out.view(*shape[:2], shape[3], shape[2]).mT
            launches[f"{granularity} {form}"] = launch(out, x, granularity, seed, permuted)
    timer = Timer()
    timed = [timer.replayed(each) for each in launches.values()]
    samples = timer.interleave(timed, rounds)
    ms = {n: statistics.median(s) for n, s in zip(launches, samples, strict=True)}
    size = x.element_size()
    moved = {name: x.numel() * bytes_of(name, size) for name in ms}
    batch, heads, seqlen, head_dim = shape
    return {
        "op": "quantize", "dtype": str(dtype).removeprefix("torch."), "batch": batch,
        "heads": heads, "seqlen": seqlen, "head_dim": head_dim,
        "method": [each.method for each in timed],
        "ms": {name: round(value, 5) for name, value in ms.items()},
        "tbs": {name: round(moved[name] / value * 1e-9, 3) for name, value in ms.items()},
    }  # fmt: skip


def bytes_of(name: str, size: int) -> int:
    """Bytes that move for each element, of ``size`` bytes."""
    if name == "copy":
        return 2 * size
    return (1 if name.startswith("block") else 2) * size + 1


def launch(
    out: torch.Tensor, x: torch.Tensor, granularity: str, seed: int | None, permuted: bool
) -> Callable[[], object]:
    return lambda: quantize_into(out, x, granularity, 1, seed, permuted)


def host_row() -> dict[str, Any]:
    """Microseconds that a whole call keeps the host busy."""
    x = torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16)
    us = {g: round(host_us(lambda g=g: quantize_fp8(x, x, x, granularity=g)), 1)
          for g in GRANULARITIES}  # fmt: skip
    print("host us", us, flush=True)
    return {"op": "host", "dtype": "bfloat16", "us": us}


def table(rows: list[dict[str, Any]]) -> Table:
    """Shares of the copy's rate."""
    found = Table(title="rate over the copy's", show_edge=False)
    names = list(rows[0]["tbs"])[1:]
    for name in ("D", "S", "copy TB/s", *names):
        found.add_column(name, justify="right")
    for one in rows:
        rates = one["tbs"]
        shares = (f"{rates[name] / rates['copy']:.2f}" for name in names)
        found.add_row(str(one["head_dim"]), str(one["seqlen"]), f"{rates['copy']:.2f}", *shares)
    return found


if __name__ == "__main__":
    main()
