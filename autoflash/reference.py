"""What attention computes, written to be read: the oracle of every test and the CPU implementation.

Shapes: q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv], with H a multiple of Hk; LSE
[B, H, Sq], natural logarithm. Causal is aligned bottom-right: row i sees key j when
j <= i + Sk - Sq. A row that sees no key has out = 0, LSE = -inf and passes no gradient.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Scores that are held at once, in elements: bounds the memory to O(N).
_CHUNK_ELEMENTS = 1 << 26


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out = softmax(scale * q kᵀ) v in q's dtype, and the LSE.

    Computes and gives the LSE in fp32, or in fp64 for fp64 inputs.
    """
    dtype = _compute_dtype(q)
    outs, lses = [], []
    for start, stop in _row_chunks(q, k):
        rows = q[:, :, start:stop].to(dtype)
        hidden = hidden_keys(q, k, start, stop) if causal else None
        scores = _scores(rows, k.to(dtype), scale, hidden)
        lse = torch.logsumexp(scores, dim=-1)
        p = torch.exp(scores - _finite(lse).unsqueeze(-1))
        outs.append(weighted_sum(p, v.to(dtype), hidden).to(q.dtype))
        lses.append(lse)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    *, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the inputs' dtypes, recomputing P from the LSE (FlashAttention, algorithm 4).

    dS = P * (dP - rowsum(dout * out) + dlse), with dP = dout vᵀ.
    """
    dtype = _compute_dtype(q)
    group = q.shape[1] // k.shape[1]
    kf, vf = k.to(dtype), v.to(dtype)
    dqs = []
    dk, dv = torch.zeros_like(kf), torch.zeros_like(vf)
    for start, stop in _row_chunks(q, k):
        rows = q[:, :, start:stop].to(dtype)
        do = dout[:, :, start:stop].to(dtype)
        hidden = hidden_keys(q, k, start, stop) if causal else None
        scores = _scores(rows, kf, scale, hidden)
        p = torch.exp(scores - _finite(lse[:, :, start:stop].to(dtype)).unsqueeze(-1))
        dp = per_kv_head(do, vf.transpose(-1, -2))
        delta = (do * out[:, :, start:stop].to(dtype)).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, :, start:stop].to(dtype)
        ds = p * (dp - delta.unsqueeze(-1)) * scale
        if hidden is not None:
            ds = ds.masked_fill(hidden, 0.0)
        dqs.append(weighted_sum(ds, kf, hidden).to(q.dtype))
        dk = dk + _sum_over_group(ds, rows, group, hidden)
        dv = dv + _sum_over_group(p, do, group, hidden)
    return torch.cat(dqs, dim=2), dk.to(k.dtype), dv.to(v.dtype)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """out and LSE in fp64, on the inputs as they are rounded."""
    return attention_forward(q.double(), k.double(), v.double(), causal=causal, scale=scale)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """The same computation with every step rounded to q's dtype: the yardstick for errors."""
    hidden = hidden_keys(q, k, 0, q.shape[2]) if causal else None
    scores = _scores(q, k, scale, hidden)
    # Rows that see nothing would be NaN.
    return per_kv_head(torch.softmax(scores, dim=-1).nan_to_num(0.0), v)


def error_allowance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    exact: Tensor | None = None,
) -> float:
    """The accuracy rule: the largest error that is allowed against fp64 on the same inputs.

    Twice the error of plain_attention in the same dtype, plus 1e-3 (1e-5 for fp32). ``exact`` is
    exact_attention's out, where the caller has it.
    """
    if exact is None:
        exact, _ = exact_attention(q, k, v, causal=causal, scale=scale)
    return allowance(plain_attention(q, k, v, causal=causal, scale=scale), exact)


def exact_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk and dv in fp64, on the inputs as they are rounded."""
    out, lse = exact_attention(q, k, v, causal=causal, scale=scale)
    return attention_backward(
        dout.double(), None if dlse is None else dlse.double(), q.double(), k.double(), v.double(),
        out, lse, causal=causal, scale=scale,
    )  # fmt: skip


def plain_gradients(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What autograd makes of plain_attention, each step rounded to q's dtype."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with torch.enable_grad():
        results = [plain_attention(q, k, v, causal=causal, scale=scale)]
        if dlse is not None:
            hidden = hidden_keys(q, k, 0, q.shape[2]) if causal else None
            results.append(torch.logsumexp(_scores(q, k, scale, hidden), dim=-1))
    weights = [x.to(q.dtype) for x in (dout, dlse) if x is not None]
    # A row that sees nothing has NaN on its way to the mask, which drops it.
    return torch.autograd.grad(results, (q, k, v), weights)


def gradient_allowances(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    *, causal: bool, scale: float, exact: tuple[Tensor, ...],
) -> list[float]:  # fmt: skip
    """The accuracy rule for dq, dk and dv, whose fp64 values are ``exact``: see error_allowance."""
    plain = plain_gradients(dout, dlse, q, k, v, causal=causal, scale=scale)
    return [allowance(x, y) for x, y in zip(plain, exact, strict=True)]


def allowance(plain: Tensor, exact: Tensor) -> float:
    """Twice the largest error of ``plain``, plus 1e-3 (1e-5 for fp32). Where it overflowed it is no
    yardstick, and is left out."""
    error = (plain.double() - exact).abs()
    error = error[torch.isfinite(error)]
    most = error.max().item() if error.numel() else 0.0
    return 2 * most + (1e-3 if plain.dtype in (torch.float16, torch.bfloat16) else 1e-5)


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _row_chunks(q: Tensor, k: Tensor) -> list[tuple[int, int]]:
    """Ranges of query rows whose scores take at most _CHUNK_ELEMENTS; one empty range if Sq = 0."""
    per_row = max(1, q.shape[0] * q.shape[1] * k.shape[2])
    step = max(1, _CHUNK_ELEMENTS // per_row)
    length = q.shape[2]
    return [(s, min(s + step, length)) for s in range(0, length, step)] or [(0, 0)]


def hidden_keys(q: Tensor, k: Tensor, start: int, stop: int) -> Tensor:
    """True where a row of start .. stop does not see a key: [rows, Sk]."""
    rows = torch.arange(start, stop, device=q.device).unsqueeze(1)
    keys = torch.arange(k.shape[2], device=q.device)
    return keys > rows + (k.shape[2] - q.shape[2])


def _scores(rows: Tensor, k: Tensor, scale: float, hidden: Tensor | None) -> Tensor:
    scores = per_kv_head(rows, k.transpose(-1, -2)) * scale
    return scores if hidden is None else scores.masked_fill(hidden, -math.inf)


def per_kv_head(x: Tensor, y: Tensor) -> Tensor:
    """x @ y, where each head of y [B, Hk, K, N] serves H / Hk heads of x [B, H, M, K]."""
    batch, heads, rows, inner = x.shape
    kv_heads = y.shape[1]
    grouped = x.reshape(batch, kv_heads, heads // kv_heads * rows, inner)
    return (grouped @ y).reshape(batch, heads, rows, y.shape[-1])


def weighted_sum(weights: Tensor, rows: Tensor, hidden: Tensor | None) -> Tensor:
    """weights @ rows, in which a hidden row counts for nothing."""
    return _of_seen_rows(per_kv_head, weights, rows, hidden)


def _sum_over_group(x: Tensor, y: Tensor, group: int, hidden: Tensor | None) -> Tensor:
    """xᵀ @ y summed over the query heads of each key/value head: [B, Hk, keys, dim]; a row of y
    counts only for the keys that it sees."""

    def product(x: Tensor, y: Tensor) -> Tensor:
        batch, heads, rows, keys = x.shape
        shape = (batch, heads // group, group * rows)
        return x.reshape(*shape, keys).transpose(-1, -2) @ y.reshape(*shape, y.shape[-1])

    return _of_seen_rows(product, x, y, hidden)


def _of_seen_rows(
    product: Callable[[Tensor, Tensor], Tensor],
    weights: Tensor,
    rows: Tensor,
    hidden: Tensor | None,
) -> Tensor:
    """product(weights, rows), in which a hidden row does not count, even if it holds NaN (0 * NaN
    is NaN). What sees a row that isn't finite comes out as NaN."""
    bad = ~torch.isfinite(rows)
    if hidden is None or not bool(bad.any()):
        return product(weights, rows)
    seen = (~hidden).to(weights.dtype).expand_as(weights)
    sees_bad = product(seen, bad.to(weights.dtype)) > 0
    return product(weights, rows.masked_fill(bad, 0.0)).masked_fill(sees_bad, math.nan)


def _finite(lse: Tensor) -> Tensor:
    """The LSE with 0 for rows that saw no key, whose scores are all -inf: exp gives 0 there."""
    return torch.where(lse == -math.inf, 0.0, lse)
