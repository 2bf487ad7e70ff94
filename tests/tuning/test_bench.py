"""What the bench hands to AutoFlash and to its peers; nothing is timed."""

import pytest
import torch

from autoflash.problem import Problem
from autoflash.tuning.bench import PEERS, implementation, inputs_of, kind_of
from autoflash.tuning.check import compare
from autoflash.tuning.check_fp8 import expect, stand_for

FP8 = "float8_e4m3fn"
PROBLEM = Problem(
    batch=1, heads=4, kv_heads=2, seqlen_q=60, seqlen_k=90, head_dim=32, head_dim_v=32,
    dtype=FP8, causal=True, scales="block", v_layout="permuted",
)  # fmt: skip
MIXED = Problem(**{**PROBLEM.as_dict(), "dtype": "float16", "kv_dtype": FP8})
PLAIN = Problem(**{**PROBLEM.as_dict(), "dtype": "float16", "scales": "", "v_layout": "rows"})


@pytest.mark.parametrize("problem", [PROBLEM, MIXED], ids=["fp8", "mixed"])
def test_peers_compute_in_16_bits_what_autoflash_computes_in_fp8(problem):
    q, k, v, given = inputs_of(problem, "cpu")
    wanted = stand_for(given)
    half = getattr(torch, problem.dtype_of_out)
    for x, exact in zip((q, k, v), wanted, strict=True):
        assert x.dtype == half
        torch.testing.assert_close(x.double(), exact, rtol=2**-8, atol=1e-6)
    case = expect("bench", problem, *wanted)
    out = implementation("autoflash", problem, q, k, v, given)()
    assert compare(case, out, case.lse) is None
    other = implementation("autoflash_16_bits", problem, q, k, v, given)()
    assert out.dtype == other.dtype == half
    torch.testing.assert_close(out.float(), other.float(), rtol=0.1, atol=0.02)


def test_kinds_and_names():
    assert [kind_of(p) for p in (PROBLEM, MIXED, PLAIN)] == ["fp8", "fp8", "fwd"]
    q, k, v, given = inputs_of(PLAIN, "cpu")
    assert given is None
    assert implementation("autoflash", PLAIN, q, k, v)().dtype == torch.float16
    with pytest.raises(ValueError, match="unknown implementation 'autoflash_16_bits' of fwd"):
        implementation("autoflash_16_bits", PLAIN, q, k, v)
    assert {peers[0] for peers in PEERS.values()} == {"autoflash"}
