"""The rendered sources, compared character by character with tests/golden/."""

import difflib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location(
        "update_golden", ROOT / "scripts" / "update_golden.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


golden = load_script()
TEXTS = golden.render_all()


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_the_rendered_source_is_the_golden_one(name):
    path = golden.GOLDEN / name
    accepted = path.read_text(encoding="utf-8") if path.exists() else ""
    if TEXTS[name] != accepted:
        diff = difflib.unified_diff(
            accepted.splitlines(keepends=True),
            TEXTS[name].splitlines(keepends=True),
            f"tests/golden/{name}",
            "rendered now",
        )
        pytest.fail(
            f"{name} is rendered otherwise than tests/golden holds it.\n{''.join(diff)}\n"
            "If that is what you meant, `make golden` accepts it.",
            pytrace=False,
        )


def test_every_golden_file_belongs_to_a_case():
    assert golden.stale(golden.GOLDEN, TEXTS) == []


def test_the_golden_cases_hold_every_variant():
    both = (False, True)
    hopper = {name for name in TEXTS if name.startswith("flash_fwd_ws_")}
    backward = {name for name in TEXTS if name.startswith("flash_bwd_")}
    fp8_hopper = {name for name in TEXTS if name.startswith("flash_fwd_fp8_ws_")}
    fp8 = {name for name in TEXTS if name.startswith("flash_fwd_fp8_")} - fp8_hopper
    portable = set(TEXTS) - hopper - backward - fp8 - fp8_hopper
    kinds = {("_tma" in name, "_causal" in name) for name in portable}
    assert kinds == {(tma, causal) for tma in both for causal in both}
    kinds = {("_direct" in name, "_dynamic" in name) for name in hopper}
    assert kinds == {(direct, dynamic) for direct in both for dynamic in both}
    assert {"_causal" in name for name in backward} == set(both)
    layouts = {"rows": "d", "columns": "columns", "permuted": "permuted"}
    assert all(any(word in name for name in fp8) for word in layouts.values())
    assert {name.removeprefix("flash_fwd_fp8_")[:8] for name in fp8} >= {"fp8_fp16", "bf16_fp8"}
    assert {"_rows" in name for name in fp8_hopper} == set(both)
    assert {"_direct" in name for name in fp8_hopper} == set(both)
    assert {"_dynamic" in name for name in fp8_hopper} == set(both)
    for kernel in (hopper, portable, backward):
        names = {re.sub("^flash_(fwd|bwd)(_ws|_split)?_", "", name) for name in kernel}
        assert {name[:4] for name in names} == {"fp16", "bf16"}


def test_a_changed_source_fails_with_a_diff_and_the_way_out(monkeypatch):
    name = sorted(TEXTS)[0]
    monkeypatch.setitem(TEXTS, name, TEXTS[name].replace("import torch\n", "import numpy\n"))
    with pytest.raises(pytest.fail.Exception) as failure:
        test_the_rendered_source_is_the_golden_one(name)
    lines = str(failure.value).splitlines()
    assert f"--- tests/golden/{name}" in lines
    assert "-import torch" in lines
    assert "+import numpy" in lines
    assert "`make golden` accepts it" in lines[-1]


def test_the_script_writes_removes_and_checks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(golden, "GOLDEN", tmp_path)
    (tmp_path / "gone.py").write_text("old")
    changed = sorted(TEXTS)[0]
    (tmp_path / changed).write_text("old")

    monkeypatch.setattr(sys, "argv", ["update_golden.py", "--check"])
    assert golden.main() == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["gone.py", changed])
    assert (tmp_path / changed).read_text() == "old"

    monkeypatch.setattr(sys, "argv", ["update_golden.py"])
    assert golden.main() == 0
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == TEXTS
    lines = capsys.readouterr().out.splitlines()
    assert "removed   gone.py" in lines
    assert f"changed   {changed}" in lines

    monkeypatch.setattr(sys, "argv", ["update_golden.py", "--check"])
    assert golden.main() == 0


def test_the_script_runs_from_any_folder(tmp_path):
    script = str(ROOT / "scripts" / "update_golden.py")
    done = subprocess.run(
        [sys.executable, script, "--check"], cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{len(TEXTS)} golden files, 0 would change\n")
