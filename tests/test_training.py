"""The training script, on the CPU and tiny."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "train_transformer.py"


def test_autoflash_trains_like_torch(tmp_path):
    out = tmp_path / "training.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "4", "--layers", "1", "--dim", "64", "--batch",
         "1", "--seqlen", "32", "--attentions", "math,autoflash", "--out", str(out)],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    math, autoflash = json.loads(out.read_text())["rows"]
    assert (math["attention"], autoflash["attention"]) == ("math", "autoflash")
    assert len(math["loss"]) == 4
    assert math["loss"][-1] < math["loss"][0]
    assert autoflash["loss"] == pytest.approx(math["loss"], abs=5e-3)
    assert "autoflash - math: mean" in done.stdout
