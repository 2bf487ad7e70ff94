"""tune() called from a program: a script without a main guard, a REPL, a notebook, a process that is
killed. Offline, with real workers."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoflash.problem import Problem
from autoflash.settings import settings
from autoflash.store.record import TrialStatus
from autoflash.store.store import Store
from autoflash.target import named_target
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
