"""The ``autoflash`` command: what it prints, what it stores, and how it ends."""

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autoflash import cli
from autoflash.codegen.render import render
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.settings import settings
from autoflash.space import Config
from autoflash.store.missed import append, missed_path, read
from autoflash.store.record import Measurement, MissedCalls, Provenance, TuningRecord
from autoflash.store.shipped import all_shipped_records
from autoflash.store.store import Store
from autoflash.target import named_target
from autoflash.version import VERSION

H100, H200 = named_target("h100"), named_target("h200")
KERNEL = KERNELS["flash_fwd"]
PROBLEM = Problem(
    batch=1, heads=2, kv_heads=2, seqlen_q=32, seqlen_k=32, head_dim=64, head_dim_v=64,
    dtype="float16",
)  # fmt: skip
FLAGS = ["--heads", "2", "--seqlen", "32", "--head-dim", "64", "--dtype", "fp16"]


@dataclasses.dataclass
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def told(self):
        """Standard error as one line, however wide the terminal is."""
        return " ".join(self.err.split())


def autoflash(*words):
    """Run the command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["autoflash", *map(str, words)])
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            pytest.raises(SystemExit) as caught,
        ):
            cli.main()
    return Done(caught.value.code or 0, out.getvalue(), err.getvalue())


def squeezed(text):
    """Without spaces, line ends and frames: a table may break a long path anywhere."""
    return "".join(c for c in text if c.isprintable() and not c.isspace() and c not in "│╭╮╰╯─")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


# --- a real tune, for a GPU that isn't here


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, kernel_folder):
    db = tmp_path_factory.mktemp("tuned") / "store.sqlite"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOFLASH_CACHE_DIR", str(kernel_folder))
        patch.setenv("AUTOFLASH_ORIGIN", "test")
        done = autoflash(
            "tune", *FLAGS, "--target", "h100", "--trials", 2, "--budget", 300, "--db", db, "--json"
        )
    return db, done


def test_tune_prints_json(tuned, kernel_folder):
    db, done = tuned
    assert (done.code, done.err) == (0, "")
    (result,) = done.json
    assert result["problem"] == PROBLEM.as_dict()
    assert result["target"] == "NVIDIA H100 80GB HBM3"
    assert result["trials"] == {"predicted": 2}
    assert result["space"] == sum(
        len(k.space.configs(PROBLEM, H100))
        for k in KERNELS.values()
        if k.op == PROBLEM.op and not k.fp8
    )
    assert (result["resumed"], result["interrupted"]) == (0, False)
    record = result["record"]
    assert (record["kind"], record["kernel"]) == ("predicted", "flash_fwd")
    assert record["measurement"]["method"] == "model"
    assert record["provenance"]["origin"] == "test"
    assert record["provenance"]["autoflash"] == VERSION
    config = KERNEL.space.parse(record["config"])
    source = render(KERNEL, PROBLEM, config)
    assert result["path"] == str(kernel_folder / f"{source.name}.py")
    assert Path(result["path"]).read_text(encoding="utf-8") == source.text

    (stored,) = Store(db, read_only=True).records()
    assert (stored.problem, stored.target, stored.kind) == (PROBLEM, H100, "predicted")
    assert stored.config == config
    assert stored.measurement.median_ms == record["measurement"]["median_ms"]
    flops, ms = PROBLEM.flops, stored.measurement.median_ms
    assert record["tflops"] == round(flops / ms * 1e-9, 1)


def test_list_and_show_after_it(tuned):
    db, done = tuned
    (record,) = autoflash("list", "--db", db, "--json").json
    assert record == done.json[0]["record"]
    (shown,) = autoflash("show", "--db", db, "--json").json
    assert shown == record | {"path": done.json[0]["path"]}
    table = autoflash("list", "--db", db)
    assert table.code == 0
    for word in ("NVIDIA H100 80GB HBM3", "flash_fwd", "predicted", "d64"):
        assert squeezed(word) in squeezed(table.out)


def test_show_prints_the_emitted_path(tuned):
    db, done = tuned
    path = done.json[0]["path"]
    shown = autoflash("show", "--db", db)
    assert shown.code == 0
    assert squeezed(path) in squeezed(shown.out)
    assert PROBLEM.label() in shown.out
    assert "predicted" in shown.out
    with_source = autoflash("show", "--db", db, "--source")
    assert Path(path).read_text(encoding="utf-8") in with_source.out


def test_the_entry_point_in_a_process_of_its_own(tmp_path):
    """Tables instead of JSON, problems from a file, the store where AUTOFLASH_DB says."""
    file = tmp_path / "problems.yaml"
    fields = "heads: 2, seqlen: 32, head_dim: 64, dtype: fp16"
    file.write_text(f"- {{batch: 1, {fields}}}\n- {{batch: [1, 8], {fields}}}\n", encoding="utf-8")
    command = "import sys; from autoflash.cli import main; main()"
    words = ["tune", "--file", str(file), "--target", "h100", "--trials", "1"]
    done = subprocess.run(
        [sys.executable, "-c", command, *words],
        capture_output=True, text=True, check=False, timeout=200,
        env={**os.environ, "AUTOFLASH_WORKERS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for word in ("predicted", "flash_fwd", "b1 h2 s32 d64", "b8 h2 s32 d64", "emitted: "):
        assert squeezed(word) in squeezed(done.stdout)
    records = Store(settings().db_path, read_only=True).records()
    assert sorted(r.problem.batch for r in records) == [1, 8]
    assert {(r.target.name, r.kind) for r in records} == {(H100.name, "predicted")}


# --- what tune is asked for


@pytest.fixture
def asked(monkeypatch):
    """Calls of tune() that the command makes; nothing is tuned."""
    calls = []

    def record(problems, **options):
        calls.append({"problems": problems, **options})

    monkeypatch.setattr("autoflash.tuning.tune.tune", record)
    return calls


def problem(**changes):
    fields = {
        "batch": 1, "heads": 16, "kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096,
        "head_dim": 128, "head_dim_v": 128, "dtype": "bfloat16", "causal": False,
    }  # fmt: skip
    return Problem(**{**fields, **changes})


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--heads 16 --seqlen 4k --head-dim 128", [problem()]),
        (
            "--batch 1,8 --heads 16 --kv-heads 4 --seqlen 1k,4k --head-dim 128 --causal",
            [
                problem(batch=b, kv_heads=4, seqlen_q=s, seqlen_k=s, causal=True)
                for b in (1, 8)
                for s in (1024, 4096)
            ],
        ),
        (
            "--heads 16 --seqlen-q 1 --seqlen-k 4k --head-dim 192 --head-dim-v 128 --dtype half",
            [problem(seqlen_q=1, head_dim=192, dtype="float16")],
        ),
        (
            "--heads 16 --seqlen 4k --head-dim 128 --dtype fp8",
            [problem(dtype="float8_e4m3fn", scales="head")],
        ),
        (
            "--heads 16 --seqlen 4k --head-dim 128 --kv-dtype fp8 --scales tensor,block "
            "--v-layout columns",
            [
                problem(kv_dtype="float8_e4m3fn", scales=scales, v_layout="columns")
                for scales in ("tensor", "block")
            ],
        ),
        (
            "--heads 16 --seqlen 4k --head-dim 128 --dtype fp8 --out-dtype fp16,bf16",
            [
                problem(dtype="float8_e4m3fn", scales="head", out_dtype=out)
                for out in ("float16", "")
            ],
        ),
        ("--heads 16 --seqlen 4k --head-dim 128 --no-causal", [problem()]),
        ("--heads 16,16 --seqlen 4k,4096 --head-dim 128", [problem()]),
    ],
)
def test_flags(asked, words, expected):
    done = autoflash("tune", *words.split())
    assert (done.code, done.err) == (0, "")
    (call,) = asked
    # Which field varies fastest is nobody's business.
    assert len(call["problems"]) == len(expected)
    assert set(call["problems"]) == set(expected)
    assert (call["target"], call["budget_s"], call["trials"]) == (None, None, None)
    assert call["store"].path == settings().db_path


def test_options(asked, tmp_path):
    db = tmp_path / "my.sqlite"
    words = ["--target", "mi300x", "--budget", "12.5", "--trials", "7", "--db", db]
    assert autoflash("tune", *FLAGS, *words).code == 0
    (call,) = asked
    assert call["problems"] == [PROBLEM]
    assert (call["target"], call["budget_s"], call["trials"]) == ("mi300x", 12.5, 7)
    assert call["store"].path == db


def test_problems_from_a_file(asked, tmp_path):
    file = tmp_path / "problems.yaml"
    file.write_text(
        "problems:\n"
        "  - {batch: [1, 8], heads: 16, seqlen: 4k, head_dim: 128}\n"
        "  - {batch: 8, heads: 16, seqlen: 4k, head_dim: 128, causal: true}\n",
        encoding="utf-8",
    )
    assert autoflash("tune", "--file", file).code == 0
    assert asked[0]["problems"] == [problem(), problem(batch=8), problem(batch=8, causal=True)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [],
            [
                problem(heads=32, kv_heads=8, seqlen_q=s, seqlen_k=s, causal=True)
                for s in (1024, 4096, 16384)
            ],
        ),
        (
            ["--seqlens", "2k", "--kv-dtype", "fp8"],
            [
                problem(heads=32, kv_heads=8, seqlen_q=2048, seqlen_k=2048, causal=True,
                        kv_dtype="float8_e4m3fn", scales="head")
            ],
        ),
        (
            ["--seqlens", "2k", "--batch", "1,4", "--dtype", "fp16", "--no-causal"],
            [
                problem(batch=b, heads=32, kv_heads=8, seqlen_q=2048, seqlen_k=2048,
                        dtype="float16")
                for b in (1, 4)
            ],
        ),
    ],
)  # fmt: skip
def test_problems_of_a_model(asked, tmp_path, words, expected):
    config = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    for given in (path, tmp_path):
        assert autoflash("tune", "--model-config", given, *words).code == 0
    assert [call["problems"] for call in asked] == [expected, expected]


# --- what was called untuned

DATE = "2025-03-01T12:30:00+00:00"


@pytest.fixture
def noted():
    """Notes problems as called on an H100: (problem, calls), …; returns the file."""

    def note(*counted, db=None):
        path = missed_path(db or settings().db_path)
        calls = [MissedCalls(problem=p, target=H100, calls=n, noted_at=DATE) for p, n in counted]
        append(path, calls)
        return path

    return note


def test_missed_tunes_the_most_called_first(asked, noted):
    backward = problem(op="bwd")
    noted((PROBLEM, 2), (problem(), 3))
    path = noted((backward, 4), (PROBLEM, 5))
    words = ["--target", "h100", "--budget", "5", "--trials", "7"]
    done = autoflash("tune", "--missed", *words)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        "called untuned on NVIDIA H100 80GB HBM3, the most called first: 3 to tune\n"
    )
    (call,) = asked
    assert call["problems"] == [PROBLEM, backward, problem()]
    assert (call["target"], call["budget_s"], call["trials"]) == ("h100", 5.0, 7)
    assert call["store"].path == settings().db_path
    # The file stays, its lines merged.
    noted_now = [(m.problem, m.calls) for m in read(path)[0]]
    assert noted_now == [(PROBLEM, 7), (backward, 4), (problem(), 3)]
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("op", "expected"), [("fwd", ["fwd"]), ("bwd", ["bwd"]), ("fwd,bwd", ["bwd", "fwd"])]
)
def test_missed_of_an_op(asked, noted, op, expected):
    noted((PROBLEM, 2), (replace(PROBLEM, op="bwd"), 3))
    assert autoflash("tune", "--missed", "--op", op, "--target", "h100").code == 0
    assert [one.op for one in asked[0]["problems"]] == expected


def test_missed_goes_by_the_store_that_is_named(asked, noted, tmp_path):
    db = tmp_path / "my.sqlite"
    noted((WIDE, 9))
    noted((PROBLEM, 2), (LONG, 1), db=db)
    Store(db).add_record(record(target=H100))
    done = autoflash("tune", "--missed", "--target", "h100", "--db", db, "--json")
    assert (done.code, done.json) == (0, [])
    assert [call["problems"] for call in asked] == [[LONG]]
    assert asked[0]["store"].path == db


def test_missed_on_the_gpu_that_is_here(asked, noted, monkeypatch):
    noted((PROBLEM, 2))
    monkeypatch.setattr("autoflash.tuning.tune.gpu_is_present", lambda: True)
    monkeypatch.setattr("autoflash.tuning.tune._present", lambda: H100)
    assert autoflash("tune", "--missed").code == 0
    assert (asked[0]["problems"], asked[0]["target"]) == ([PROBLEM], None)


def test_nothing_was_missed(asked):
    done = autoflash("tune", "--missed", "--target", "h100")
    path = missed_path(settings().db_path)
    assert (done.code, done.err) == (0, "")
    assert done.out == (
        f"nothing was missed: no {path}; serving writes it with AUTOFLASH_NOTE_MISSED=1\n"
    )
    done = autoflash("tune", "--missed", "--target", "h100", "--json")
    assert (done.code, done.json, done.err) == (0, [], "")
    assert asked == []
    assert list(path.parent.iterdir()) == []


@pytest.mark.parametrize("words", [["--target", "h200"], ["--target", "h100", "--op", "bwd"]])
def test_nothing_is_left_to_tune(asked, noted, words):
    path = noted((PROBLEM, 2))
    noted((PROBLEM, 3))
    gpu = "NVIDIA H200" if "h200" in words else "NVIDIA H100 80GB HBM3"
    done = autoflash("tune", "--missed", *words)
    assert (done.code, done.err) == (0, "")
    assert done.out == f"nothing to tune: {path} has no calls on {gpu} that are still untuned\n"
    assert asked == []
    assert [m.calls for m in read(path)[0]] == [5]


def test_missed_and_then_tuned_is_done(asked, noted):
    noted((PROBLEM, 2))
    Store(settings().db_path).add_record(record(target=H100))
    done = autoflash("tune", "--missed", "--target", "h100")
    assert (done.code, done.out.startswith("nothing to tune: ")) == (0, True)
    assert asked == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (FLAGS, "--heads"),
        (["--batch", "1"], "--batch"),
        (["--seqlen-q", "4"], "--seqlen-q"),
        (["--dtype", "fp16"], "--dtype"),
        (["--no-causal"], "--causal"),
        (["--file", "x.yaml"], "--file"),
        (["--model-config", "x"], "--model-config"),
        (["--seqlens", "1k"], "--seqlens"),
    ],
)
def test_missed_stands_alone(asked, noted, words, option):
    noted((PROBLEM, 2))
    done = autoflash("tune", "--missed", *words, "--target", "h100")
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"error: --missed takes the problems that were called untuned: leave out {option}\n"
    )
    assert asked == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "error: no GPU is visible to torch: name a target, such as --target h100"),
        (["--target", "v100"], "error: unknown target 'v100': known are a100, "),
        (["--target", "h100", "--op", "both"], "error: --op 'both': must name fwd, bwd or both"),
    ],
)
def test_missed_is_refused(asked, noted, no_gpu, words, message):
    noted((PROBLEM, 2))
    done = autoflash("tune", "--missed", *words)
    assert (done.code, done.out) == (2, "")
    assert done.told.startswith(message)
    assert asked == []


def test_a_file_of_missed_calls_that_can_not_be_merged_is_no_hindrance(asked, noted, monkeypatch):
    path = noted((PROBLEM, 2))
    path.with_name(path.name + ".lock").unlink(missing_ok=True)
    path.with_name(path.name + ".lock").mkdir()
    done = autoflash("tune", "--missed", "--target", "h100")
    assert done.code == 0
    assert done.told.startswith(f"warning: {path}: can't be written: ")
    assert asked[0]["problems"] == [PROBLEM]


def test_missed_is_tuned_for_real(noted, tmp_path):
    """Offline: what is predicted is still to be timed, so it stays missed."""
    db = tmp_path / "s.sqlite"
    noted((PROBLEM, 2), db=db)
    words = ["--missed", "--target", "h100", "--trials", 1, "--budget", 300, "--db", db, "--json"]
    (result,) = autoflash("tune", *words).json
    assert (result["problem"], result["trials"]) == (PROBLEM.as_dict(), {"predicted": 1})
    (result,) = autoflash("tune", *words).json
    assert result["record"]["kind"] == "predicted"


# --- how it ends


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads x --seqlen 4 --head-dim 64", "heads='x': must be a whole number such as 4096"),
        ("--heads 2 --seqlen 4.5k --head-dim 64", "='4.5k': must be a whole number such as 4096"),
        ("--heads 2 --seqlen 4 --head-dim 300", "head_dim=300: the largest that is served is 256"),
        ("--heads 3 --kv-heads 2 --seqlen 4 --head-dim 64", "heads=3 is not a multiple of kv_he"),
        ("--heads 2 --seqlen 4 --head-dim 64 --dtype int8", "dtype='int8': must be one of float1"),
        ("--heads 2 --head-dim 64", "problem field 'seqlen_"),
        ("--seqlen 4", "' is missing"),
        ("--heads 2 --seqlen 0 --head-dim 64", "there is nothing to compute, nor to tune"),
        ("--heads 2 --seqlen 4 --head-dim 64 --budget 0", "budget of 0.0 s: must be more than 0"),
        ("--heads 2 --seqlen 4 --head-dim 64 --trials 0", "budget of 0 trials: must be at least 1"),
        ("--heads 2 --seqlen 4 --head-dim 64 --target v100", "unknown target 'v100': known are a1"),
        ("--target h100", "give one of: flags (--heads 16 --seqlen 4k --head-dim 128), --file,"),
        ("--target h100", "--file, --model-config, --missed"),
        ("--heads 2 --file x.yaml", "give one of: flags (--heads 16 --seqlen 4k --head-dim 128)"),
        ("--file x.yaml --model-config y", "give one of: flags (--heads 16 --seqlen 4k --head-di"),
        ("--file /nowhere/x.yaml", "/nowhere/x.yaml can't be read: "),
        ("--model-config /nowhere", "/nowhere can't be read: "),
        ("--heads 2 --seqlen 4 --head-dim 64 --dtype fp32 --target h100", "float32 is not served"),
    ],
)
def test_bad_flags(words, message, no_gpu):
    done = autoflash("tune", *words.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert squeezed(message) in squeezed(done.err)
    assert "Traceback" not in done.err


def test_an_error_is_one_line(no_gpu):
    done = autoflash("tune", *FLAGS, "--trials", "-1")
    assert done.err == "error: budget of -1 trials: must be at least 1\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tune", "--nope", "1"], "No such option"),
        (["tune", "--trials", "x"], "Invalid value for '--trials'"),
        (["tune", "--budget", "soon"], "Invalid value for '--budget'"),
        (["dance"], "No such command 'dance'"),
    ],
)
def test_usage_errors(words, message):
    done = autoflash(*words)
    assert done.code == 2
    assert message in done.told
    assert "Traceback" not in done.err


def test_help():
    done = autoflash("--help")
    assert done.code == 0
    for command in ("tune", "list", "show", "bench", "doctor"):
        assert command in done.out
        assert autoflash(command, "--help").code == 0
    assert autoflash().code == 2


@pytest.mark.parametrize(
    ("flags", "ops"),
    [((), ["fwd"]), (("--op", "bwd"), ["bwd"]), (("--op", "fwd,bwd"), ["fwd", "bwd"])],
)
def test_tune_takes_ops(monkeypatch, tmp_path, flags, ops):
    asked = []
    monkeypatch.setattr(
        "autoflash.tuning.tune.tune", lambda problems, **others: asked.extend(problems)
    )
    assert autoflash("tune", *FLAGS, *flags, "--db", tmp_path / "s.sqlite").code == 0
    assert asked == [replace(PROBLEM, op=op) for op in ops]


@pytest.mark.parametrize("ops", [",", "both", "fwd,both"])
def test_tune_refuses_other_ops(ops):
    done = autoflash("tune", *FLAGS, "--op", ops)
    assert done.code == 2
    assert "op" in done.err


def test_tune_of_the_backward_for_a_gpu_that_is_not_here(tmp_path):
    done = autoflash(
        "tune", *FLAGS, "--op", "bwd", "--target", "a100", "--trials", 1, "--budget", 300,
        "--db", tmp_path / "s.sqlite", "--json",
    )  # fmt: skip
    (result,) = done.json
    assert result["problem"]["op"] == "bwd"
    assert sum(result["trials"].values()) == 1


def test_tune_without_a_gpu_wants_a_target(no_gpu):
    done = autoflash("tune", *FLAGS)
    assert done.code == 2
    assert done.told == "error: no GPU is visible to torch: name a target, such as --target h100"


def test_bench_without_a_gpu(no_gpu):
    done = autoflash("bench", "--seqlen", "64", "--head-dim", "64")
    assert (done.code, done.out) == (2, "")
    assert done.told == "error: no GPU is visible to torch: there is nothing to time"


def test_bench_checks_its_flags_first(no_gpu):
    done = autoflash("bench", "--head-dim", "300")
    assert done.code == 2
    assert done.told.startswith("error: head_dim=300: ")


def test_a_bug_is_not_hidden(monkeypatch):
    def broken(problems, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("autoflash.tuning.tune.tune", broken)
    monkeypatch.setattr(sys, "argv", ["autoflash", "tune", *FLAGS])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        cli.main()


# --- list and show


def record(problem=PROBLEM, target=H200, ms=0.5, **config):
    return TuningRecord(
        problem=problem,
        target=target,
        kernel=KERNEL.name,
        config=KERNEL.space.parse({**KERNEL.default(problem, target), **config}),
        measurement=Measurement(
            median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=40, method="events", noisy=False
        ),
        provenance=Provenance(created_at="2025-03-01T12:30:00+00:00", origin="host-a"),
        kind="measured",
    )


LONG = dataclasses.replace(PROBLEM, seqlen_q=4096, seqlen_k=4096, causal=True)
WIDE = dataclasses.replace(PROBLEM, head_dim=128, head_dim_v=128, dtype="bfloat16")


@pytest.fixture
def stored():
    store = Store(settings().db_path)
    for one in (record(), record(LONG), record(WIDE), record(target=H100)):
        store.add_record(one)
    return store


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], 4),
        (["--target", "h200"], 3),
        (["--target", "H100"], 1),
        (["--target", "NVIDIA H200"], 3),
        (["--target", "a100"], 0),
    ],
)
def test_list_of_a_target(stored, words, expected):
    done = autoflash("list", "--json", *words)
    assert (done.code, len(done.json)) == (0, expected)


def test_list_of_nothing():
    done = autoflash("list", "--json")
    assert (done.code, done.json) == (0, [])
    assert "no records: `autoflash tune` makes some" in autoflash("list").out
    assert not settings().db_path.exists()


def test_list_of_what_ships():
    done = autoflash("list", "--shipped", "--json")
    assert (done.code, len(done.json)) == (0, len(all_shipped_records()))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], [PROBLEM, PROBLEM, LONG, WIDE]),
        (["--seqlen", "4k"], [LONG]),
        (["--head-dim", "128"], [WIDE]),
        (["--causal"], [LONG]),
        (["--no-causal", "--target", "h200"], [PROBLEM, WIDE]),
        (["--dtype", "bf16"], [WIDE]),
        (["--target", "h100"], [PROBLEM]),
    ],
)
def test_show_filters(stored, words, expected):
    found = [Problem(**one["problem"]) for one in autoflash("show", "--json", *words).json]
    assert sorted(map(Problem.label, found)) == sorted(map(Problem.label, expected))


def test_show_says_all_there_is(stored):
    (one,) = autoflash("show", "--causal", "--json").json
    assert Path(one["path"]).is_file()
    text = squeezed(autoflash("show", "--causal").out)
    for word in (
        "NVIDIA H200", "sm_90", "132 SMs", "0.5000 ms", "40 repeats by events", "measured",
        "2025-03-01", "host-a", one["path"], *(f"{k}={v}" for k, v in one["config"].items()),
        "pipeline", *KERNEL.pipeline(Problem(**one["problem"]), Config(**one["config"])),
    ):  # fmt: skip
        assert squeezed(word) in text


@pytest.mark.parametrize("words", [["--head-dim", "96"], ["--target", "mi300x"]])
def test_show_of_nothing(stored, words):
    done = autoflash("show", *words)
    assert (done.code, done.told) == (2, "error: no record matches: see `autoflash list`")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--seqlen", "x"], "error: seqlen='x': must be a whole number such as 4096 or 4k"),
        (
            ["--dtype", "int8"],
            "error: dtype='int8': must be one of float16, bfloat16, float32, float8_e4m3fn",
        ),
    ],
)
def test_show_checks_its_flags(words, message):
    done = autoflash("show", *words)
    assert (done.code, done.told) == (2, message)


@pytest.mark.parametrize("command", ["list", "show"])
def test_a_broken_store_is_an_error(command):
    settings().db_path.write_bytes(b"hello" * 99)
    done = autoflash(command)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert squeezed(str(settings().db_path)) in squeezed(done.err)


# --- doctor


def test_doctor_without_a_gpu(no_gpu):
    done = autoflash("doctor", "--json")
    assert done.code == 0
    findings = {one["subject"]: one for one in done.json}
    assert set(findings) == {"versions", "gpu", "compiler", "shipped", "store", "kernel files"}
    assert findings["gpu"]["state"] == "warning"
    assert "tune needs --target" in findings["gpu"]["text"]
    assert f"autoflash {VERSION}" in findings["versions"]["text"]
    assert findings["store"] == {
        "state": "ok", "subject": "store",
        "text": f"{settings().db_path} is not there yet: the first tune makes it",
    }  # fmt: skip
    assert findings["kernel files"]["text"] == str(settings().cache_dir)
    assert not settings().db_path.exists()
    table = autoflash("doctor")
    assert table.code == 0
    for one in done.json:
        assert squeezed(one["text"]) in squeezed(table.out) or len(one["text"]) > 60


def test_doctor_counts_the_records(stored):
    (store,) = [one for one in autoflash("doctor", "--json").json if one["subject"] == "store"]
    assert store["text"] == f"{settings().db_path}, 4 records"


def test_doctor_looks_at_the_sites_database(stored, monkeypatch, tmp_path):
    site = tmp_path / "site.sqlite"
    monkeypatch.setenv("AUTOFLASH_SITE_DB", str(site))
    findings = {one["subject"]: one for one in autoflash("doctor", "--json").json}
    assert findings["site"]["state"] == "error"
    assert findings["site"]["text"] == f"{site}: is not there; AUTOFLASH_SITE_DB names it"
    settings().db_path.rename(site)
    findings = {one["subject"]: one for one in autoflash("doctor", "--json").json}
    assert findings["site"]["text"] == f"{site}, 4 records"
    assert findings["store"]["text"].endswith("is not there yet: the first tune makes it")


def test_doctor_says_what_lies_across_a_network(stored, monkeypatch, tmp_path):
    table = tmp_path / "mountinfo"
    table.write_text("1 1 0:1 / / rw - nfs4 server:/x rw\n", encoding="utf-8")
    monkeypatch.setattr("autoflash.store.mounts._MOUNTS", table)
    (store,) = [one for one in autoflash("doctor", "--json").json if one["subject"] == "store"]
    assert store["text"] == f"{settings().db_path}, 4 records, on nfs4 (across a network)"


def test_doctor_says_who_else_may_change_the_store(stored):
    settings().db_path.chmod(0o666)
    states = [
        (one["state"], "world-writable" in one["text"])
        for one in autoflash("doctor", "--json").json
        if one["subject"] == "store"
    ]
    assert states == [("warning", True), ("ok", False)]


def test_doctor_finds_what_is_broken(monkeypatch, no_gpu, tmp_path):
    settings().db_path.write_bytes(b"hello" * 99)
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", str(blocked / "kernels"))
    monkeypatch.setenv("PATH", str(tmp_path))
    findings = {one["subject"]: one for one in autoflash("doctor", "--json").json}
    assert findings["store"]["state"] == "error"
    assert str(settings().db_path) in findings["store"]["text"]
    assert findings["compiler"]["state"] == "error"
    assert findings["kernel files"]["state"] == "warning"
    assert "set AUTOFLASH_CACHE_DIR" in findings["kernel files"]["text"]


def test_doctor_survives_bad_settings(monkeypatch, no_gpu):
    monkeypatch.setenv("AUTOFLASH_WORKERS", "many")
    findings = {one["subject"]: one for one in autoflash("doctor", "--json").json}
    assert findings["store"]["state"] == "error"
    assert findings["store"]["text"].startswith("AUTOFLASH_WORKERS='many': must be a whole number")


def run_cli(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["autoflash", *map(str, words)])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out = capsys.readouterr()
    return caught.value.code or 0, out.out, out.err


FLAGS = ["--heads", "2", "--seqlen", "32", "--head-dim", "64", "--dtype", "fp16"]


def test_doctor_exits_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_cli(monkeypatch, capsys, "doctor")[0] == 1


def test_ctrl_c(monkeypatch, capsys):
    def interrupted(problems, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("autoflash.tuning.tune.tune", interrupted)
    code, _, err = run_cli(monkeypatch, capsys, "tune", *FLAGS)
    assert code == 130
    assert " ".join(err.split()) == "interrupted; what was found is kept, run again to go on"


@pytest.mark.parametrize("name", ["pro[old].yaml", "pro[/old].yaml"])
def test_brackets_in_an_error(monkeypatch, capsys, name):
    code, _, err = run_cli(monkeypatch, capsys, "tune", "--file", f"/tmp/{name}")
    assert code == 2
    assert err.startswith(f"error: /tmp/{name} can't be read")


def test_a_long_error_is_one_line(monkeypatch, capsys):
    err = run_cli(monkeypatch, capsys, "tune", *FLAGS, "--target", "v100")[2]
    assert err.count("\n") == 1


def test_empty_list(monkeypatch, capsys):
    code, _, err = run_cli(
        monkeypatch, capsys, "tune", "--heads", ",", *FLAGS[2:], "--target", "h100"
    )
    assert code == 2
    assert err.startswith("error: problem field 'heads' has no value")


def test_infinite_budget(monkeypatch, capsys):
    words = ["tune", *FLAGS, "--target", "h100", "--budget", "inf"]
    code, _, err = run_cli(monkeypatch, capsys, *words)
    assert code == 2
    assert err.startswith("error: budget of inf s: must be more than 0 and below")
