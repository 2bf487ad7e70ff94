"""A transformer of 100 M parameters trained with AutoFlash, and with torch's attention: curves of
the loss, step times, and JSON under benchmarks/.

usage: train_transformer.py [--steps 300] [--attentions math,sdpa,autoflash] [--layers 12]
                            [--dim 768] [--batch 8] [--seqlen 1024] [--out FILE]

All runs start from the same weights and see the same data: sequences of a random second-order chain
(next = a table's entry for the last two tokens, or any token one time in ten), which takes
attention to the token before last to learn. bfloat16 autocast, AdamW. "math" is torch's attention
that writes the N x N matrix; "sdpa" is its fused one, whose distance from "math" says what rounding
alone does to a curve.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_attention import write_results
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import autoflash

VOCABULARY = 32768
# The tokens that occur, so that the table is learned within the run.
_USED = 64
_NOISE = 0.1
_HEAD_DIM = 64
_WARM_UP_STEPS = 20

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--attentions", default="math,sdpa,autoflash")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="", help="where the checkout has no git history")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = sequences(arguments.steps, arguments.batch, arguments.seqlen + 1)
    rows = []
    for name in arguments.attentions.split(","):
        model = Transformer(arguments.layers, arguments.dim, attention_of(name)).to(device)
        losses, seconds = train(model, data, device)
        row = {
            "op": "train", "attention": name, "dtype": "bfloat16", "layers": arguments.layers,
            "dim": arguments.dim, "batch": arguments.batch, "seqlen": arguments.seqlen,
            "parameters": sum(p.numel() for p in model.parameters()),
            "ms": {"step": round(1e3 * statistics.median(seconds), 3)},
            "loss": [round(loss, 4) for loss in losses],
        }  # fmt: skip
        rows.append(row)
        print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}, {row['ms']['step']} ms a step")
        del model
    for line in distances(rows):
        print(line)
    if device == "cuda":
        write_results(rows, "training.json", arguments)
    elif arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"rows": rows}, indent=1) + "\n", encoding="utf-8")


def attention_of(name: str) -> Attention:
    """Causal attention of [B, H, S, D] by the implementation called ``name``."""
    if name == "autoflash":
        return lambda q, k, v: autoflash.attention(q, k, v, causal=True)
    backends = {"math": SDPBackend.MATH, "sdpa": SDPBackend.FLASH_ATTENTION}
    if name not in backends:
        raise SystemExit(f"unknown attention {name!r}: known are autoflash, {', '.join(backends)}")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backends[name]):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def sequences(steps: int, batch: int, length: int) -> Tensor:
    """Tokens [steps, batch, length] of a second-order chain."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(_USED, (_USED, _USED), generator=generator)
    tokens = torch.randint(_USED, (steps, batch, length), generator=generator)
    free = torch.rand(tokens.shape, generator=generator) < _NOISE
    for i in range(2, length):
        follow = table[tokens[..., i - 2], tokens[..., i - 1]]
        tokens[..., i] = torch.where(free[..., i], tokens[..., i], follow)
    return tokens


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and added to its input."""

    def __init__(self, dim: int, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.feed = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        shape = (batch, length, 3, dim // _HEAD_DIM, _HEAD_DIM)
        q, k, v = self.qkv(self.norms[0](x)).view(shape).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    """Logits of the next token; the same weights whatever computes the attention."""

    def __init__(self, layers: int, dim: int, attention: Attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(8192, dim)
        self.blocks = nn.Sequential(*(Block(dim, attention) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions(places)))
        return functional.linear(x, self.tokens.weight)


def train(model: Transformer, data: Tensor, device: str) -> tuple[list[float], list[float]]:
    """Loss and seconds of each step; the first steps' seconds are left out."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    losses, seconds = [], []
    for step, batch in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / _WARM_UP_STEPS)
        tokens = batch.to(device)
        begin = time.perf_counter()
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds[len(seconds) // 10 :]


def distances(rows: list[dict[str, Any]]) -> list[str]:
    """How far each curve is from the first, in the mean and at most."""
    first = rows[0]
    lines = []
    for row in rows[1:]:
        apart = [abs(x - y) for x, y in zip(row["loss"], first["loss"], strict=True)]
        names = f"{row['attention']} - {first['attention']}"
        lines.append(f"{names}: mean {statistics.fmean(apart):.4f}, most {max(apart):.4f}")
    return lines


if __name__ == "__main__":
    main()
