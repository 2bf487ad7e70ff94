"""The nouns refuse what describes no measurement, and a target comes back from its identity."""

import dataclasses
import math

import pytest

from autoflash.errors import InvalidInputError
from autoflash.problem import Bucket
from autoflash.store.record import Provenance, TrialStatus, target_from_identity
from autoflash.target import NAMED_TARGETS


def test_bucket_is_of_the_tuned_problem(make):
    bucket = make.record().bucket
    assert bucket == Bucket(
        op="fwd",
        dtype="bfloat16",
        head_dim=128,
        head_dim_v=64,
        causal=True,
        group=4,
        batch_heads=32,
        seqlen_q=2048,
        seqlen_k=4096,
    )


def test_status_is_its_word():
    assert [str(status) for status in TrialStatus] == [
        *("ok", "invalid", "compile_error", "out_of_resources", "wrong_result"),
        *("timeout", "crashed", "noisy", "predicted"),
    ]
    assert f"{TrialStatus.timeout}" == "timeout"
    assert TrialStatus("crashed") is TrialStatus.crashed


@pytest.mark.parametrize(
    "change",
    [
        {"median_ms": 0.0},
        {"median_ms": -1.0},
        {"p20_ms": math.nan},
        {"p80_ms": math.inf},
        {"median_ms": 10**400},
        {"repeats": 0},
        {"repeats": 2**31},
        {"method": "stopwatch"},
        {"sm_clock_mhz": -1},
        {"throttle": "x" * 201},
        {"throttle": "\x1b[31m"},
    ],
)
def test_measurement_refuses(make, change):
    with pytest.raises(InvalidInputError, match=next(iter(change))):
        dataclasses.replace(make.record().measurement, **change)


@pytest.mark.parametrize(
    "text",
    [
        *("", "yesterday", "2025-03-01", "2025-03-01T12:30:00", "2025-03-01T12:30:00Z"),
        *("2025-13-01T12:30:00+00:00", "2025-03-01T12:30:00+01:00", "2025-03-01 12:30:00+00:00"),
        *("2025-03-01T12:30:00.5+00:00", "2025-03-01T12:30:00+00:00 "),
    ],
)
def test_created_at_has_one_spelling(text):
    with pytest.raises(InvalidInputError, match="created_at"):
        Provenance(created_at=text)


def test_a_measured_record_has_no_time_of_the_model(make):
    record = make.record()
    with pytest.raises(InvalidInputError, match="kind='predicted' with method='cuda_graph'"):
        dataclasses.replace(record, kind="predicted")
    with pytest.raises(InvalidInputError, match="kind='guessed'"):
        dataclasses.replace(record, kind="guessed")


@pytest.mark.parametrize("target", NAMED_TARGETS.values(), ids=list(NAMED_TARGETS))
def test_named_targets_come_back_whole(target):
    vendor, name, arch, sm_count, memory_gib = target.identity
    found = target_from_identity(
        vendor=vendor, name=name, arch=arch, sm_count=sm_count, memory_gib=memory_gib
    )
    assert found == target


@pytest.mark.parametrize(
    ("vendor", "arch", "kin"),
    [
        ("nvidia", "sm_90", "h100"),
        ("nvidia", "sm_86", "a100"),
        ("nvidia", "sm_75", "a100"),
        ("nvidia", "sm_121", "rtx5090"),
        ("amd", "gfx90a", "mi300x"),
    ],
)
def test_other_targets_take_the_rest_from_kin(vendor, arch, kin):
    near = NAMED_TARGETS[kin]
    found = target_from_identity(
        vendor=vendor, name="Some GPU", arch=arch, sm_count=near.sm_count // 2, memory_gib=12
    )
    assert found.identity == (vendor, "Some GPU", arch, near.sm_count // 2, 12)
    assert found.shared_memory == near.shared_memory
    assert found.warp_size == near.warp_size
    assert found.tflops == pytest.approx(near.tflops / 2, rel=0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"vendor": "../nvidia"},
        {"arch": "sm_"},
        {"arch": "sm_90; drop"},
        {"arch": "gfx942"},
        {"sm_count": 0},
        {"memory_gib": -4},
        {"name": "H\n200"},
        {"name": "H" * 201},
    ],
)
def test_no_gpu_has_that_identity(make, change):
    vendor, _, arch, sm_count, memory_gib = make.h200.identity
    identity = {
        "vendor": vendor,
        "name": "Some GPU",
        "arch": arch,
        "sm_count": sm_count,
        "memory_gib": memory_gib,
    }
    with pytest.raises(InvalidInputError, match=next(iter(change))):
        target_from_identity(**{**identity, **change})
