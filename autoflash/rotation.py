"""Incoherent processing: an orthogonal rotation of q and k that spreads outliers over a row.

FlashAttention-3 (Shah et al., 2024, section 3.3) and QuIP (Chee et al., 2023): x is multiplied by
random signs and by a Hadamard matrix. (qM)(kM)ᵀ = q kᵀ for an orthogonal M: the scores don't
change, but a single large entry of a row becomes many of moderate size, which fp8 rounds
independently of each other.
"""

import math

import torch
from torch import Tensor

_MASK = (1 << 32) - 1


def rotated_together(dim: int) -> int:
    """Neighbouring dims that one Hadamard matrix mixes: the largest power of two that divides
    ``dim``. The rotation is block-diagonal; of an odd ``dim`` only signs are left."""
    return dim & -dim


def sign_hash(index: int, seed: int) -> int:
    """32 bits that say by their lowest whether dim ``index`` is negated: MurmurHash3's finalizer,
    so that CPUs and GPUs agree without a table."""
    h = (index * 0x9E3779B9 + seed) & _MASK
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return h ^ (h >> 16)


def signs(dim: int, seed: int) -> list[bool]:
    """For each dim, whether it is negated."""
    return [bool(sign_hash(index, seed) & 1) for index in range(dim)]


def rotate(x: Tensor, seed: int) -> Tensor:
    """x [..., D] times signs and the normalised Hadamard matrix, in x's dtype."""
    return mix(x, seed) * normaliser(x.shape[-1])


def mix(x: Tensor, seed: int) -> Tensor:
    """``rotate`` without its factor, which a scale can take.

    A fixed order of additions: log2 rounds of sums and differences of pairs (the fast
    Walsh-Hadamard transform).
    """
    dim = x.shape[-1]
    flipped = torch.tensor(signs(dim, seed), device=x.device)
    x = torch.where(flipped, -x, x)
    step = 1
    while step < rotated_together(dim):
        pairs = x.unflatten(-1, (-1, 2, step))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        step *= 2
    return x


def normaliser(dim: int) -> float:
    """What makes ``mix`` orthogonal: 1 / sqrt of the dims that one matrix mixes."""
    return 1.0 / math.sqrt(rotated_together(dim))
