"""Merging by evidence: what stands depends on what was said, not on who was merged first."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoflash.problem import Bucket
from autoflash.store.digest import canonical, record_digest
from autoflash.store.exchange import dump_records
from autoflash.store.merge import key_of, merged, parse_version, why, winner, winners, words
from autoflash.store.plain import record_to_plain
from autoflash.store.shipped import ShippedRecords
from autoflash.target import named_target
from tests.store.support import H200, problem_of, record_of


def versioned(record, **versions):
    return replace(record, provenance=replace(record.provenance, **versions))


def repeated(record, repeats):
    return replace(record, measurement=replace(record.measurement, repeats=repeats))


# Few values of each, so that ties and re-tunes are common.
RECORDS = st.builds(
    lambda ms, day, origin, kind, noisy, triton, repeats, length: repeated(
        versioned(
            record_of(
                ms=ms, day=day, origin=origin, kind=kind, noisy=noisy and kind == "measured",
                problem=problem_of(seqlen_q=length),
            ),
            triton=triton,
        ),
        repeats if kind == "measured" else 0,
    ),
    st.sampled_from([1.0, 2.0]),
    st.integers(1, 3),
    st.sampled_from(["a", "b", "c", ""]),
    st.sampled_from(["measured", "measured", "predicted"]),
    st.booleans(),
    st.sampled_from(["3.6.0", "3.10.0", ""]),
    st.sampled_from([10, 40]),
    st.sampled_from([2000, 2048, 4096]),
)  # fmt: skip
SIDES = st.lists(RECORDS, max_size=6)
many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@many
@given(SIDES, SIDES, SIDES)
def test_a_merge_commutes_associates_and_repeats(a, b, c):
    assert merged(a, b) == merged(b, a)
    assert merged(merged(a, b), c) == merged(a, merged(b, c)) == merged(c, b, a)
    assert merged(a, a) == merged(a) == merged(merged(a))
    assert winners(merged(a, b)) == winners(merged(b, a)) == winners([*b, *a, *b])


@many
@given(SIDES, st.randoms(use_true_random=False))
def test_winners_depend_on_no_order(records, random):
    shuffled = records * 2
    random.shuffle(shuffled)
    assert winners(shuffled) == winners(records)
    for key, record in winners(records).items():
        assert record == winner(r for r in records if key_of(r) == key)


@many
@given(SIDES, SIDES)
def test_words_may_be_merged_in_the_place_of_all(a, b):
    """What is superseded by its own origin decides nothing: it may be left out."""
    assert winners([*words(a), *words(b)]) == winners(merged(a, b))


@many
@given(SIDES, SIDES)
def test_nothing_of_either_side_is_lost(a, b):
    assert {record_digest(r) for r in merged(a, b)} == {record_digest(r) for r in [*a, *b]}


OLD = versioned(record_of(ms=1.0, origin="a", day=9), triton="3.6.0")
BETTER = {
    "measured, not predicted": (
        record_of(ms=9.0, noisy=True, origin="b"),
        record_of(ms=1.0, kind="predicted", origin="a"),
    ),
    "clean, not noisy": (record_of(ms=9.0, origin="b"), record_of(ms=1.0, noisy=True, day=9)),
    "newer versions": (versioned(record_of(ms=9.0, origin="b"), triton="3.10.0"), OLD),
    "more repeats": (repeated(record_of(ms=9.0, origin="b"), 41), record_of(ms=1.0, day=9)),
    "lower time": (record_of(ms=1.0, origin="b"), record_of(ms=1.1, day=9)),
    "newer": (record_of(ms=9.0, day=2), versioned(record_of(ms=1.0), triton="3.10.0")),
    "lower time of the same run": (record_of(ms=1.0), record_of(ms=2.0)),
}


@pytest.mark.parametrize("reason", BETTER)
def test_what_decides(reason):
    good, bad = BETTER[reason]
    assert winner([good, bad]) == winner([bad, good]) == good
    assert why(good, bad) == reason


def test_torch_and_the_driver_decide_where_triton_does_not():
    base = record_of(ms=1.0)
    torch = versioned(record_of(ms=9.0, origin="b"), torch="2.10.1")
    driver = versioned(record_of(ms=9.0, origin="b"), driver="580.159.04")
    assert winner([base, torch]) == torch
    assert winner([base, driver]) == driver
    assert winner([torch, driver]) == torch


def test_a_noisy_re_tune_does_not_replace_a_clean_word():
    clean, noisy = record_of(ms=2.0, day=1), record_of(ms=1.0, day=2, noisy=True)
    assert winner([noisy, clean]) == clean


def test_a_superseded_record_wins_over_no_other_origin():
    """a's first word would beat b's; a has taken it back."""
    first, taken_back = record_of(ms=1.0, day=1), record_of(ms=3.0, day=2)
    other = record_of(ms=2.0, origin="b")
    assert winner([first, other]) == first
    assert winner([first, other, taken_back]) == other


def test_times_of_problems_of_different_sizes_are_compared_by_rate():
    small = record_of(problem=problem_of(batch=1, heads=20, kv_heads=5), ms=1.0)
    large = record_of(ms=1.5, origin="b")
    assert key_of(small) == key_of(large)
    assert large.problem.flops > 1.5 * small.problem.flops
    assert winner([small, large]) == large


def test_a_store_and_the_shipped_files_serve_by_the_same_rule(store, tmp_path):
    """The newest date of another origin is no evidence; a kernel's repeats none against another."""
    records = [
        record_of(ms=2.0, day=1, origin="a"),
        record_of(ms=3.0, day=9, origin="b"),
        repeated(versioned(record_of(ms=1.0, day=28, origin="c"), triton="3.5.0"), 400),
    ]
    store.add_records(records)
    (tmp_path / f"{H200.slug}.json").write_text(dump_records(records))
    shipped = ShippedRecords(tmp_path)
    for source in (store, shipped):
        assert source.best(records[0].bucket, H200) == records[0]
        longer = Bucket.of(problem_of(seqlen_k=9000))
        assert source.neighbours(longer, H200) == [records[0]]


def test_an_even_tie_goes_by_digest():
    twins = [record_of(origin=origin) for origin in "abcd"]
    lowest = min(twins, key=record_digest)
    for order in itertools.permutations(twins):
        assert winner(order) == lowest
    assert why(lowest, next(t for t in twins if t != lowest)) == "a tie: lower digest"


def test_other_kernels_buckets_and_targets_do_not_compete():
    records = [record_of(), record_of(target=named_target("h100")), record_of(
        problem=problem_of(seqlen_q=300))]  # fmt: skip
    assert sorted(map(record_digest, winners(records).values())) == sorted(
        map(record_digest, records)
    )
    assert winner([]) is None


@pytest.mark.parametrize(
    "ascending",
    [
        ["", "3", "3.1", "3.9.9", "3.10", "3.10.1", "20.0"],
        ["unknown", "2.11.0.dev20250101", "2.11.0+cu130", "2.11.1"],
        ["3.7.0a1", "3.7.0"],
        ["3.7.0rc1", "3.7.0+git0f"],
        ["580.65", "580.159.04"],
        ["-1", "0.1"],
    ],
)
def test_versions_are_compared_as_versions(ascending):
    parsed = [parse_version(text) for text in ascending]
    assert parsed == sorted(parsed)
    assert len(set(parsed)) == len(parsed)


def test_versions_that_are_the_same():
    assert parse_version("3.7") == parse_version("3.7.0") == parse_version("3.7.0+cu130")
    assert parse_version("9" * 200) == parse_version("9" * 200)


def test_a_digest_is_of_what_the_record_says():
    record = record_of(ms=2.0)
    assert record_digest(record) == record_digest(record_of(ms=2))
    assert len(record_digest(record)) == 64
    others = [record_of(ms=2.0000000000000004), record_of(ms=2.0, day=2), record_of(origin="b")]
    assert len({record_digest(r) for r in [record, *others]}) == 4
    text = canonical(record_to_plain(record))
    assert text.isascii()
    assert '"median_ms":2.0' in text
    with pytest.raises(ValueError, match="Out of range"):
        canonical(float("nan"))
