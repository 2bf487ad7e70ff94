"""A lookup reads few rows, and finds what the rule of evidence finds by reading all of them."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import delete, event, insert, update

from autoflash.kernels import KERNELS
from autoflash.problem import Bucket
from autoflash.store import lookups
from autoflash.store.evidence import best_of, nearest
from autoflash.store.models import RecordRow
from autoflash.store.rows import record_to_row
from autoflash.target import named_target
from tests.store.support import H200, PROBLEM, problem_of, record_of

H100 = named_target("h100")
# What spoils a row, in a column that is looked at first or in one that is not.
SPOILED = ({"created_at": "tomorrow"}, {"kernel": "of tomorrow"}, {"repeats": -1}, {"kind": ""})
PROBLEMS = [PROBLEM, problem_of(seqlen_q=1500), problem_of(seqlen_k=8000), problem_of(batch=1)]


def told(ms, day, origin, kind, noisy, triton, repeats, problem, h100, kernel):
    measured = kind == "measured"
    record = record_of(
        ms=ms, day=day, origin=origin, kind=kind, noisy=noisy and measured, problem=problem,
        target=H100 if h100 else H200,
    )  # fmt: skip
    return replace(
        record,
        kernel=kernel,
        config=KERNELS[kernel].default(problem, record.target),
        provenance=replace(record.provenance, triton=triton),
        measurement=replace(record.measurement, repeats=repeats if measured else 0),
    )


# Few values of each, so that ties and re-tunes are common.
RECORDS = st.builds(
    told,
    st.sampled_from([1.0, 2.0]),
    st.integers(1, 3),
    st.sampled_from(["a", "b", "B", ""]),
    st.sampled_from(["measured", "measured", "predicted"]),
    st.booleans(),
    st.sampled_from(["3.6.0", "3.10.0"]),
    st.sampled_from([10, 40]),
    st.sampled_from([PROBLEM, *PROBLEMS]),
    st.sampled_from([False, False, True]),
    st.sampled_from(["flash_fwd", "flash_fwd_ws"]),
)
ROWS = st.lists(st.tuples(RECORDS, st.none() | st.sampled_from(SPOILED)), max_size=14)


@pytest.fixture
def store(home):
    return home.open()


@settings(
    max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
@given(rows=ROWS, kernels=st.sampled_from([None, frozenset({"flash_fwd"})]))
def test_what_is_found_is_what_the_rule_says_of_all_good_rows(store, rows, kernels):
    with store._session("fill") as session:
        session.execute(delete(RecordRow))
        for record, spoiled in rows:
            session.execute(insert(RecordRow), [record_to_row(record) | (spoiled or {})])
    good = [r for r, spoiled in rows if not spoiled and (kernels is None or r.kernel in kernels)]
    measured = [record for record in good if record.kind == "measured"]
    bucket = Bucket.of(PROBLEM)
    own = [record for record in good if record.target == H200]
    expected = best_of(record for record in own if record.bucket == bucket)
    assert store.best(bucket, H200, kernels) == expected
    others = [record for record in measured if record.bucket != bucket and record.target == H200]
    assert evidence(store.neighbours(bucket, H200, kernels)) == evidence(nearest(others, bucket))
    kin = nearest((record for record in measured if record.target == H100), bucket)
    assert evidence(store.siblings(bucket, H200, kernels)) == evidence(kin)
    assert evidence(store.siblings(bucket, H200, kernels, limit=1)) == evidence(kin[:1])


def evidence(records):
    """Of those equally far with equal evidence either may come first."""
    bucket = Bucket.of(PROBLEM)
    return [
        (bucket.distance(r.bucket), r.kind, r.measurement, r.provenance.created_at) for r in records
    ]


def test_an_origin_that_tuned_often_costs_one_row(store, make):
    store.add_records([make.record(ms=9 - day / 10, day=day) for day in range(1, 29)])
    read = []
    whole = lookups.record_from_row
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookups, "record_from_row", lambda row: read.append(row) or whole(row))
        assert store.best(make.bucket, make.h200) == make.record(ms=9 - 2.8, day=28)
        assert len(read) == 1
        with store._session("spoil") as session:
            session.execute(update(RecordRow).where(RecordRow.id == 28).values(repeats=-1))
        assert store.best(make.bucket, make.h200) == make.record(ms=9 - 2.7, day=27)
        assert len(read) == 1 + 1 + 28


def test_neighbours_that_are_not_asked_for_are_not_read(store, make):
    lengths = [2**power for power in range(5, 12)]
    store.add_records([make.record(problem=make.problem(seqlen_q=n)) for n in lengths])
    asked = []
    event.listen(
        store._engine, "before_cursor_execute", lambda c, k, statement, *_: asked.append(statement)
    )
    bucket = Bucket.of(make.problem(seqlen_q=4096))
    assert [r.problem.seqlen_q for r in store.neighbours(bucket, make.h200, limit=2)] == [
        2048,
        1024,
    ]
    # Where there are some, then which are words and one whole row of each.
    assert len([text for text in asked if "FROM records" in text]) == 1 + 2 * 2
