"""What the records say of problems on GPUs: levels, losses by stored trials alone, exit codes."""

import dataclasses
import json
import shutil

import pytest

from autoflash.coverage import (
    LEVELS,
    cover,
    named_targets,
    problems_of,
    reaches,
    stored_records,
    targets_of,
)
from autoflash.errors import InvalidInputError, StoreError
from autoflash.kernels import KERNELS
from autoflash.problem import Bucket, Problem
from autoflash.settings import settings
from autoflash.store.layers import Layers, SureLayers
from autoflash.store.postgres import PostgresStore
from autoflash.store.record import Measurement, TrialStatus
from autoflash.store.store import Store
from autoflash.target import named_target
from tests.store.support import H200, PROBLEM, config_of, problem_of, record_of, trial_of
from tests.test_cli import autoflash, squeezed

H100, A100 = named_target("h100"), named_target("a100")
NEAR = problem_of(seqlen_k=8192)
FAR = problem_of(head_dim=64)
GUESSED = problem_of(head_dim=96)
MODEL = {
    "num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 2048,
    "architectures": ["SomeForCausalLM"], "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def store():
    return Store(settings().db_path)


@pytest.fixture
def filled(store):
    store.add_records([record_of(), record_of(problem=GUESSED, kind="predicted")])
    return store


def timed(ms, problem, **config):
    measurement = Measurement(
        median_ms=ms, p20_ms=ms, p80_ms=ms, repeats=9, method="events", noisy=False
    )
    return trial_of(
        TrialStatus.ok, problem=problem, config=config_of(**config), measurement=measurement
    )


def levels(problems, targets=(H200,), **options):
    cells = cover(problems, targets, Layers(), **options)
    return [(cell.level, cell.expected_loss) for cell in cells]


def test_levels(filled):
    problems = [PROBLEM, problem_of(batch=1, heads=32, kv_heads=8), NEAR, FAR, GUESSED]
    assert levels(problems) == [
        ("exact", None), ("exact", None), ("neighbour", None), ("missing", None),
        ("predicted", None),
    ]  # fmt: skip
    cells = cover([PROBLEM, NEAR], [H200, H100, A100], Layers())
    assert [(c.problem, c.target.name, c.level) for c in cells] == [
        (PROBLEM, "NVIDIA H200", "exact"),
        # This bucket on another GPU of the arch.
        (PROBLEM, H100.name, "neighbour"),
        (PROBLEM, A100.name, "missing"),
        (NEAR, "NVIDIA H200", "neighbour"),
        (NEAR, H100.name, "missing"),
        (NEAR, A100.name, "missing"),
    ]
    assert cells[0].choice.config == record_of().config
    assert cells[0].why == "tuned on this target, 1.2500 ms"


def test_what_a_neighbour_is_expected_to_lose_is_what_trials_say(filled):
    # The neighbour's config lost a tenth on one problem and a fifth on another: the median of both.
    long, short = problem_of(seqlen_k=16384), problem_of(seqlen_k=1024)
    filled.add_trials([timed(1.0, long, BLOCK_M=64), timed(1.1, long)])
    filled.add_trials([timed(2.0, short, BLOCK_M=64), timed(2.4, short)])
    ((level, loss),) = levels([NEAR])
    assert level == "neighbour"
    assert loss == pytest.approx(0.15)
    # A record of its own has nothing to lose.
    assert levels([PROBLEM]) == [("exact", None)]


def test_what_no_kernel_serves_is_missing(store):
    (cell,) = cover([problem_of(dtype="float32")], [H200], Layers())
    assert (cell.level, cell.choice) == ("missing", None)
    assert "float32 is not served" in cell.why


def test_gradients_that_repeat_are_covered_apart(store):
    fused = KERNELS["flash_bwd_ws"]
    problem = problem_of(op="bwd", head_dim_v=128)
    record = dataclasses.replace(
        record_of(problem=dataclasses.replace(problem, op="fwd")),
        problem=problem, kernel=fused.name, config=fused.default(problem, H200),
    )  # fmt: skip
    store.add_record(record)
    assert levels([problem]) == [("exact", None)]
    assert levels([problem], deterministic=True) == [("missing", None)]
    # A forward always repeats.
    store.add_record(record_of())
    assert levels([PROBLEM], deterministic=True) == [("exact", None)]


def test_lock_mode_does_not_matter(filled, monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOFLASH_LOCK", str(tmp_path / "none.lock"))
    assert [level for level, _ in levels([PROBLEM, NEAR, FAR])] == ["exact", "neighbour", "missing"]


def test_levels_are_ordered():
    assert [reaches(level, "neighbour") for level in LEVELS] == [True, True, False, False]
    assert all(reaches(level, level) for level in LEVELS)


def test_problems_and_targets_of_records():
    small = problem_of(seqlen_q=1500)
    records = [
        record_of(),
        record_of(problem=small),
        record_of(target=H100),
        record_of(problem=FAR),
    ]
    assert problems_of(records) == [FAR, small]
    assert targets_of(records) == [H100, H200]
    slices = [dataclasses.replace(H100, name="H100 MIG 3g", sm_count=n) for n in (60, 66)]
    known = [record_of(target=target) for target in slices]
    assert named_targets(["h200", "H100 MIG 3g", "H200"], known) == [H200, *targets_of(known)]
    with pytest.raises(InvalidInputError, match=r"unknown target 'h300': .*h200.*'H100 MIG 3g'"):
        named_targets(["h300"], known)


def test_records_that_can_not_be_read_are_an_error(store):
    assert stored_records(settings()) == ([], [])
    shutil.copyfile(__file__, store.path)
    with pytest.raises(StoreError):
        stored_records(settings())


@pytest.mark.parametrize("on_a_server", [False, True], ids=["file", "server"])
def test_sure_layers_answer_or_raise(store, request, on_a_server):
    """Serving goes on without what it can't read, or a server that is late; this doesn't."""
    if on_a_server:
        store = PostgresStore(request.getfixturevalue("url"))
    where = store.url if on_a_server else store.path
    store.add_records([record_of(), record_of(problem=FAR)])
    layers = SureLayers(settings().at(where))
    assert layers.lookup(record_of().bucket, H200).record == record_of()
    assert layers.lookup(Bucket.of(NEAR), H200).how == "neighbour"
    assert layers.losses(record_of()) == []
    own, shipped = stored_records(settings().at(where))
    assert (len(own), shipped) == (2, [])
    if on_a_server:
        where = dataclasses.replace(where, with_password=where.with_password + "_gone")
    else:
        shutil.copyfile(__file__, where)
    with pytest.raises(StoreError, match="the user records: "):
        SureLayers(settings().at(where)).lookup(record_of().bucket, H200)


# --- the command


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODEL))
    return path


def coverage(*words):
    return autoflash("db", "coverage", *words)


def test_a_model_config(store, model):
    tuned = Problem.parse(
        {"batch": 1, "heads": 16, "kv_heads": 4, "seqlen": 4096, "head_dim": 128, "causal": True}
    )
    store.add_record(record_of(problem=tuned))
    words = ("--model-config", model, "--seqlens", "4k,8k", "--target", "h200,a100")
    done = coverage(*words, "--op", "fwd,bwd", "--dtype", "bf16,fp16", "--json")
    assert done.code == 1
    assert (done.json["require"], done.json["met"]) == ("exact", False)
    found = {
        (
            c["problem"]["op"],
            c["problem"]["dtype"],
            c["problem"]["seqlen_q"],
            c["target"]["name"],
        ): (c["level"])
        for c in done.json["cells"]
    }
    assert len(found) == 2 * 2 * 2 * 2
    assert {key[1:3]: level for key, level in found.items() if key[::3] == ("fwd", H200.name)} == {
        ("bfloat16", 4096): "exact", ("bfloat16", 8192): "neighbour",
        ("float16", 4096): "neighbour", ("float16", 8192): "neighbour",
    }  # fmt: skip
    assert {level for key, level in found.items() if key[::3] != ("fwd", H200.name)} == {"missing"}
    assert done.json["counts"] == {"exact": 1, "neighbour": 3, "predicted": 0, "missing": 12}
    cell = done.json["cells"][0]
    assert (cell["kernel"], cell["layer"], cell["expected_loss"]) == ("flash_fwd", "user", None)
    assert cell["config"] == dict(record_of().config)


@pytest.mark.parametrize(
    ("problem", "passing"),
    [(PROBLEM, 4), (NEAR, 3), (GUESSED, 2), (FAR, 1)],
    ids=["exact", "neighbour", "predicted", "missing"],
)
def test_the_exit_code_says_whether_the_level_is_reached(filled, problem, passing):
    words = [*problem.flags().split(), "--target", "h200"]
    codes = [coverage(*words, "--require", level).code for level in LEVELS]
    assert codes == [1] * (4 - passing) + [0] * passing
    assert coverage(*words).code == codes[0]


def test_the_table(filled):
    done = coverage(*NEAR.flags().split(), "--target", "h200,h100")
    table = squeezed(done.out)
    assert "NVIDIAH200" in table
    assert "neighbour,lossunknown" in table
    assert "1neighbour,1missing" in table
    filled.add_trials([timed(1.0, FAR), timed(1.0, problem_of(seqlen_k=1024), BLOCK_M=64),
                       timed(1.1, problem_of(seqlen_k=1024))])  # fmt: skip
    assert "neighbour,+10.0%" in squeezed(coverage(*NEAR.flags().split(), "--target", "h200").out)


def test_without_options_it_is_what_the_store_knows(filled):
    filled.add_record(record_of(target=H100, problem=FAR))
    found = coverage("--json").json["cells"]
    assert {c["target"]["name"] for c in found} == {"NVIDIA H200", H100.name}
    assert len(found) == 6
    assert [c["level"] for c in found].count("exact") == 2
    assert coverage("--op", "bwd").code == 2


def test_slices_of_a_gpu_are_told_apart(store):
    slices = [dataclasses.replace(H100, name="[red]MIG[/red]", sm_count=n) for n in (60, 66)]
    store.add_records([record_of(target=target) for target in slices])
    table = squeezed(coverage().out)
    assert "[red]MIG[/red](60SMs,80GiB)" in table
    assert "[red]MIG[/red](66SMs,80GiB)" in table


def test_an_own_store_hides_the_gpus_of_the_shipped_records(store, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_SHIPPED_DB", "1")
    shipped = coverage("--json")
    assert {c["target"]["name"] for c in shipped.json["cells"]} == {"NVIDIA H200"}
    assert shipped.json["met"]
    store.add_record(record_of(target=H100))
    assert {c["target"]["name"] for c in coverage("--json").json["cells"]} == {H100.name}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--require", "tuned"], "--require 'tuned': must be one of exact, neighbour, predicted"),
        (["--target", "h300"], "unknown target 'h300'"),
        (["--batch", "8"], "give one of: flags (--heads 16 --seqlen 4k --head-dim 128), --file"),
        (["--heads", "16"], "problem field"),
        (["--model-config", "/nowhere", "--file", "x"], "give one of"),
        (["--db", "/nowhere.sqlite"], "/nowhere.sqlite: is not there"),
        ([], "nothing to cover: the store has no records"),
        (["--op", "sideways", *PROBLEM.flags().split()], "--op 'sideways': must name fwd, bwd"),
    ],
)
def test_refusals(words, told):
    done = coverage(*words)
    assert (done.code, told in done.told) == (2, True), done.told
