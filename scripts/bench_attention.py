"""AutoFlash and its peers, interleaved in one process: a table, and JSON under benchmarks/.

usage: bench_attention.py [--op fwd|bwd|fp8] [--dtypes bfloat16] [--head-dims 64,128,256]
                          [--seqlens 1k,4k,16k] [--peers autoflash,flex,sdpa_fa2,sdpa_cudnn,fa3]
                          [--rounds 9] [--out FILE]

Shapes as in the FlashAttention papers: batch x seqlen = 16384 tokens, heads x head_dim = 2048;
then grouped heads (32 query, 8 key/value) of ragged lengths. Every implementation of a row is
timed in turns (L2 flushed before each launch, medians), so that clocks and heat hit all alike.
The matmul row is torch's rate for 8192^3, the ceiling. The host rows of the forward time one
small call from Python, GPU idle. A backward is torch.autograd.grad from a forward that has run
before; AutoFlash's deterministic one is a column of its own. fp8 is a forward with a scale per
tensor, v once permuted and once by rows.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import autoflash
from autoflash.dtypes import FP8
from autoflash.problem import Problem, parse_length
from autoflash.target import current_target, gpu_is_present
from autoflash.tuning.bench import PEERS, bench_problem
from autoflash.tuning.timing import Timer
from autoflash.tuning.versions import versions

TOKENS = 16384
HIDDEN = 2048
_HOST_CALLS = 2000
_HOST_ROUNDS = 7
_FP8 = {"dtype": FP8, "scales": "tensor"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--op", default="fwd", choices=tuple(PEERS))
    parser.add_argument("--dtypes", default="bfloat16")
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqlens", default="1k,4k,16k")
    parser.add_argument("--peers", help="all by default")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where the checkout has no git history")
    arguments = parser.parse_args()
    op = arguments.op
    peers = arguments.peers.split(",") if arguments.peers else list(PEERS[op])
    rows = []
    if op == "fwd":
        # The second is large enough for a persistent kernel, small enough to leave the GPU idle.
        rows += [host_row(1, 2, 64, 64), host_row(4, 16, 512, 128)]
    dtypes = [FP8] if op == "fp8" else arguments.dtypes.split(",")
    for dtype in dtypes:
        rows.append(matmul_row("bfloat16" if op == "fp8" else dtype))
        head_dims = list(map(int, arguments.head_dims.split(",")))
        for problem in problems(op, dtype, head_dims, arguments.seqlens.split(",")):
            rows.append(bench_row(problem, peers, arguments.rounds))
            print(json.dumps(rows[-1]), flush=True)
            torch.cuda.empty_cache()
            # Each time, so that a run that is stopped leaves what it measured.
            out = write_results(rows, f"attention_{op}.json", arguments)
    Console(width=150).print(table(rows, peers), f"\nwritten: {out}")
    print(summary(rows))


def problems(op: str, dtype: str, head_dims: list[int], seqlens: list[str]) -> list[Problem]:
    """What is timed: the papers' shapes, then ragged grouped heads."""
    found = []
    if op == "fp8":
        given = [Problem(**{**p.as_dict(), **_FP8, "v_layout": layout})
                 for p in problems("fwd", "bfloat16", head_dims, seqlens)
                 for layout in ("permuted", "rows")]  # fmt: skip
        return [p for p in given if p.group == 1]
    for head_dim in head_dims:
        for causal in (False, True):
            for length in seqlens:
                seqlen = parse_length("seqlen", length)
                found.append(paper_problem(op, dtype, head_dim, seqlen, causal))
    for batch, seqlen in ((4, 4000), (2, 8191)):
        sizes = {"batch": batch, "heads": 32, "kv_heads": 8, "seqlen": seqlen, "head_dim": 128}
        found.append(Problem.parse({**sizes, "op": op, "dtype": dtype, "causal": True}))
    return found


def paper_problem(op: str, dtype: str, head_dim: int, seqlen: int, causal: bool) -> Problem:
    """The papers' shape of this length and head dim."""
    sizes = {"batch": TOKENS // seqlen, "heads": HIDDEN // head_dim, "seqlen": seqlen}
    kind = {"op": op, "head_dim": head_dim, "dtype": dtype, "causal": causal}
    return Problem.parse({**sizes, **kind})


def matmul_row(dtype: str) -> dict[str, Any]:
    """TFLOP/s of torch's 8192^3 product of random matrices, timed like the rest."""
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))
    timer = Timer()
    ms = statistics.median(timer.time(timer.eager(lambda: a @ b), budget_ms=100.0))
    row = {"op": "matmul", "dtype": dtype, "size": size, "ms": {"torch": round(ms, 5)}}
    row["tflops"] = {"torch": round(2 * size**3 / ms * 1e-9, 1)}
    print(json.dumps(row), flush=True)
    return row


def bench_row(problem: Problem, peers: list[str], rounds: int) -> dict[str, Any]:
    """One row of the benchmark file: medians in ms and TFLOP/s of each implementation."""
    result = bench_problem(problem, peers, rounds=rounds)
    fields = problem.as_dict()
    return {
        "op": fields.pop("op"),
        **fields,
        "feature": "none",
        "ms": {name: round(ms, 5) for name, ms in result["ms"].items()},
        "tflops": {n: round(problem.tflops(ms), 1) for n, ms in result["ms"].items()},
        "failed": result["failed"],
    }


def host_row(batch: int, heads: int, seqlen: int, head_dim: int) -> dict[str, Any]:
    """Microseconds that one call of a small problem keeps the host busy, without grad."""
    shape = (batch, heads, seqlen, head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    backend = torch.nn.attention.SDPBackend.FLASH_ATTENTION
    sdpa = torch.nn.functional.scaled_dot_product_attention
    calls: dict[str, Callable[[], object]] = {
        "autoflash": lambda: autoflash.attention(q, k, v),
        "sdpa_fa2": lambda: sdpa(q, k, v),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(backend):
        for _ in range(_HOST_ROUNDS):
            for name, call in calls.items():
                times[name].append(host_us(call))
    us = {name: round(statistics.median(values), 2) for name, values in times.items()}
    fields = {"dtype": "bfloat16", "head_dim": head_dim, "head_dim_v": head_dim, "causal": False,
              "batch": batch, "heads": heads, "kv_heads": heads, "seqlen_q": seqlen,
              "seqlen_k": seqlen, "kernel": autoflash.explain(q, k, v).kernel}  # fmt: skip
    print("host us", fields["kernel"], us, flush=True)
    return {"op": "host", **fields, "feature": "none", "us": us}


def host_us(call: Callable[[], object]) -> float:
    """Microseconds per call; batches short enough that the launch queue never fills."""
    spent = 0.0
    batch = 200
    for _ in range(_HOST_CALLS // batch):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        spent += time.perf_counter() - begin
    torch.cuda.synchronize()
    return spent / (_HOST_CALLS // batch * batch) * 1e6


def write_results(rows: list[dict[str, Any]], name: str, arguments: argparse.Namespace) -> Path:
    """Write ``rows`` and their provenance as JSON, and say where: to ``arguments.out``, by default
    as ``name`` among this GPU's results, or among the emulated ones where there is none."""
    folder = current_target().slug if gpu_is_present() else "emulated"
    out: Path = arguments.out or Path("benchmarks") / folder / name
    result = {**provenance(arguments.commit), "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return out


def provenance(commit: str) -> dict[str, str]:
    """GPU, versions, script and date."""
    found = versions()
    if not commit:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
        commit = git.stdout.strip()
    return {
        "gpu": current_target().name if gpu_is_present() else "none",
        "driver": found["driver"],
        "torch": found["torch"],
        "triton": found["triton"],
        "commit": commit,
        "script": f"scripts/{Path(sys.argv[0]).name}",
        "date": date.today().isoformat(),
    }


def table(rows: list[dict[str, Any]], peers: list[str]) -> Table:
    """TFLOP/s per row and implementation, and AutoFlash over the best peer."""
    found = Table(title="TFLOP/s", show_edge=False)
    for name in ("dtype", "D", "heads", "causal", "S", *peers, "vs best"):
        found.add_column(name, justify="right")
    for row in rows:
        if row["op"] not in PEERS:
            continue
        rates, heads = row["tflops"], str(row["heads"])
        if row["kv_heads"] != row["heads"]:
            heads += f"/{row['kv_heads']}"
        best = vs_best(row)
        kind = row["dtype"]
        if kind == FP8:
            # Rows leave out what is the default.
            kind = f"fp8, v {row.get('v_layout', 'rows')}"
        found.add_row(
            kind, str(row["head_dim"]), heads, "yes" if row["causal"] else "no",
            str(row["seqlen_q"]), *(f"{rates[p]:.0f}" if p in rates else "-" for p in peers),
            f"{best:.3f}" if best else "-",
        )  # fmt: skip
    return found


def vs_best(row: dict[str, Any]) -> float | None:
    """AutoFlash's rate over that of the fastest other."""
    rates = row.get("tflops", {}).items()
    others = [rate for name, rate in rates if not name.startswith("autoflash")]
    own = row.get("tflops", {}).get("autoflash")
    return own / max(others) if own and others else None


def summary(rows: list[dict[str, Any]]) -> str:
    """Geometric means of AutoFlash over each peer, and over the fastest in each row."""
    lines = [f"matmul 8192^3, {r['dtype']}: {r['tflops']['torch']:.0f} TFLOP/s"
             for r in rows if r["op"] == "matmul"]  # fmt: skip
    best = list(filter(None, map(vs_best, rows)))
    if best:
        lines.append(f"autoflash / fastest other: {_means(best)}")
    for peer in {p: None for names in PEERS.values() for p in names[1:]}:
        ratios = [
            row["tflops"]["autoflash"] / row["tflops"][peer]
            for row in rows
            if peer in row.get("tflops", {}) and "autoflash" in row["tflops"]
        ]
        if ratios:
            lines.append(f"autoflash / {peer}: {_means(ratios)}")
    return "\n".join(lines)


def _means(ratios: list[float]) -> str:
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return f"geometric mean {mean:.3f}, lowest {min(ratios):.3f}"


if __name__ == "__main__":
    main()
