"""The rotation against a Hadamard matrix that is built otherwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoflash.rotation import rotate, rotated_together, sign_hash, signs


def matrix(dim: int, seed: int) -> torch.Tensor:
    """What rotate multiplies by, in fp64: entry (i, j) of a Hadamard matrix is the parity of the
    bits that i and j share."""
    together = rotated_together(dim)
    found = torch.zeros(dim, dim, dtype=torch.float64)
    for i in range(dim):
        sign = -1.0 if signs(dim, seed)[i] else 1.0
        for j in range(together):
            odd = (i % together & j).bit_count() % 2
            found[i, i // together * together + j] = sign * (-1.0) ** odd / together**0.5
    return found


@pytest.mark.parametrize(("dim", "together"), [
    (128, 128), (64, 64), (256, 256), (96, 32), (192, 64), (80, 16), (72, 8), (63, 1), (1, 1),
])  # fmt: skip
def test_it_is_an_orthogonal_matrix(dim, together):
    assert rotated_together(dim) == together
    m = matrix(dim, 3)
    assert torch.allclose(m @ m.T, torch.eye(dim, dtype=torch.float64), atol=1e-12)
    x = torch.randn(5, dim, dtype=torch.float64)
    assert torch.allclose(rotate(x, 3), x @ m, atol=1e-12)


@given(dim=st.integers(1, 256), seed=st.integers(0, 2**31 - 1))
def test_scores_stay(dim, seed):
    q, k = torch.randn(2, 3, dim, dtype=torch.float64)
    assert torch.allclose(rotate(q, seed) @ rotate(k, seed).T, q @ k.T, atol=1e-10)


def test_one_large_entry_becomes_many():
    x = torch.zeros(1, 128)
    x[0, 5] = 50.0
    assert torch.allclose(rotate(x, 0).abs(), torch.full((1, 128), 50 / 128**0.5))


def test_signs_are_the_same_everywhere_and_differ_by_seed():
    # MurmurHash3's finalizer of 1 (a published value).
    assert sign_hash(0, 1) == 0x514E28B7
    assert sign_hash(0, 0) == 0
    drawn = [tuple(signs(128, seed)) for seed in range(64)]
    assert len(set(drawn)) == 64
    negative = sum(map(sum, drawn))
    assert abs(negative - 64 * 64) < 4 * (64 * 128 / 4) ** 0.5


def test_a_nan_stays_in_what_it_is_mixed_with():
    x = torch.ones(2, 96)
    x[0, 40] = float("nan")
    assert rotate(x, 1).isnan().nonzero().tolist() == [[0, i] for i in range(32, 64)]
