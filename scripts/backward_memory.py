"""Peak memory of attention's backward against the length: AutoFlash, both its ways, beside torch's
attention that writes the N x N matrix. A table, and JSON under benchmarks/.

usage: backward_memory.py [--seqlens 1k,2k,4k,8k,16k,32k,64k] [--head-dim 64] [--heads 8]
                          [--out FILE]

What is counted is what torch allocates at most during torch.autograd.grad beside what was there
before: gradients and what the kernels need on the way. What the forward kept for it is told apart.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from bench_attention import write_results
from train_transformer import Attention, attention_of

import autoflash
from autoflash.problem import parse_length

_MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seqlens", default="1k,2k,4k,8k,16k,32k,64k")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where the checkout has no git history")
    arguments = parser.parse_args()
    rows = [
        row(parse_length("seqlen", text), arguments.heads, arguments.head_dim)
        for text in arguments.seqlens.split(",")
    ]
    write_results(rows, "backward_memory.json", arguments)


def row(seqlen: int, heads: int, head_dim: int) -> dict[str, Any]:
    """MiB of one length by implementation; null where the GPU has too little."""
    kept, peak = {}, {}
    for name, attend in implementations().items():
        try:
            kept[name], peak[name] = measure(attend, seqlen, heads, head_dim)
        except torch.OutOfMemoryError:
            kept[name] = peak[name] = None
        torch.cuda.empty_cache()
    found = {
        "op": "bwd", "dtype": "bfloat16", "head_dim": head_dim, "head_dim_v": head_dim,
        "causal": True, "batch": 1, "heads": heads, "kv_heads": heads, "seqlen_q": seqlen,
        "seqlen_k": seqlen, "feature": "none", "kept_mib": kept, "peak_mib": peak,
    }  # fmt: skip
    print(f"S = {seqlen}: kept {kept}, peak {peak}", flush=True)
    return found


def implementations() -> dict[str, Attention]:
    """Causal attention of [B, H, S, D] by name."""
    return {
        "autoflash": attention_of("autoflash"),
        "autoflash_deterministic": lambda q, k, v: autoflash.attention(
            q, k, v, causal=True, deterministic=True
        ),
        "eager": attention_of("math"),
    }


def measure(attend: Attention, seqlen: int, heads: int, head_dim: int) -> tuple[float, float]:
    """MiB that a forward leaves behind, and that the backward takes at most beside them."""
    shape = (1, heads, seqlen, head_dim)
    leaves = [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]
    before = torch.cuda.memory_allocated()
    out = attend(*leaves)
    kept = torch.cuda.memory_allocated() - before
    dout = torch.randn_like(out)
    # The first run compiles.
    torch.autograd.grad(out, leaves, dout, retain_graph=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    del grads
    return round(kept / _MIB, 2), round((torch.cuda.max_memory_allocated() - begin) / _MIB, 2)


if __name__ == "__main__":
    main()
