"""Problem and Bucket: what is parsed, what is refused, and what is counted."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoflash.dtypes import canonical_dtype
from autoflash.errors import AutoFlashError, InvalidInputError
from autoflash.problem import (
    FP8_FIELDS,
    MAX_HEAD_DIM,
    Bucket,
    Problem,
    next_power_of_2,
    parse_length,
)

BASE = Problem(
    batch=2,
    heads=8,
    kv_heads=2,
    seqlen_q=100,
    seqlen_k=300,
    head_dim=80,
    head_dim_v=64,
    dtype="float16",
    causal=True,
)


def problem(**changes):
    return dataclasses.replace(BASE, **changes)


# --- refusals


@pytest.mark.parametrize("name", ["batch", "seqlen_q", "seqlen_k"])
def test_sizes_may_be_zero_but_not_negative(name):
    assert getattr(problem(**{name: 0}), name) == 0
    with pytest.raises(InvalidInputError, match=rf"^{name}=-1: must be a whole number from 0 to"):
        problem(**{name: -1})


@pytest.mark.parametrize("name", ["heads", "kv_heads", "head_dim", "head_dim_v"])
def test_dims_start_at_one(name):
    with pytest.raises(InvalidInputError, match=rf"^{name}=0: must be a whole number from 1 to"):
        problem(**{name: 0})


@pytest.mark.parametrize("name", ["batch", "heads", "seqlen_q", "head_dim"])
@pytest.mark.parametrize("value", [1.0, "4", True, None, 2**31], ids=repr)
def test_only_whole_numbers_below_2_to_the_31(name, value):
    with pytest.raises(InvalidInputError) as caught:
        problem(**{name: value})
    assert f"{name}={value!r}" in str(caught.value)
    assert "2^31 - 1" in str(caught.value)


def test_the_largest_size_is_taken():
    assert problem(seqlen_k=2**31 - 1).seqlen_k == 2**31 - 1


@pytest.mark.parametrize("name", ["head_dim", "head_dim_v"])
def test_head_dims_end_at_256(name):
    assert getattr(problem(**{name: MAX_HEAD_DIM}), name) == 256
    with pytest.raises(InvalidInputError, match=rf"^{name}=257: the largest .* is 256$"):
        problem(**{name: 257})


def test_heads_must_be_a_multiple_of_kv_heads():
    with pytest.raises(InvalidInputError, match=r"^heads=8 is not a multiple of kv_heads=3"):
        problem(kv_heads=3)
    with pytest.raises(InvalidInputError, match=r"^heads=8 is not a multiple of kv_heads=16"):
        problem(kv_heads=16)


@pytest.mark.parametrize("dtype", ["fp16", "float64", "", "torch.float16"])
def test_a_problem_takes_canonical_dtypes_only(dtype):
    with pytest.raises(InvalidInputError) as caught:
        problem(dtype=dtype)
    known = "float16, bfloat16, float32, float8_e4m3fn"
    assert str(caught.value) == f"dtype={dtype!r}: must be one of {known}"


@pytest.mark.parametrize("causal", [1, 0, None, "true"])
def test_causal_is_a_bool(causal):
    with pytest.raises(InvalidInputError) as caught:
        problem(causal=causal)
    assert str(caught.value) == f"causal={causal!r}: must be true or false"


def test_unknown_op():
    with pytest.raises(InvalidInputError, match=r"^op='both': must be one of fwd, bwd$"):
        problem(op="both")


def test_a_refusal_is_a_value_error_and_ours():
    with pytest.raises(ValueError, match="head_dim=300") as caught:
        problem(head_dim=300)
    assert isinstance(caught.value, AutoFlashError)


def test_a_problem_is_frozen_and_hashable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BASE.batch = 3
    assert {BASE: 1}[problem()] == 1
    assert problem(batch=3) != BASE


# --- text


def test_parse_fills_in_defaults():
    assert Problem.parse({"batch": "2", "heads": "16", "seqlen": "4k", "head_dim": 128}) == Problem(
        batch=2,
        heads=16,
        kv_heads=16,
        seqlen_q=4096,
        seqlen_k=4096,
        head_dim=128,
        head_dim_v=128,
        dtype="bfloat16",
        causal=False,
        op="fwd",
    )


def test_parse_takes_every_field():
    assert Problem.parse(BASE.as_dict()) == BASE
    text = {name: str(value) for name, value in BASE.as_dict().items()}
    assert Problem.parse({**text, "causal": True, "dtype": "half"}) == BASE


def test_parse_leaves_its_argument_alone():
    fields = {"batch": 1, "heads": 2, "seqlen": "1k", "head_dim": 64}
    Problem.parse(fields)
    assert fields == {"batch": 1, "heads": 2, "seqlen": "1k", "head_dim": 64}


def test_seqlen_gives_way_to_the_longer_name():
    given_both = {"batch": 1, "heads": 2, "seqlen": "1k", "seqlen_q": 7, "head_dim": 64}
    parsed = Problem.parse(given_both)
    assert (parsed.seqlen_q, parsed.seqlen_k) == (7, 1024)


def test_parse_names_an_unknown_field_and_the_known_ones():
    with pytest.raises(InvalidInputError) as caught:
        Problem.parse({"batch": 1, "head": 2, "seqlen": 4, "head_dim": 64})
    assert str(caught.value) == (
        "unknown problem field 'head': known are batch, heads, kv_heads, seqlen_q, seqlen_k, "
        "head_dim, head_dim_v, dtype, causal, op, kv_dtype, out_dtype, scales, v_layout and seqlen"
    )


@pytest.mark.parametrize("name", ["batch", "heads", "seqlen_q", "head_dim"])
def test_parse_names_a_missing_field(name):
    fields = {"batch": 1, "heads": 2, "seqlen_q": 4, "seqlen_k": 4, "head_dim": 64}
    # kv_heads comes from heads and head_dim_v from head_dim, so either may be named.
    implied = {"heads": "kv_heads", "head_dim": "head_dim_v"}
    del fields[name]
    with pytest.raises(InvalidInputError) as caught:
        Problem.parse(fields)
    names = {name, implied.get(name, name)}
    assert str(caught.value) in {f"problem field {n!r} is missing" for n in names}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, 4096), ("4096", 4096), ("4k", 4096), ("4K", 4096), (" 16k ", 16384), ("1m", 1 << 20),
        ("0", 0), ("007", 7), (-5, -5),
    ],
)  # fmt: skip
def test_parse_length(value, expected):
    assert parse_length("seqlen", value) == expected


@pytest.mark.parametrize(
    "value",
    ["", "k", "-4k", "4.5k", "4kk", "4 k", "1e3", "٣", "²", True, 4.0, None, "9" * 13, "4g"],
)
def test_parse_length_refuses(value):
    with pytest.raises(InvalidInputError) as caught:
        parse_length("seqlen_q", value)
    assert str(caught.value) == (f"seqlen_q={value!r}: must be a whole number such as 4096 or 4k")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", "bfloat16"), ("BF16", "bfloat16"), ("fp16", "float16"), ("half", "float16"),
        ("fp32", "float32"), ("float32", "float32"), ("torch.bfloat16", "bfloat16"),
        (torch.float16, "float16"), ("fp8", "float8_e4m3fn"), ("e4m3", "float8_e4m3fn"),
        (torch.float8_e4m3fn, "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_dtype_aliases(name, expected):
    assert canonical_dtype(name) == expected


@pytest.mark.parametrize("name", ["float64", "int8", "", None, torch.float64, "e4m3fnuz"])
def test_dtypes_that_are_refused(name):
    with pytest.raises(InvalidInputError) as caught:
        canonical_dtype(name)
    known = "float16, bfloat16, float32, float8_e4m3fn"
    assert str(caught.value) == f"dtype={name!r}: must be one of {known}"


def test_label():
    assert BASE.label() == "fwd float16 b2 h8/2 s100x300 d80v64 causal"
    assert problem(kv_heads=8, seqlen_k=100, head_dim_v=80, causal=False).label() == (
        "fwd float16 b2 h8 s100 d80"
    )


# --- counts


def brute_force_pairs(seqlen_q, seqlen_k, causal):
    return sum(
        1
        for i, j in itertools.product(range(seqlen_q), range(seqlen_k))
        if not causal or j <= i + seqlen_k - seqlen_q
    )


sizes = st.integers(min_value=0, max_value=24)


@given(seqlen_q=sizes, seqlen_k=sizes, causal=st.booleans())
def test_visible_pairs(seqlen_q, seqlen_k, causal):
    counted = problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal).visible_pairs
    assert counted == brute_force_pairs(seqlen_q, seqlen_k, causal)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "expected"),
    [(5, 5, 15), (3, 5, 12), (5, 3, 6), (1, 9, 9), (9, 1, 1), (0, 4, 0), (4, 0, 0)],
)
def test_visible_pairs_by_hand(seqlen_q, seqlen_k, expected):
    assert problem(seqlen_q=seqlen_q, seqlen_k=seqlen_k).visible_pairs == expected


def test_flops():
    # 2 batches of 8 heads of 2 x 3 pairs, each 80 multiply-adds for q k and 64 for p v.
    assert problem(seqlen_q=2, seqlen_k=3, causal=False).flops == 2 * 8 * 6 * (80 + 64) * 2
    # Causal 2 x 3: the rows see 2 and 3 keys.
    assert problem(seqlen_q=2, seqlen_k=3).flops == 2 * 8 * 5 * (80 + 64) * 2


@pytest.mark.parametrize(("dtype", "size"), [("float16", 2), ("bfloat16", 2), ("float32", 4)])
def test_min_bytes(dtype, size):
    b, h, hk, sq, sk, d, dv = 2, 8, 2, 100, 300, 80, 64
    q, k, v, out = b * h * sq * d, b * hk * sk * d, b * hk * sk * dv, b * h * sq * dv
    assert problem(dtype=dtype).min_bytes == (q + k + v + out) * size + b * h * sq * 4


# --- buckets


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1000, 1024), (1024, 1024), (1025, 2048)],
)
def test_next_power_of_2(value, expected):
    assert next_power_of_2(value) == expected


@given(st.integers(min_value=1, max_value=2**31 - 1))
def test_next_power_of_2_is_the_smallest(value):
    power = next_power_of_2(value)
    assert power & (power - 1) == 0
    assert power // 2 < value <= power


def test_bucket_rounds_sizes_up_and_keeps_the_rest():
    assert Bucket.of(BASE) == Bucket(
        op="fwd",
        dtype="float16",
        head_dim=80,
        head_dim_v=64,
        causal=True,
        group=4,
        batch_heads=16,
        seqlen_q=128,
        seqlen_k=512,
    )
    assert Bucket.of(BASE).label() == "fwd float16 bh16 group4 s128x512 d80v64 causal"


def test_problems_of_a_size_share_a_bucket():
    assert Bucket.of(problem(batch=1, heads=16, kv_heads=4)) == Bucket.of(BASE)
    assert Bucket.of(problem(seqlen_q=65, seqlen_k=512)) == Bucket.of(BASE)
    assert Bucket.of(problem(seqlen_q=64)) != Bucket.of(BASE)
    assert Bucket.of(problem(batch=3)) != Bucket.of(BASE)
    assert Bucket.of(problem(kv_heads=4)) != Bucket.of(BASE)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.0),
        ({"seqlen_q": 200}, 1.0),
        ({"seqlen_k": 4096}, 3.0),
        ({"batch": 4}, 0.5),
        ({"kv_heads": 8}, 0.5),
        ({"dtype": "bfloat16"}, 0.25),
        ({"seqlen_q": 64, "seqlen_k": 256, "batch": 8, "kv_heads": 8}, 3.5),
    ],
)
def test_distance_in_octaves(changes, expected):
    here, there = Bucket.of(BASE), Bucket.of(problem(**changes))
    assert here.distance(there) == expected
    assert there.distance(here) == expected


@pytest.mark.parametrize(
    "changes",
    [{"dtype": "float32"}, {"head_dim": 64}, {"head_dim_v": 80}, {"causal": False}],
    ids=lambda changes: next(iter(changes)),
)
def test_no_distance_between_different_code(changes):
    here, there = Bucket.of(BASE), Bucket.of(problem(**changes))
    assert here.distance(there) is None
    assert there.distance(here) is None


lengths = st.integers(min_value=0, max_value=1 << 20)
buckets = st.builds(
    lambda batch, group, kv_heads, seqlen_q, seqlen_k: Bucket.of(
        problem(
            batch=batch,
            heads=group * kv_heads,
            kv_heads=kv_heads,
            seqlen_q=seqlen_q,
            seqlen_k=seqlen_k,
        )
    ),
    st.integers(min_value=0, max_value=64),
    st.integers(min_value=1, max_value=8),
    st.integers(min_value=1, max_value=8),
    lengths,
    lengths,
)


@given(one=buckets, two=buckets, three=buckets)
def test_distance_is_a_metric(one, two, three):
    assert one.distance(two) == two.distance(one)
    assert (one.distance(two) == 0) == (one == two)
    assert one.distance(three) <= one.distance(two) + two.distance(three)


def test_the_missing_field_is_the_one_left_out():
    with pytest.raises(InvalidInputError, match="'heads' is missing"):
        Problem.parse({"batch": 1, "seqlen": 4, "head_dim": 64})


# --- the backward


def test_the_backward_takes_five_products_where_the_forward_takes_two():
    for fields in ({}, {"causal": True}, {"seqlen_q": 7}):
        forward = problem(**fields, head_dim=64, head_dim_v=64)
        backward = dataclasses.replace(forward, op="bwd")
        assert backward.flops * 2 == forward.flops * 5
    # q k^T, dS k and dS^T q are as deep as head_dim, dout v^T and P^T dout as head_dim_v.
    pairs = 2 * BASE.batch * BASE.heads * problem(causal=False).visible_pairs
    assert problem(op="bwd", causal=False, head_dim=100, head_dim_v=1).flops == pairs * 302


def test_the_backward_moves_three_gradients_and_dout_more():
    p = problem(op="bwd", dtype="float16", head_dim=64, head_dim_v=32)
    rows, keys = p.batch * p.heads * p.seqlen_q, p.batch * p.kv_heads * p.seqlen_k
    # q, dq; out, dout; the LSE. k, dk; v, dv.
    assert p.min_bytes == rows * (2 * 64 * 2 + 2 * 32 * 2 + 4) + keys * (2 * 64 * 2 + 2 * 32 * 2)


def test_ops_do_not_share_records():
    forward, backward = problem(), problem(op="bwd")
    assert backward.label() == forward.label().replace("fwd", "bwd")
    assert Bucket.of(backward) != Bucket.of(forward)
    assert Bucket.of(backward).distance(Bucket.of(forward)) is None
    assert Problem.parse(backward.as_dict()) == backward


# --- fp8

FP8 = problem(dtype="float8_e4m3fn", scales="head")
MIXED = problem(kv_dtype="float8_e4m3fn", scales="block", v_layout="permuted")


def test_what_comes_to_the_same_is_the_same():
    assert problem(kv_dtype="float16", out_dtype="float16") == BASE
    assert hash(problem(kv_dtype="float16")) == hash(BASE)
    same = dataclasses.replace(FP8, kv_dtype="float8_e4m3fn", out_dtype="bfloat16")
    assert (same, same.kv_dtype, same.out_dtype) == (FP8, "", "")
    assert (FP8.dtype_of_kv, FP8.dtype_of_out) == ("float8_e4m3fn", "bfloat16")
    assert dataclasses.replace(FP8, out_dtype="float16").dtype_of_out == "float16"
    assert (MIXED.dtype_of_kv, MIXED.dtype_of_out) == ("float8_e4m3fn", "float16")
    assert (BASE.dtype_of_kv, BASE.dtype_of_out) == ("float16", "float16")
    assert [p.is_fp8 for p in (BASE, FP8, MIXED)] == [False, True, True]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": "bfloat16"}, "kv_dtype='bfloat16' with dtype='float16': must be dtype, or"),
        (
            {"dtype": "float32", "kv_dtype": "float8_e4m3fn", "scales": "head"},
            "kv_dtype='float8_e4m3fn' with dtype='float32': must be dtype, or float8_e4m3fn where "
            "that is one of float16, bfloat16",
        ),
        (
            {"dtype": "float8_e4m3fn", "kv_dtype": "float16", "scales": "head"},
            "kv_dtype='float16' with dtype='float8_e4m3fn'",
        ),
        ({"kv_dtype": 8}, "kv_dtype=8: must be text"),
        ({"out_dtype": None}, "out_dtype=None: must be text"),
        ({"scales": b"head"}, "scales=b'head': must be text"),
        ({"out_dtype": "bfloat16"}, "out_dtype='bfloat16' with dtype='float16': must be float16"),
        (
            {"dtype": "float8_e4m3fn", "scales": "head", "out_dtype": "float32"},
            "out_dtype='float32' with dtype='float8_e4m3fn': must be float16 or bfloat16",
        ),
        (
            {"dtype": "float8_e4m3fn", "scales": "head", "out_dtype": "float8_e4m3fn"},
            "out_dtype='float8_e4m3fn' with dtype='float8_e4m3fn'",
        ),
        ({"scales": "head"}, "scales='head': only k and v in float8_e4m3fn have that"),
        ({"v_layout": "columns"}, "v_layout='columns': only k and v in float8_e4m3fn have that"),
        ({"dtype": "float8_e4m3fn"}, "scales='': of fp8 they must be one of tensor, head, block"),
        (
            {"dtype": "float8_e4m3fn", "scales": "row"},
            "scales='row': of fp8 they must be one of tensor, head, block",
        ),
        (
            {"dtype": "float8_e4m3fn", "scales": "head", "v_layout": "transposed"},
            "v_layout='transposed': must be one of rows, columns, permuted",
        ),
        (
            {"dtype": "float8_e4m3fn", "scales": "head", "op": "bwd"},
            "op='bwd': fp8 attention has no gradients, its op is 'fwd'",
        ),
    ],
)
def test_what_of_fp8_goes_together(changes, message):
    with pytest.raises(InvalidInputError) as caught:
        problem(**changes)
    assert str(caught.value).startswith(message)


def test_parse_fp8():
    text = {"batch": 2, "heads": 8, "kv_heads": 2, "seqlen_q": 100, "seqlen_k": 300,
            "head_dim": 80, "head_dim_v": 64, "causal": True}  # fmt: skip
    assert Problem.parse({**text, "dtype": "fp8"}) == FP8
    mixed = {"dtype": "half", "kv_dtype": "fp8", "scales": "block", "v_layout": "permuted"}
    assert Problem.parse({**text, **mixed}) == MIXED
    assert Problem.parse({**text, "dtype": "half", "kv_dtype": "fp16"}) == BASE
    for p in (FP8, MIXED, dataclasses.replace(FP8, out_dtype="float16", scales="tensor")):
        assert Problem.parse(p.as_dict()) == p


def test_only_fp8_is_written_with_its_fields():
    fields = set(BASE.as_dict())
    assert fields == {f.name for f in dataclasses.fields(Problem)} - set(FP8_FIELDS)
    assert set(FP8.as_dict()) - fields == {"scales"}
    assert set(MIXED.as_dict()) - fields == {"kv_dtype", "scales", "v_layout"}
    assert {n: f.default for n, f in Bucket.__dataclass_fields__.items() if n in FP8_FIELDS} == (
        FP8_FIELDS
    )


def test_labels_and_flags_of_fp8():
    sizes = "b2 h8/2 s100x300 d80v64 causal"
    assert FP8.label() == f"fwd float8_e4m3fn {sizes} head_scales"
    assert MIXED.label() == f"fwd float16/float8_e4m3fn {sizes} block_scales v_permuted"
    half = dataclasses.replace(FP8, out_dtype="float16", v_layout="columns")
    assert half.label() == f"fwd float8_e4m3fn->float16 {sizes} head_scales v_columns"
    assert Bucket.of(half).label() == (
        "fwd float8_e4m3fn->float16 bh16 group4 s128x512 d80v64 causal head_scales v_columns"
    )
    assert "--dtype float16" in BASE.flags()
    assert not any(name in BASE.flags() for name in ("kv-dtype", "scales", "layout", "out-"))
    assert FP8.flags().endswith("--dtype float8_e4m3fn --causal --scales head")
    assert MIXED.flags().endswith(
        "--dtype float16 --causal --kv-dtype float8_e4m3fn --scales block --v-layout permuted"
    )
    assert half.flags().endswith("--causal --out-dtype float16 --scales head --v-layout columns")


def test_min_bytes_of_fp8():
    b, h, hk, sq, sk, d, dv = 2, 8, 2, 100, 300, 80, 64
    q, k, v, out = b * h * sq * d, b * hk * sk * d, b * hk * sk * dv, b * h * sq * dv
    assert FP8.min_bytes == q + k + v + 2 * out + b * h * sq * 4
    assert MIXED.min_bytes == 2 * q + k + v + 2 * out + b * h * sq * 4


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 0.0),
        ({"scales": "block"}, 0.25),
        ({"out_dtype": "float16"}, 0.25),
        ({"out_dtype": "float16", "scales": "tensor", "seqlen_q": 200}, 1.5),
        ({"v_layout": "columns"}, None),
        ({"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"}, None),
        ({"dtype": "bfloat16", "scales": ""}, None),
    ],
)
def test_distance_between_problems_of_fp8(changes, expected):
    here, there = Bucket.of(FP8), Bucket.of(dataclasses.replace(FP8, **changes))
    assert here.distance(there) == there.distance(here) == expected
    assert (here == there) == (expected == 0)


def test_mixed_problems_are_kindred_as_their_queries_are():
    other = dataclasses.replace(MIXED, dtype="bfloat16")
    assert Bucket.of(MIXED).distance(Bucket.of(other)) == 0.25
