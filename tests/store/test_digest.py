"""The fast way to a record's canonical text, and the plain one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoflash.errors import InvalidInputError
from autoflash.store.digest import canonical, record_text, trial_text
from autoflash.store.plain import record_from_plain, record_to_plain, trial_to_plain
from autoflash.store.record import Measurement, Provenance, TrialStatus
from tests.store.support import problem_of, record_of, trial_of

TEXTS = st.text(max_size=200).filter(str.isprintable)
TIMES = st.floats(5e-324, 1e9, exclude_max=True) | st.integers(1, 10**8)
MEASUREMENTS = st.builds(
    Measurement, median_ms=TIMES, p20_ms=TIMES, p80_ms=TIMES, repeats=st.integers(1, 2**31 - 1),
    method=st.sampled_from(["events", "cuda_graph"]), noisy=st.booleans(),
    sm_clock_mhz=st.none() | st.integers(0, 2**31 - 1), throttle=TEXTS,
)  # fmt: skip
PROVENANCES = st.builds(
    Provenance, autoflash=TEXTS, triton=TEXTS, torch=TEXTS, cuda=TEXTS, driver=TEXTS,
    source_hash=TEXTS, created_at=st.just("2025-01-31T23:59:59+00:00"), origin=TEXTS,
)  # fmt: skip


@given(MEASUREMENTS, PROVENANCES, st.integers(1, 2**31 - 1), st.sampled_from([64, 128]))
def test_it_is_the_canonical_text_of_its_plain_form(measurement, provenance, length, block):
    record = replace(
        record_of(problem=problem_of(seqlen_k=length), BLOCK_M=block),
        measurement=measurement,
        provenance=provenance,
    )
    plain = record_to_plain(record)
    assert record_text(record) == canonical(plain)
    assert record_from_plain(plain) == record


@given(
    MEASUREMENTS | st.none(),
    PROVENANCES,
    st.sampled_from(list(TrialStatus)),
    st.text(max_size=300),
    TIMES | st.none(),
    st.none() | st.integers(0, 2**31 - 1),
    TEXTS,
)
def test_so_it_is_of_a_trial(measurement, provenance, status, reason, ms, count, came_from):
    trial = replace(
        trial_of(status, reason=reason, measurement=measurement, provenance=provenance),
        predicted_ms=ms,
        registers=count,
        spills=count,
        came_from=came_from,
    )
    assert trial_text(trial) == canonical(trial_to_plain(trial))


def test_numbers_that_are_equal_are_told_apart():
    """1, 1.0 and True are one key of a dictionary."""
    for wrong in (True, 1.0, "1"):
        record_from_plain(record_to_plain(record_of(problem=problem_of(batch=1))))
        plain = record_to_plain(record_of(problem=problem_of(batch=1)))
        plain["problem"]["batch"] = wrong
        with pytest.raises(
            InvalidInputError, match=f"batch: must be int, not {type(wrong).__name__}"
        ):
            record_from_plain(plain)
