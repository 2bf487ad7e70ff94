"""A tune among planted kernels (tests/planted): it ends in its budget, says what became of each
and crowns none. The process that asked for it, with a context of its own, goes on."""

import contextlib
import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import autoflash
from autoflash.kernels.kernel import Kernel
from autoflash.problem import Bucket, Problem
from autoflash.runtime import dispatch
from autoflash.settings import settings
from autoflash.store.record import Trial, TrialStatus
from autoflash.store.store import Store
from autoflash.target import current_target
from autoflash.tuning import study
from autoflash.tuning.finals import _REPEATS_S
from autoflash.tuning.progress import TuneResult
from tests.gpu.support import assert_accurate, tensors
from tests.planted import PROBLEM

Plant = Callable[[str], dict[str, Kernel]]
BUDGET_S = 60.0
EXPECTED = {
    "planted_loop": (TrialStatus.timeout, "no answer within 20 s"),
    "planted_late_write": (TrialStatus.crashed, "illegal memory access"),
    "planted_abort": (TrialStatus.crashed, "the worker was killed by SIGABRT"),
    "planted_off_by_one": (TrialStatus.wrong_result, ": error "),
    "planted_shared": (TrialStatus.out_of_resources, "bytes of shared memory"),
}


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """q, k and v of the problem, in a context that this process has before it tunes."""
    # However slow it is beside the others: the 20th launch is in the timing.
    monkeypatch.setattr(study, "_GIVE_UP", 1e9)
    p = PROBLEM
    query = (p.batch, p.heads, p.seqlen_q, p.head_dim)
    key = (p.batch, p.kv_heads, p.seqlen_k, p.head_dim)
    return tensors(query, key, key, dtype=torch.float16)


def tune() -> TuneResult:
    """A tune of the problem, by a process that computes before and after it."""
    x = torch.arange(1 << 20, device="cuda", dtype=torch.float64)
    before = x.square().sum()
    (result,) = autoflash.tune(PROBLEM, budget_s=BUDGET_S)
    assert torch.equal(x.square().sum(), before)
    torch.cuda.synchronize()
    with contextlib.closing(sqlite3.connect(settings().db_path)) as database:
        assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    return result


def stored_trials() -> dict[str, list[Trial]]:
    """By kernel, in the order in which they were stored."""
    found: dict[str, list[Trial]] = {}
    store = Store(settings().db_path, read_only=True)
    for trial in store.trials(Bucket.of(PROBLEM), current_target()):
        found.setdefault(trial.kernel, []).append(trial)
    return found


def assert_each_failed_as_planted() -> None:
    found = stored_trials()
    for name, (status, reason) in EXPECTED.items():
        (trial,) = found[name]
        assert (name, trial.status) == (name, status), trial.reason
        assert reason in trial.reason
        assert trial.measurement is None


def served(inputs: list[torch.Tensor]) -> str:
    """How the problem is served now; the result is held to the accuracy rule."""
    dispatch.forget()
    assert_accurate(*inputs, causal=True)
    explained = autoflash.explain(*inputs, causal=True)
    assert not explained.kernel.startswith("planted")
    return explained.how


def test_a_tune_survives_what_is_planted(plant: Plant, inputs: list[torch.Tensor]) -> None:
    assert set(plant("tests.planted")) == set(EXPECTED)
    result = tune()
    assert_each_failed_as_planted()
    assert result.seconds <= BUDGET_S + study._GRACE_S
    assert result.record is not None
    records = Store(settings().db_path, read_only=True).records()
    assert result.record in records
    assert {record.kernel for record in records} <= {"flash_fwd", "flash_fwd_ws"}
    assert served(inputs) == "tuned"
    assert autoflash.explain(*inputs, causal=True).config == dict(result.record.config)


def test_a_tune_that_nothing_survives(
    plant: Plant, inputs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = list(plant("tests.planted").values())
    monkeypatch.setattr(study, "kernels_for", lambda problem, target: planted)
    result = tune()
    assert_each_failed_as_planted()
    assert result.seconds <= BUDGET_S + study._GRACE_S
    assert (result.record, result.path, len(result.trials)) == (None, None, len(EXPECTED))
    assert Store(settings().db_path, read_only=True).records() == []
    assert served(inputs) == "default"


def test_a_finalist_that_crashes_late_is_not_crowned(
    plant: Plant, inputs: list[torch.Tensor]
) -> None:
    """It is the best of its kernel, and so a finalist, whatever its time."""
    plant("tests.planted.patient")
    result = tune()
    first, *others = stored_trials()["planted_patient"]
    assert first.status in (TrialStatus.ok, TrialStatus.noisy), first.reason
    if first.status is TrialStatus.noisy and any(t.status is TrialStatus.ok for t in result.trials):
        pytest.skip("another process kept it out of the finals")
    (last,) = others
    assert last.status is TrialStatus.crashed
    assert last.reason.startswith("in the finals: ")
    assert "illegal memory access" in last.reason
    assert last in result.trials
    assert result.seconds <= BUDGET_S + study._GRACE_S + _REPEATS_S
    assert result.record is not None
    records = Store(settings().db_path, read_only=True).records()
    assert {record.kernel for record in records} <= {"flash_fwd", "flash_fwd_ws"}
    assert served(inputs) == "tuned"


def test_a_tune_that_is_killed_goes_on_where_it_was(tmp_path: Path) -> None:
    """Kill -9 after the first, the fifth and the twelfth trial; what was stored isn't run again."""
    path = tmp_path / "killed.sqlite"
    problem = Problem.parse({"batch": 1, "heads": 2, "seqlen": 256, "head_dim": 64})
    command = [
        *(sys.executable, "-c", "from autoflash.cli import main; main()"),
        *("tune", "--db", str(path), "--json"),
        *("--heads", "2", "--seqlen", "256", "--head-dim", "64"),
    ]

    def trials() -> list[Trial]:
        if not path.exists():
            return []
        store = Store(path, read_only=True)
        return store.trials(Bucket.of(problem), current_target())

    for count in (1, 5, 12):
        tune = subprocess.Popen([*command, "--budget", "120"], stdout=subprocess.DEVNULL)
        while len(trials()) < count:
            assert tune.poll() is None, "it ended before it was killed"
            time.sleep(0.05)
        tune.kill()
        tune.wait()
        with contextlib.closing(sqlite3.connect(path)) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    before = trials()
    run = subprocess.run([*command, "--budget", "15"], capture_output=True, text=True, check=True)
    (result,) = json.loads(run.stdout)
    assert result["resumed"] >= len({t.config for t in before if t.status is TrialStatus.ok})
    after = trials()
    assert after[: len(before)] == before
    settled = {(t.kernel, t.config) for t in before if t.status is TrialStatus.ok}
    assert not settled & {(t.kernel, t.config) for t in after[len(before) :]}
    assert result["record"]["config"] in [dict(t.config) for t in after]
