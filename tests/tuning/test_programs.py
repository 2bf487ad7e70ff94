"""tune() in a user's program: a script without a main guard, a REPL, a notebook, one that is
killed; and what is left alone there. Offline, with real workers."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from autoflash.problem import Bucket, Problem
from autoflash.settings import settings
from autoflash.store.store import Store
from autoflash.target import named_target
from autoflash.tuning.offline import tune_offline
from autoflash.tuning.progress import Budget, Listener
from autoflash.tuning.study import tune_one
from autoflash.tuning.tune import tune

H100 = named_target("h100")
PROBLEM = Problem(
    batch=1, heads=1, kv_heads=1, seqlen_q=16, seqlen_k=16, head_dim=16, head_dim_v=16,
    dtype="float16",
)  # fmt: skip
PATIENCE_S = 180

# Each statement fits a REPL's line. What it prints last is what tuning should have left alone.
PROGRAM = f"""
open("runs.txt", "a").write(__name__ + chr(10)) and None
import json, random, numpy, torch, autoflash
state = lambda: repr((random.getstate(), numpy.random.get_state(), torch.get_rng_state().tolist()))
before = state()
found = autoflash.tune(autoflash.Problem(**{PROBLEM.as_dict()}), target="h100", trials=1, budget_s=150)
same = state() == before
print(json.dumps([len(found), found[0].record.kind, same, torch.cuda.is_initialized()]))
"""  # noqa: E501

# What a notebook's kernel does: __main__ has no file, and an event loop runs.
NOTEBOOK = """
import asyncio, sys, types
main = types.ModuleType("__main__")
sys.modules["__main__"] = main
async def run(cell):
    exec(compile(cell, "<cell 1>", "exec"), main.__dict__)
asyncio.run(run(sys.stdin.read()))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_WORKERS", "1")
    return tmp_path


@pytest.mark.parametrize("way", ["script", "repl", "notebook"])
def test_tune_in_a_program_without_a_main_guard(folder, way):
    script = folder / "program.py"
    script.write_text(PROGRAM, encoding="utf-8")
    command, text = {
        "script": ([str(script)], ""),
        "repl": (["-i", "-q"], PROGRAM),
        "notebook": (["-c", NOTEBOOK], PROGRAM),
    }[way]
    done = subprocess.run(
        [sys.executable, *command], input=text, cwd=folder, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.replace(">>> ", "").strip()) == (0, "")
    assert json.loads(done.stdout) == [1, "predicted", True, False]
    # Once: no worker ran the program too.
    assert (folder / "runs.txt").read_text() == "__main__\n"
    (record,) = Store(settings().db_path, read_only=True).records()
    assert (record.problem, record.target, record.kind) == (PROBLEM, H100, "predicted")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python -m always looks there")
def test_workers_import_nothing_from_where_the_program_runs(folder):
    """The program lies elsewhere, as the command does: it doesn't see what is here, nor do they."""
    script = folder / "elsewhere" / "program.py"
    script.parent.mkdir()
    script.write_text(PROGRAM, encoding="utf-8")
    for name in ("random", "profile", "statistics"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name}.py was imported')\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [1, "predicted", True, False]


# --- a parent that is killed


def watch(pid):
    """Readable once that process has ended; needs no kinship."""
    return os.pidfd_open(pid)


def assert_ends(watched):
    assert select.select([watched], [], [], PATIENCE_S)[0]
    os.close(watched)


HANGING = """
import subprocess, sys, time
from autoflash.tuning import worker

def hang(message):
    tool = subprocess.Popen(["sleep", "3600"])
    print(tool.pid, flush=True)
    time.sleep(3600)

worker.start = hang
worker.main()
"""


def test_a_worker_that_hangs_dies_with_its_parent():
    """All that a killed parent leaves is a pipe without a writer."""
    with subprocess.Popen(
        [sys.executable, "-c", HANGING], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, start_new_session=True,
    ) as process:  # fmt: skip
        process.stdin.write(b'{"do": "start"}\n')
        process.stdin.flush()
        tool = watch(int(process.stderr.readline()))
        assert not select.select([tool], [], [], 0)[0]
        process.stdin.close()
        assert process.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        assert_ends(tool)


KILLED = f"""
import autoflash
from autoflash.tuning.progress import Listener

class Telling(Listener):
    def tried(self, trial, best_ms):
        print("tried", flush=True)

problem = autoflash.Problem(**{PROBLEM.as_dict()})
autoflash.tune(problem, target="h100", trials=24, budget_s=150, listener=Telling())
"""


def children(pid):
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(folder.name))
    return found


def test_a_program_that_is_killed_leaves_no_worker_and_the_next_goes_on(folder):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], cwd=folder, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "tried\n"
        workers = [watch(pid) for pid in children(process.pid)]
        process.kill()
    assert workers
    for worker in workers:
        assert_ends(worker)
    store = Store(settings().db_path)
    kept = store.trials(Bucket.of(PROBLEM), H100)
    assert kept
    assert store.records() == []
    (result,) = tune(PROBLEM, target="h100", trials=2, budget_s=PATIENCE_S)
    assert (result.resumed, len(result.trials)) == (len(kept), max(2, len(kept)))
    assert store.records() == [result.record]


# --- what is the user's


def random_states():
    return random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()


@pytest.mark.parametrize(
    ("study", "seconds"), [(tune_one, 600), (tune_one, 80), (tune_offline, 600)],
    ids=["brute force", "TPE", "offline"],
)  # fmt: skip
def test_a_study_draws_none_of_the_users_random_numbers(lab, store, study, seconds):
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    before = random_states()
    runner = lab.runner(lab.trials())
    result = study(lab.problem, runner, store, Budget(seconds=seconds, trials=None), Listener())
    assert len(result.trials) == 24
    assert random_states() == before
