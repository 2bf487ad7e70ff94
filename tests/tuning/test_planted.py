"""Planted kernels (tests/planted) without a GPU: each has its fault, and a tune survives those that
show while compiling. tests/gpu/test_survival.py has the rest."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoflash.codegen.render import render
from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS, kernels_for, kernels_to_test_with
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Bucket
from autoflash.runtime.choose import choose, default_choices
from autoflash.settings import settings
from autoflash.store.record import TrialStatus
from autoflash.store.store import Store
from autoflash.target import named_target
from autoflash.tuning import offline
from autoflash.tuning.job import Candidate
from autoflash.tuning.progress import Budget, Listener
from autoflash.tuning.runner import RecordedRunner, live_runners
from autoflash.tuning.study import tune_one
from autoflash.tuning.tune import tune
from tests.planted import PROBLEM

H200 = named_target("h200")
ROOT = Path(__file__).resolve().parents[2]
NAMES = (
    "planted_loop", "planted_late_write", "planted_abort", "planted_off_by_one", "planted_shared",
)  # fmt: skip

# --- the flag


def test_without_the_flag_nothing_is_planted(monkeypatch):
    assert kernels_to_test_with() == ()
    monkeypatch.setenv("AUTOFLASH_TEST_KERNELS", "")
    assert kernels_to_test_with() == ()
    assert not set(NAMES) & set(KERNELS)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("tests.no_such", "No module named 'tests.no_such'"),
        ("json", "module 'json' has no attribute 'KERNELS'"),
        (".planted", "the 'package' argument is required"),
    ],
)
def test_a_flag_that_names_no_kernels(monkeypatch, module, reason):
    monkeypatch.setenv("AUTOFLASH_TEST_KERNELS", module)
    with pytest.raises(InvalidInputError) as caught:
        kernels_to_test_with()
    start = f"AUTOFLASH_TEST_KERNELS={module!r}: must be a module with KERNELS ({reason}"
    assert str(caught.value).startswith(start)


PROBE = """
import json, sys
import autoflash
from autoflash.kernels import KERNELS
print(json.dumps([list(KERNELS), sorted(name for name in sys.modules if name.startswith("tests"))]))
"""


@pytest.mark.parametrize("module", [None, "tests.planted"])
def test_the_table_of_a_new_process(module):
    environment = {**os.environ, **({"AUTOFLASH_TEST_KERNELS": module} if module else {})}
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=environment, cwd=ROOT, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    names, imported = json.loads(done.stdout)
    planted = NAMES if module else ()
    assert names == [*KERNELS, *planted]
    assert imported == (["tests", "tests.planted"] if module else [])


def test_planted_kernels_are_candidates_and_never_served(plant):
    planted = plant("tests.planted")
    assert tuple(planted) == NAMES
    found = kernels_for(PROBLEM, H200)
    assert {kernel.name for kernel in found} == {"flash_fwd", "flash_fwd_ws", *NAMES}
    assert choose(PROBLEM, H200, ALIGNED).kernel.name not in NAMES
    assert not {c.kernel.name for c in default_choices(PROBLEM, H200, ALIGNED)} & set(NAMES)


def test_planted_kernels_are_tried_first(plant, lab, store):
    plant("tests.planted")
    runner = RecordedRunner(H200, lab.versions, [])
    tune_one(PROBLEM, runner, store, Budget(seconds=600, trials=7), Listener())
    assert {c.kernel.name for c in runner.asked} == {"flash_fwd", "flash_fwd_ws", *NAMES}


# --- the faults


def test_each_planted_kernel_in_a_real_compiler(plant):
    planted = plant("tests.planted")
    with live_runners(2, H200) as (runner,):
        compiling = {
            name: runner.compile(
                PROBLEM, Candidate(kernel=kernel, config=kernel.default(PROBLEM, H200))
            )
            for name, kernel in planted.items()
        }
        found = {name: outcome.result(timeout=180) for name, outcome in compiling.items()}
    status = {name: outcome.status for name, outcome in found.items()}
    ok = TrialStatus.ok
    assert status == {
        "planted_loop": ok,
        "planted_late_write": ok,
        "planted_abort": TrialStatus.crashed,
        "planted_off_by_one": ok,
        "planted_shared": TrialStatus.out_of_resources,
    }
    assert found["planted_abort"].reason == "the worker was killed by SIGABRT"
    shared = found["planted_shared"].resources.shared_bytes
    assert 300_000 < shared < 350_000
    assert found["planted_shared"].reason == (
        f"needs {shared} bytes of shared memory, NVIDIA H200 has {H200.shared_memory}"
    )
    for name in ("planted_loop", "planted_late_write", "planted_off_by_one"):
        assert found[name].resources.shared_bytes < 48_000
        assert found[name].resources.spills == 0


def test_the_loop_and_the_stray_write_are_in_the_binary(plant):
    """The compiler may not leave them out."""
    from autoflash.runtime.compiler import compile_config

    planted = plant("tests.planted") | plant("tests.planted.patient")
    code = {}
    for name in ("planted_loop", "planted_late_write", "planted_patient"):
        config = planted[name].default(PROBLEM, H200)
        (binary,) = compile_config(planted[name], PROBLEM, config, ALIGNED, H200)
        code[name] = binary.asm["ptx"]
    assert "ld.volatile.global" in code["planted_loop"]
    for name in ("planted_late_write", "planted_patient"):
        assert "atom.global" in code[name]
        assert str(1 << 46) in code[name]
    source = render(planted["planted_patient"], PROBLEM, config)
    assert "tl.atomic_add(launches, 1) >= 150:" in source.text
    assert KERNELS["planted_late_write"].harmless_launches == 19


def test_what_they_compute_in_the_interpreter():
    """One is right, as long as it is; the other's mask alone breaks the accuracy rule."""
    names = ("planted_late_write", "planted_off_by_one")
    done = subprocess.run(
        [sys.executable, "-m", "tests.planted.interpret", *names], cwd=ROOT, capture_output=True,
        text=True, check=True, env={**os.environ, "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    late, masked = map(json.loads, done.stdout.splitlines())
    elements = PROBLEM.heads * PROBLEM.seqlen_q * PROBLEM.head_dim
    assert (late["name"], late["reasons"]) == (names[0], [None] * 3)
    assert (late["launches"], late["written"]) == (3, elements)
    assert masked["name"] == names[1]
    assert [reason.split(":")[0] for reason in masked["reasons"]] == [
        "ragged", "outlier channels", "large logits",
    ]  # fmt: skip
    # Once it has been checked it does nothing: it would be the fastest.
    assert (masked["launches"], masked["written"]) == (3, 0)


# --- a tune


def test_a_tune_survives_a_compiler_that_aborts(plant, monkeypatch):
    planted = plant("tests.planted")
    tried = [KERNELS["flash_fwd"], planted["planted_abort"], planted["planted_shared"]]
    monkeypatch.setattr(offline, "kernels_for", lambda problem, target: tried)
    monkeypatch.setenv("AUTOFLASH_WORKERS", "2")
    (result,) = tune(PROBLEM, target="h200", trials=5, budget_s=300)
    found = {t.kernel: (t.status, t.reason) for t in result.trials}
    assert found["planted_abort"] == (TrialStatus.crashed, "the worker was killed by SIGABRT")
    assert found["planted_shared"][0] is TrialStatus.out_of_resources
    assert (len(result.trials), result.record.kernel) == (5, "flash_fwd")
    store = Store(settings().db_path, read_only=True)
    assert store.records() == [result.record]
    assert store.trials(Bucket.of(PROBLEM), H200) == result.trials


def test_a_tune_of_which_nothing_survives(plant, monkeypatch):
    planted = plant("tests.planted")
    tried = [planted["planted_abort"], planted["planted_shared"]]
    monkeypatch.setattr(offline, "kernels_for", lambda problem, target: tried)
    monkeypatch.setenv("AUTOFLASH_WORKERS", "1")
    (result,) = tune(PROBLEM, target="h200", budget_s=300)
    assert (result.record, result.path, len(result.trials)) == (None, None, 2)
    store = Store(settings().db_path, read_only=True)
    assert (store.records(), len(store.trials(Bucket.of(PROBLEM), H200))) == ([], 2)
    choice = choose(PROBLEM, H200, ALIGNED)
    assert (choice.how, choice.kernel.name in NAMES) == ("default", False)
