"""Counting the calls that are not tuned, and writing the counts when a process ends.

CPU tensors stand in for a GPU's, and functions for what would launch."""

import json
import logging
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.runtime import dispatch, dispatch_bwd, missed
from autoflash.runtime.choose import Choice
from autoflash.runtime.dispatch import attention_fwd
from autoflash.runtime.dispatch_bwd import attention_bwd
from autoflash.settings import settings
from autoflash.store.missed import missed_path, read
from autoflash.target import named_target
from tests.runtime.stand_in import H100, Unloaded, gpu_in

H200 = named_target("h200")
FWD = Problem(
    batch=2, heads=4, kv_heads=2, seqlen_q=10, seqlen_k=12, head_dim=32, head_dim_v=16,
    dtype="float16", causal=True,
)  # fmt: skip
BWD = Problem(**{**FWD.as_dict(), "op": "bwd"})


def choice(how, op="fwd"):
    kernel = KERNELS[f"flash_{op}"]
    return Choice(kernel=kernel, config=kernel.default(FWD, H100), how=how, layer="", why="")


@pytest.fixture
def table(monkeypatch):
    """An empty table of counts, in a process that writes nothing when it ends."""
    table = {}
    monkeypatch.setattr(missed, "_calls", table)
    monkeypatch.setattr(missed, "_start", lambda: None)
    return table


@pytest.fixture
def noting(monkeypatch, table):
    monkeypatch.setenv("AUTOFLASH_NOTE_MISSED", "1")
    return table


def launch(stream, addresses):
    """What a launcher would have bound."""


def counts(table):
    """What would be written; looking empties it."""
    return {key: number for key, calls in table.items() if (number := calls.take())}


def written():
    noted, refusals = read(missed_path(settings().db_path))
    assert refusals == []
    return [(m.problem, m.target, m.calls) for m in noted]


# --- the wrapper


@pytest.mark.parametrize("how", ["tuned", "neighbour", "predicted", "default"])
def test_off_a_plan_runs_the_bound_function_itself(table, how):
    assert missed.counted(launch, choice(how), FWD, H100) is launch
    assert table == {}


def test_what_is_tuned_is_not_counted(noting):
    assert missed.counted(launch, choice("tuned"), FWD, H100) is launch
    assert noting == {}


@pytest.mark.parametrize("how", ["neighbour", "predicted", "default"])
def test_what_is_not_tuned_is_counted_and_runs(noting, how):
    launches = []
    run = missed.counted(lambda *call: launches.append(call), choice(how), FWD, H100)
    for stream in range(3):
        run(stream, (1, 2))
    assert launches == [(0, (1, 2)), (1, (1, 2)), (2, (1, 2))]
    assert counts(noting) == {(FWD, H100): 3}
    run(3, ())
    assert counts(noting) == {(FWD, H100): 1}
    assert counts(noting) == {}


def test_a_launch_that_fails_is_not_counted(noting):
    def fail(stream, addresses):
        raise RuntimeError("no launch")

    run = missed.counted(fail, choice("default"), FWD, H100)
    with pytest.raises(RuntimeError, match="no launch"):
        run(0, ())
    assert counts(noting) == {}


def test_plans_of_one_problem_share_a_count_and_gpus_do_not(noting):
    for target, calls in ((H100, 2), (H100, 3), (H200, 4)):
        run = missed.counted(launch, choice("default"), FWD, target)
        for _ in range(calls):
            run(0, ())
    assert counts(noting) == {(FWD, H100): 5, (FWD, H200): 4}


def test_threads_lose_no_count(noting):
    run = missed.counted(launch, choice("default"), FWD, H100)

    def work():
        for _ in range(20_000):
            run(0, ())

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts(noting) == {(FWD, H100): 160_000}


def test_a_full_table_takes_no_other_problem(noting, monkeypatch, caplog):
    monkeypatch.setattr(missed, "MAX_PROBLEMS", 2)
    problems = [Problem(**{**FWD.as_dict(), "batch": batch}) for batch in range(1, 5)]
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        runs = [missed.counted(launch, choice("default"), p, H100) for p in problems]
        again = missed.counted(launch, choice("default"), problems[0], H100)
    assert [run is launch for run in runs] == [False, False, True, True]
    again(0, ())
    assert counts(noting) == {(problems[0], H100): 1}
    (warning,) = caplog.records
    assert warning.getMessage() == "2 problems were called untuned: no more are noted"


def test_a_bad_setting_is_an_error(monkeypatch, table):
    monkeypatch.setenv("AUTOFLASH_NOTE_MISSED", "yes")
    with pytest.raises(InvalidInputError, match="AUTOFLASH_NOTE_MISSED='yes': must be 0 or 1"):
        missed.counted(launch, choice("default"), FWD, H100)


# --- both dispatchers


@pytest.fixture
def gpu(monkeypatch):
    """``gpu.how`` is how its kernels were chosen; ``gpu.launches`` counts what ran."""
    gpu = SimpleNamespace(how="default", launches=0)

    def bound(stream, addresses):
        gpu.launches += 1

    gpu.bound = bound

    def launcher_for(problem, target, access, device):
        kernel = KERNELS[f"flash_{problem.op}"]
        return Unloaded(kernel, lambda call: bound), choice(gpu.how, problem.op)

    with gpu_in([dispatch, dispatch_bwd], launcher_for, monkeypatch):
        yield gpu


def half(*shape):
    return torch.zeros(*shape, dtype=torch.half)


def forward(rows=10):
    q, k, v = half(2, 4, rows, 32), half(2, 2, 12, 32), half(2, 2, 12, 16)
    attention_fwd(q, k, v, 0.5, True, False, False)


def backward(rows=10):
    q, k, v = half(2, 4, rows, 32), half(2, 2, 12, 32), half(2, 2, 12, 16)
    out, dout, lse = half(2, 4, rows, 16), half(2, 4, rows, 16), torch.zeros(2, 4, rows)
    attention_bwd(dout, None, q, k, v, out, lse, 0.5, True, False, False, True, True)


def plans():
    return [plan for plans in dispatch._all_plans for plan in plans.values()]


@pytest.mark.parametrize("call", [forward, backward])
def test_off_the_dispatchers_keep_the_bound_function(gpu, table, call):
    call()
    assert [plan.run for plan in plans()] == [gpu.bound]
    assert (gpu.launches, table) == (1, {})


@pytest.mark.parametrize("call", [forward, backward])
def test_on_what_is_tuned_keeps_it_too(gpu, noting, call):
    gpu.how = "tuned"
    call()
    assert [plan.run for plan in plans()] == [gpu.bound]
    assert (gpu.launches, noting) == (1, {})


def test_on_each_call_of_both_ops_is_counted(gpu, noting):
    for _ in range(3):
        forward()
    for _ in range(2):
        backward()
    assert gpu.launches == 5
    assert counts(noting) == {(FWD, H100): 3, (BWD, H100): 2}
    # A tune drops the plans; what was counted stays.
    forward()
    dispatch.forget()
    gpu.how = "tuned"
    forward()
    assert gpu.launches == 7
    assert counts(noting) == {(FWD, H100): 1}


@pytest.mark.parametrize("call", [forward, backward])
def test_a_call_with_nothing_to_compute_misses_nothing(gpu, noting, call):
    call(rows=0)
    assert (gpu.launches, noting) == (0, {})


# --- writing


def test_flush_writes_what_is_new(noting):
    run = missed.counted(launch, choice("default"), FWD, H100)
    missed.counted(launch, choice("default"), BWD, H100)
    missed.flush(settings().db_path)
    # Nothing was called.
    assert list(settings().db_path.parent.iterdir()) == []
    run(0, ())
    run(0, ())
    missed.flush(settings().db_path)
    missed.flush(settings().db_path)
    assert written() == [(FWD, H100, 2)]
    run(0, ())
    missed.flush(settings().db_path)
    assert written() == [(FWD, H100, 2), (FWD, H100, 1)]


def test_a_file_that_can_not_be_written_costs_one_warning(noting, tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("mine")
    missed.counted(launch, choice("default"), FWD, H100)(0, ())
    with caplog.at_level(logging.WARNING, logger="autoflash"):
        missed.flush(blocked / "store.sqlite")
    (warning,) = caplog.records
    assert warning.getMessage().startswith(
        f"the calls that were not tuned are not noted: {blocked}/store.sqlite.missed.jsonl: can't "
    )
    assert blocked.read_text() == "mine"


PROCESS = """
import os, sys
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.runtime.choose import Choice
from autoflash.runtime.missed import counted
from autoflash.target import named_target

fields = dict(batch=2, heads=4, kv_heads=2, seqlen_q=10, seqlen_k=12, head_dim=32, head_dim_v=16,
              dtype="float16", causal=True)
target, kernel = named_target("h100"), KERNELS["flash_fwd"]

def plan(how="default", **changes):
    problem = Problem(**{**fields, **changes})
    config = kernel.default(problem, target)
    choice = Choice(kernel=kernel, config=config, how=how, layer="", why="")
    return counted(lambda stream, addresses: None, choice, problem, target)

def call(run, times):
    for _ in range(times):
        run(0, ())
"""


def process(text, **variables):
    """Run ``text`` after PROCESS in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", PROCESS + text], capture_output=True, text=True, check=False,
        timeout=300, env={**os.environ, "AUTOFLASH_NOTE_MISSED": "1", **variables},
    )  # fmt: skip


def test_a_process_writes_when_it_ends():
    """By an error, too; without SQLAlchemy; where the settings said when it noted first."""
    done = process(
        "call(plan(), 3)\n"
        "call(plan(op='bwd'), 4)\n"
        "call(plan(head_dim=64), 0)\n"
        "call(plan('tuned', head_dim=96), 5)\n"
        "os.environ['AUTOFLASH_DB'] = 'postgresql://elsewhere'\n"
        "assert 'sqlalchemy' not in sys.modules\n"
        "sys.modules['sqlalchemy'] = None\n"
        "raise SystemExit(3)\n"
    )
    assert (done.returncode, done.stderr) == (3, "")
    assert written() == [(FWD, H100, 3), (BWD, H100, 4)]
    lines = missed_path(settings().db_path).read_text().splitlines()
    assert json.loads(lines[0]) == {
        "problem": FWD.as_dict(),
        "target": {
            "vendor": "nvidia", "name": "NVIDIA H100 80GB HBM3", "arch": "sm_90",
            "sm_count": 132, "memory_gib": 80,
        },
        "calls": 3,
        "noted_at": json.loads(lines[1])["noted_at"],
    }  # fmt: skip
    assert not settings().db_path.exists()


def test_off_a_process_writes_nothing():
    done = process("call(plan(), 3)\n", AUTOFLASH_NOTE_MISSED="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert list(settings().db_path.parent.iterdir()) == []


def test_a_process_that_can_not_write_says_so_and_ends_well(tmp_path):
    (tmp_path / "file").write_text("")
    done = process("call(plan(), 1)\n", AUTOFLASH_DB=str(tmp_path / "file" / "store.sqlite"))
    assert done.returncode == 0
    assert done.stderr.startswith("the calls that were not tuned are not noted: ")
    assert done.stderr.count("\n") == 1


def test_a_forked_child_writes_its_own_calls_alone():
    done = process(
        "run = plan()\n"
        "call(run, 3)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    call(run, 20)\n"
        "    call(plan(head_dim=64), 2)\n"
        "    sys.exit(5)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5\n"
        "call(run, 100)\n"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [(problem.head_dim, calls) for problem, _, calls in written()] == [
        (32, 20), (64, 2), (32, 103),
    ]  # fmt: skip
