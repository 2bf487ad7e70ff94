"""The main job on one problem: tune, keep the winner, serve it. What ``make demo`` runs.

usage: demo.py [--budget SECONDS]

With a GPU it tunes for real and serves the winner through autoflash.attention. Without one it
compiles candidates for an H100 offline, ranks them and stores the best as predicted. Either way it
then checks autoflash.attention against the fp64 reference.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console

OFFLINE_TARGET = "h100"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--budget", type=float, default=60.0, help="seconds for the search")
    budget_s = parser.parse_args().budget
    console = Console(width=None if sys.stdout.isatty() else 160)
    # A store of its own, so that the demo shows a search and leaves the user's records alone.
    folder = Path(tempfile.mkdtemp(prefix="autoflash-demo-"))
    os.environ["AUTOFLASH_DB"] = str(folder / "autoflash.sqlite")

    import autoflash
    from autoflash.report import ProgressListener, results_table, trials_table

    has_gpu = torch.cuda.is_available()
    problem = autoflash.Problem.parse(
        {"batch": 4, "heads": 16, "seqlen": "4k", "head_dim": 128, "causal": True}
    )
    console.print(f"Tuning {problem.label()} for {'this GPU' if has_gpu else OFFLINE_TARGET}")
    with ProgressListener(console) as listener:
        (result,) = autoflash.tune(
            problem,
            target=None if has_gpu else OFFLINE_TARGET,
            budget_s=budget_s,
            listener=listener,
        )
    console.print(trials_table(result))
    console.print(results_table([result]))
    console.print(f"emitted kernel: {result.path}", soft_wrap=True)
    check(console, "cuda" if has_gpu else "cpu")


def check(console: Console, device: str) -> None:
    """Compare autoflash.attention with fp64 on ragged, causal, grouped heads."""
    import autoflash
    from autoflash.reference import error_allowance, exact_attention

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shapes = ((2, 8, 300, 128), (2, 2, 420, 128), (2, 2, 420, 128))
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    out = autoflash.attention(q, k, v, causal=True)
    scale = q.shape[-1] ** -0.5
    exact, _ = exact_attention(q, k, v, causal=True, scale=scale)
    error = (out.double() - exact).abs().max().item()
    allowed = error_allowance(q, k, v, causal=True, scale=scale)
    explained = str(autoflash.explain(q, k, v, causal=True))
    console.print(explained, soft_wrap=True, markup=False)
    verdict = "ok" if error <= allowed else "WRONG"
    console.print(f"autoflash.attention on {device}: error {error:.1e} of {allowed:.1e}: {verdict}")
    if verdict != "ok":
        raise SystemExit(1)


if __name__ == "__main__":
    main()
