"""fp8 attention, written to be read: in fp64, and as a kernel computes it.

Shapes as in autoflash.reference; q, k and v are float8_e4m3fn, v by rows, with descales as
autoflash.fp8 has them (None: 1).
"""

import math

import torch
from torch import Tensor

from autoflash.errors import InvalidInputError
from autoflash.fp8 import E4M3_MAX, SCALE_BLOCK, dequantize, scale_of_rows
from autoflash.reference import exact_attention, hidden_keys, per_kv_head, weighted_sum

_LOG2_E = 1.0 / math.log(2.0)
# Of the tensor cores of sm_90: fp8 products that are added in one step, and bits that are kept
# behind the largest one's first.
_ADDED_AT_ONCE = 32
_KEPT_BITS = 13
Scale = Tensor | None


def exact_fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Scale, k_descale: Scale, v_descale: Scale,
    *, causal: bool, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and LSE in fp64, on the inputs as they are rounded: attention of what they stand for.

    A NaN (e4m3fn has no infinities) in a row of q makes that row of out NaN, in a key all rows that
    see it; in v its column of those rows.
    """
    rounded = [dequantize(x, s) for x, s in ((q, q_descale), (k, k_descale), (v, v_descale))]
    return exact_attention(*rounded, causal=causal, scale=scale)


def emulate_fp8_attention(
    q: Tensor, k: Tensor, v: Tensor, q_descale: Scale, k_descale: Scale, v_descale: Scale,
    *, causal: bool, scale: float, block_keys: int = 128, p_exponent: int = 8,
    last_first: bool = True, hopper_scores: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out and LSE in fp32, with the roundings of an fp8 kernel (FlashAttention-3, section 3.3).

    Online softmax over blocks of ``block_keys`` keys. P is at most 1 and e4m3's smallest number
    2^-9, so that P is multiplied by 2^``p_exponent`` before the cast; the row sums take P before
    it. Blocks go from the last key to the first with ``last_first``: a first key that takes most of
    the weight (an attention sink) then doesn't push the others below what e4m3 can say before they
    are added up (arXiv:2606.06521). acc is kept in units of the v scale of the block that it was
    last added to: its rescaling is folded into the one by the softmax, and each scale is applied
    once. Sums are fp32, those of the scores as Hopper's tensor cores make them (hopper_product)
    with ``hopper_scores``, which takes D times the memory.

    Raises InvalidInputError if a block of keys has more than one v scale.
    """
    if v_descale is not None and v_descale.dim() == 3 and SCALE_BLOCK % block_keys:
        raise InvalidInputError(
            f"block_keys={block_keys}: must divide {SCALE_BLOCK}, the keys that share a v scale"
        )
    heads, rows, keys = q.shape[1], q.shape[2], k.shape[2]
    qf, kf, vf = (x.float() for x in (q, k, v))
    q_scale = scale_of_rows(q_descale, heads, rows).expand(q.shape[0], heads, rows)
    k_scale = scale_of_rows(k_descale, heads, keys).expand(q.shape[0], heads, keys)
    v_scale = scale_of_rows(v_descale, heads, keys).expand(q.shape[0], heads, keys)
    to_base_2 = (q_scale * (scale * _LOG2_E)).unsqueeze(-1)
    hidden = hidden_keys(q, k, 0, rows) if causal else None
    top = qf.new_full(q.shape[:3], -math.inf)
    total = torch.zeros_like(top)
    acc = qf.new_zeros(*q.shape[:3], v.shape[3])
    unit = qf.new_ones(1)
    product = hopper_product if hopper_scores else per_kv_head
    starts = range(0, keys, block_keys)
    for start in reversed(starts) if last_first else starts:
        block = slice(start, min(start + block_keys, keys))
        unseen = None if hidden is None else hidden[:, block]
        scores = product(qf, kf[:, :, block].transpose(-1, -2))
        scores = scores * (to_base_2 * k_scale[:, :, block].unsqueeze(2))
        if unseen is not None:
            scores = scores.masked_fill(unseen, -math.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        # A row that has seen no key yet.
        base = torch.where(new_top == -math.inf, 0.0, new_top)
        p = torch.exp2(scores - (base - p_exponent).unsqueeze(-1))
        shrink = torch.exp2(top - base)
        total = total * shrink + p.sum(-1)
        new_unit = v_scale[:, :, start : start + 1]
        acc = acc * (shrink * (unit / new_unit)).unsqueeze(-1)
        acc = acc + weighted_sum(to_e4m3(p).float(), vf[:, :, block], unseen)
        top, unit = new_top, new_unit
    seen = total != 0
    out = acc * (unit / torch.where(seen, total, 1.0)).unsqueeze(-1)
    lse = (top + torch.log2(total) - p_exponent) / _LOG2_E
    return out, torch.where(seen, lse, -math.inf)


def fp8_allowance(
    q: Tensor, k: Tensor, v: Tensor, exact: Tensor, *, causal: bool, scale: float,
    out_dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """The accuracy rule where q, k and v are fp8: the largest error of each element of out that is
    allowed against ``exact``, fp64 on the same inputs. These are given as what they stand for.

    What emulate_fp8_attention loses is known: each probability is wrong by up to 2^-4 of itself
    where P is rounded, or by 2^-18 of the row's largest where e4m3 ends (2^-10 over 2^8), and by
    what its score is (score_noise). Which way is as good as chance, and differs with the blocks of
    keys. So an error may be six standard deviations of the sum of all these, and never more than
    that sum; twice the rounding of out is added, and 1e-6.
    """
    p, hidden = _probabilities(q, k, causal, scale)
    wrong = p * (2.0**-4 + score_noise(q, k, scale=scale))
    vague = 2.0**-18 * p.amax(-1, keepdim=True)
    seen = (p > 0).to(p.dtype)
    most = weighted_sum(wrong, v.abs(), hidden) + vague * weighted_sum(seen, v.abs(), hidden)
    spread = weighted_sum(wrong.square(), v.square(), hidden)
    spread += vague.square() * weighted_sum(seen, v.square(), hidden)
    # Uniform between -1 and 1 has a variance of 1/3.
    likely = 6 * (spread / 3).sqrt()
    return torch.minimum(likely, most) + torch.finfo(out_dtype).eps * exact.abs() + 1e-6


def lse_allowance(q: Tensor, k: Tensor, *, causal: bool, scale: float) -> Tensor:
    """What score_noise explains of an error of the LSE, [B, H, Sq]: its mean, weighted by P."""
    p, _ = _probabilities(q, k, causal, scale)
    return (p * score_noise(q, k, scale=scale)).sum(-1)


def score_noise(q: Tensor, k: Tensor, *, scale: float) -> Tensor:
    """By how much the tensor cores of Hopper may be wrong in each score, [B, H, Sq, Sk].

    For each 32 of the D products they shift these, and the sum so far, to the exponent of the
    largest, and drop what then lies below its 2^-13 (the 14 bits of DeepSeek-V3's report, section
    3.5.2): of D + D / 32 numbers up to one unit each, towards zero, so with a sign that is as good
    as chance. That is four standard deviations, in units of the score or of the root of the
    products' squares, whichever is larger. 0 where the score is NaN: rows that don't see it aren't
    the worse for it.
    """
    dim = q.shape[3]
    sums = per_kv_head(q, k.transpose(-1, -2)).abs()
    sizes = per_kv_head(q.square(), k.square().transpose(-1, -2)).sqrt()
    dropped = dim + math.ceil(dim / _ADDED_AT_ONCE)
    units = torch.maximum(sums, sizes).nan_to_num(0.0)
    return 4 * math.sqrt(dropped / 3) * 2.0**-_KEPT_BITS * scale * units


def hopper_product(x: Tensor, y: Tensor) -> Tensor:
    """per_kv_head(x, y) of e4m3 numbers as Hopper's tensor cores add them up: see score_noise."""
    y = y.repeat_interleave(x.shape[1] // y.shape[1], 1)
    total = x.new_zeros(*x.shape[:3], 1, y.shape[3])
    for start in range(0, x.shape[3], _ADDED_AT_ONCE):
        some = slice(start, start + _ADDED_AT_ONCE)
        added = torch.cat((total, x[..., some].unsqueeze(-1) * y[:, :, None, some]), 3)
        _, exponent = torch.frexp(added.abs().amax(3, keepdim=True))
        unit = torch.exp2(exponent - 1.0 - _KEPT_BITS)
        total = torch.trunc(added / unit).sum(3, keepdim=True) * unit
    return total.squeeze(3)


def _probabilities(
    q: Tensor, k: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """P in the dtype of q, zero where a row doesn't see a key, and which keys these are."""
    hidden = hidden_keys(q, k, 0, q.shape[2]) if causal else None
    scores = per_kv_head(q, k.transpose(-1, -2)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, dim=-1).nan_to_num(0.0), hidden


def to_e4m3(x: Tensor) -> Tensor:
    """x in float8_e4m3fn as the hardware casts: what is too large becomes 448, NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
