"""Factories of the store's nouns; every part can be replaced by keyword."""

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any

from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.space import Config
from autoflash.store.record import Measurement, Provenance, Trial, TrialStatus, TuningRecord
from autoflash.target import Target, named_target

KERNEL = KERNELS["flash_fwd"]
H200 = named_target("h200")
PROBLEM = Problem(
    batch=2,
    heads=16,
    kv_heads=4,
    seqlen_q=2000,
    seqlen_k=4096,
    head_dim=128,
    head_dim_v=64,
    dtype="bfloat16",
    causal=True,
)


def problem_of(**changes: Any) -> Problem:
    return dataclasses.replace(PROBLEM, **changes)


def config_of(**changes: Any) -> Config:
    return KERNEL.space.parse({**KERNEL.default(PROBLEM, H200), **changes})


def record_of(
    *,
    problem: Problem = PROBLEM,
    target: Target = H200,
    ms: float = 1.25,
    noisy: bool = False,
    day: int = 1,
    kind: str = "measured",
    origin: str = "host-a",
    **config: Any,
) -> TuningRecord:
    return TuningRecord(
        problem=problem,
        target=target,
        kernel=KERNEL.name,
        config=config_of(**config),
        measurement=Measurement(
            median_ms=ms,
            p20_ms=ms * 0.9,
            p80_ms=ms * 1.1,
            repeats=40 if kind == "measured" else 0,
            method="cuda_graph" if kind == "measured" else "model",
            noisy=noisy,
            sm_clock_mhz=1755 if kind == "measured" else None,
            throttle="power cap" if noisy else "",
        ),
        provenance=provenance_of(day, origin),
        kind=kind,
    )


def provenance_of(day: int = 1, origin: str = "host-a") -> Provenance:
    return Provenance(
        autoflash="0.1.0",
        triton="3.6.0",
        torch="2.10.0",
        cuda="13.0",
        driver="580.65",
        source_hash="deadbeef",
        created_at=f"2025-03-{day:02d}T12:30:00+00:00",
        origin=origin,
    )


def trial_of(status: TrialStatus = TrialStatus.ok, **changes: Any) -> Trial:
    fields: dict[str, Any] = {
        "problem": PROBLEM,
        "target": H200,
        "kernel": KERNEL.name,
        "config": config_of(),
        "status": status,
        "provenance": provenance_of(),
    }
    return Trial(**{**fields, **changes})


def as_a_stranger(work: Callable[[], str]) -> str:
    """Run ``work`` in a process that permission bits bind (root's don't); returns what it says."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            os.write(write, work().encode())
            code = 0
        os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, said
    return said


_KEY = (
    "op, dtype, head_dim, head_dim_v, causal, target_arch, target_vendor, target_name, "
    "target_sm_count, target_memory_gib, group_size, batch_heads, bucket_seqlen_q, bucket_seqlen_k"
)
# Undoes all that came after it, on either database.
_EVIDENCE = "kind, kernel, origin, noisy, created_at, median_ms"
TO_THE_THIRD_SCHEMA = (
    "DROP INDEX ix_records_key",
    "DROP INDEX ix_trials_key",
    *(
        f"ALTER TABLE {table} DROP COLUMN {name}"
        for table in ("records", "trials")
        for name in ("kv_dtype", "out_dtype", "scales", "v_layout")
    ),
    f"CREATE INDEX ix_records_key ON records ({_KEY}, {_EVIDENCE})",
    f"CREATE INDEX ix_trials_key ON trials ({_KEY})",
    "UPDATE autoflash_schema SET version_num = '0003'",
)
TO_THE_FIRST_SCHEMA = (
    *TO_THE_THIRD_SCHEMA,
    "DROP INDEX ix_records_digest",
    "DROP INDEX ix_trials_digest",
    "DROP INDEX ix_records_key",
    f"CREATE INDEX ix_records_key ON records ({_KEY})",
    "ALTER TABLE records DROP COLUMN digest",
    "ALTER TABLE trials DROP COLUMN digest",
    "ALTER TABLE trials DROP COLUMN came_from",
    "UPDATE autoflash_schema SET version_num = '0001'",
)
