"""Freezing what serves into a lock, adding to one, checking one; and the command."""

import dataclasses
import shlex

import pytest

from autoflash import locking
from autoflash.errors import InvalidInputError, LockError, MissingRecordError
from autoflash.kernels import KERNELS
from autoflash.kernels.access import ACCESSES
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Bucket
from autoflash.runtime import locked
from autoflash.runtime.choose import choose, serving
from autoflash.settings import settings
from autoflash.store import lock
from autoflash.store.layers import Layers
from autoflash.store.store import Store
from autoflash.store.untrusted import write_text
from autoflash.target import named_target
from tests.store.support import H200, PROBLEM, problem_of, record_of
from tests.test_cli import autoflash

H100, A100 = named_target("h100"), named_target("a100")
BWD = problem_of(op="bwd", head_dim_v=128)
NEAR = problem_of(seqlen_k=8192)
FAR = problem_of(head_dim=64)
FLAGS, NEAR_FLAGS = PROBLEM.flags().split(), NEAR.flags().split()


@pytest.fixture
def store():
    return Store(settings().db_path)


@pytest.fixture(autouse=True)
def fresh_locks():
    locked._read.cache_clear()


def best(kernel_name, problem, ms):
    kernel = KERNELS[kernel_name]
    base = record_of(problem=dataclasses.replace(problem, op="fwd"), ms=ms)
    config = kernel.default(problem, H200)
    return dataclasses.replace(base, problem=problem, kernel=kernel_name, config=config)


def freeze(problems, target=H200, require="missing", **options):
    return locking.freeze(problems, target, Layers().lookup, require, **options)


# --- what is frozen


@pytest.mark.parametrize("op", ["fwd", "bwd"])
@pytest.mark.parametrize("target", [H200, A100], ids=["h200", "a100"])
def test_it_is_what_serves_whatever_the_tensors_are_like(store, op, target):
    """Each kernel of the bucket has a record: which one serves depends on the call."""
    problem = dataclasses.replace(BWD, op=op)
    names = {"fwd": ("flash_fwd", "flash_fwd_ws"), "bwd": ("flash_bwd", "flash_bwd_ws")}[op]
    store.add_records([best(name, problem, ms) for name, ms in zip(names, (3.0, 2.0), strict=True)])
    frozen = freeze([problem], target)
    assert frozen.below == []
    found = {name: entry for entry in frozen.entries for name in entry.access}
    assert set(found) == set(ACCESSES[op])
    for name, access in ACCESSES[op].items():
        choice = serving(problem, target, access, Layers().lookup)
        entry = found[name]
        assert (entry.kernel, entry.config, entry.how) == (
            choice.kernel.name, choice.config, choice.how,
        )  # fmt: skip
        assert (entry.problem, entry.target) == (problem, target)
    kernels = {entry.kernel for entry in frozen.entries}
    assert kernels == (set(names) if target is H200 else {names[0]})


def test_the_level_is_asked_of_tensors_as_usual(store):
    store.add_record(best("flash_bwd_ws", BWD, 2.0))
    assert [e.how for e in freeze([BWD], require="exact").entries].count("tuned") == 1
    assert freeze([BWD], require="exact").below == []
    (reason,) = freeze([BWD], require="exact", deterministic=True).below
    assert reason.startswith(
        f"{BWD.label()} on NVIDIA H200 is missing, not exact: run `autoflash t"
    )
    store.add_record(best("flash_bwd_split", BWD, 3.0))
    assert freeze([BWD], require="exact", deterministic=True).below == []


@pytest.mark.parametrize(
    ("record", "level"),
    [
        (record_of(), "exact"), (record_of(problem=NEAR), "neighbour"),
        (record_of(target=H100), "neighbour"), (record_of(kind="predicted"), "predicted"),
        (record_of(problem=FAR), "missing"),
    ],
    ids=["exact", "neighbour", "sibling", "predicted", "missing"],
)  # fmt: skip
def test_less_than_the_level_is_left_out_and_said(store, record, level):
    store.add_record(record)
    levels = ("exact", "neighbour", "predicted", "missing")
    for require in levels:
        frozen = freeze([PROBLEM], require=require)
        if levels.index(level) <= levels.index(require):
            assert (bool(frozen.entries), frozen.below) == (True, [])
        else:
            assert frozen.entries == []
            (reason,) = frozen.below
            assert f"is {level}, not {require}: run `autoflash tune {PROBLEM.flags()}`" in reason
            assert reason.endswith(f"or lock with --require {level}")


def test_problems_of_a_bucket_share_an_entry_and_the_smallest_stands_for_them(store):
    others = [problem_of(seqlen_q=n) for n in (1100, 1500, 2048)]
    assert freeze([PROBLEM, *others]).entries == freeze([*others[::-1], PROBLEM]).entries
    assert {entry.problem for entry in freeze([PROBLEM, *others]).entries} == {others[0]}


def test_of_a_bucket_the_config_that_runs_all_is_taken(store):
    """What is right for 64 keys is too much for 40: then both get what the 40 get."""
    short, shorter = problem_of(seqlen_k=64), problem_of(seqlen_k=40)
    assert Bucket.of(short) == Bucket.of(shorter)
    offered = {p: serving(p, A100, ALIGNED, Layers().lookup) for p in (short, shorter)}
    found = freeze([short, shorter], A100).entries
    by_name = {name: entry for entry in found for name in entry.access}
    space = KERNELS["flash_fwd"].space
    for problem in (short, shorter):
        assert space.why_not(by_name["tma"].config, problem, A100, advice=False) is None
    assert by_name["tma"].config in [choice.config for choice in offered.values()]


def test_when_nothing_runs_all_of_a_bucket_it_is_an_error(store, monkeypatch):
    monkeypatch.setattr(locking, "_runs", lambda choice, problem, target: problem == PROBLEM)
    with pytest.raises(InvalidInputError, match="share a bucket, and no config of theirs can run"):
        freeze([PROBLEM, problem_of(seqlen_q=1500)])


def test_what_no_kernel_serves_is_said(store):
    frozen = freeze([problem_of(dtype="float32"), PROBLEM])
    assert {entry.problem for entry in frozen.entries} == {PROBLEM}
    (reason,) = frozen.below
    assert reason.startswith("no kernel serves fwd float32")


# --- a lock that is there


@pytest.fixture
def there(tmp_path, store):
    store.add_record(record_of())
    path = tmp_path / "autoflash.lock"
    write_text(path, locking.lock_text(freeze([PROBLEM]).entries)[0])
    return path


def test_adding_leaves_what_is_locked(there, store):
    before = lock.load(there).entries
    store.add_record(record_of(day=9, num_stages=3))
    text, count = locking.add(there, freeze([PROBLEM]).entries)
    assert (text, count) == (there.read_text(), 0)
    text, count = locking.add(there, freeze([PROBLEM, NEAR]).entries)
    after = lock.parse(text.encode()).entries
    assert set(before) < set(after)
    assert {e.problem for e in set(after) - set(before)} == {NEAR}
    assert count == len(after) - len(before)
    assert text == locking.lock_text([*before, *freeze([NEAR]).entries])[0]


def test_adding_fills_up_an_entry_that_is_there_in_part(there):
    whole = lock.load(there).entries
    write_text(there, locking.lock_text([e for e in whole if "tma" not in e.access])[0])
    text, _ = locking.add(there, freeze([PROBLEM]).entries)
    assert set(lock.parse(text.encode()).entries) == set(whole)


def test_faults(there):
    found = lock.load(there)
    assert locking.faults(found) == []
    entry = dataclasses.replace(found.entries[0], source_hash="0" * 16)
    old = dataclasses.replace(
        found, versions={**found.versions, "triton": "3.0.0"}, entries=(entry, *found.entries[1:])
    )
    triton, source = locking.faults(old)
    assert triton.startswith("was locked with triton 3.0.0, and this is")
    assert "generates source" in source
    write_text(there, lock.dump(old.entries, found.versions))
    with pytest.raises(LockError, match=r"nothing is added: flash_fwd for .* generates source"):
        locking.add(there, freeze([NEAR]).entries)


# --- the command


def test_lock_and_serve(store, tmp_path, monkeypatch):
    store.add_records([record_of(), record_of(problem=FAR, day=2), record_of(target=H100)])
    done = autoflash("lock", "--target", "h200,h100")
    assert (done.code, done.err) == (0, "")
    assert done.out == locking.lock_text(
        [*freeze([PROBLEM, FAR]).entries, *freeze([PROBLEM], H100).entries]
    )[0]  # fmt: skip
    path = tmp_path / "autoflash.lock"
    told = autoflash("lock", path, "--target", "h200,h100", "--json").json
    assert path.read_text() == done.out
    assert told == {
        "path": str(path), "locked": len(lock.load(path).entries), "digest": lock.load(path).digest,
    }  # fmt: skip
    before = {p: choose(p, H200, ALIGNED) for p in (PROBLEM, FAR)}
    monkeypatch.setenv("AUTOFLASH_LOCK", str(path))
    # The store goes, and what it said stays.
    store.path.unlink()
    for problem, choice in before.items():
        found = choose(problem, H200, ALIGNED)
        assert (found.kernel, found.config) == (choice.kernel, choice.config)
        assert (found.how, choice.how) == ("locked", "tuned")
    assert choose(PROBLEM, H100, ALIGNED).config == record_of().config


def test_the_command_of_the_error_mends_it(there, store, monkeypatch):
    store.add_record(record_of(problem=NEAR))
    monkeypatch.setenv("AUTOFLASH_LOCK", str(there))
    with pytest.raises(MissingRecordError) as caught:
        choose(NEAR, H200, ALIGNED)
    words = shlex.split(str(caught.value).split("`")[1])
    assert words[:3] == ["autoflash", "lock", "--add"]
    done = autoflash(*words[1:], "--target", "h200")
    assert (done.code, "entries added, digest" in done.out) == (0, True)
    locked._read.cache_clear()
    assert choose(NEAR, H200, ALIGNED).how == "locked"


def test_without_problems_what_is_below_the_level_is_left_out_and_told(store):
    store.add_records([record_of(), record_of(problem=FAR, kind="predicted")])
    done = autoflash("lock", "--target", "h200")
    assert done.code == 0
    assert {entry.problem for entry in lock.parse(done.out.encode()).entries} == {PROBLEM}
    assert f"left out: {FAR.label()} on NVIDIA H200 is predicted, not exact" in done.told
    both = autoflash("lock", "--target", "h200", "--require", "predicted")
    assert {e.problem for e in lock.parse(both.out.encode()).entries} == {PROBLEM, FAR}
    assert autoflash("lock", "--target", "h200", "--op", "bwd").code == 2


def test_a_lock_that_is_refused_is_not_written(there, store):
    before = there.read_text()
    for words, told in (
        ([there, *NEAR_FLAGS], f"nothing is locked: {NEAR.label()} on NVIDIA H200 is neighbour"),
        ([there, "--add", there, *FLAGS], "give one of: a file to write, --add, --check"),
        ([there, "--require", "tuned", *FLAGS], "--require 'tuned': must be one of exact"),
        ([there, "--batch", "2"], "give one of: flags"),
        (["--add", there.with_name("none.lock"), *FLAGS], "none.lock: can't be read"),
        ([there, "--db", "/nowhere.sqlite"], "/nowhere.sqlite: is not there"),
        ([there, "--op", "bwd"], "nothing to lock: the store has no record of NVIDIA H200"),
        (["--json", *FLAGS], "name a file to lock to"),
        (["--check", there, "--require", "exact"], "leave out --require"),
    ):
        done = autoflash("lock", *words, "--target", "h200")
        assert (done.code, told in done.told) == (2, True), done.told
        assert there.read_text() == before
    done = autoflash("lock", there, *FLAGS)
    assert (done.code, "name a target, such as --target h100" in done.told) == (2, True)
    store.path.write_bytes(b"hello" * 99)
    done = autoflash("lock", there, *FLAGS, "--target", "h200")
    assert (done.code, there.read_text()) == (2, before)


def test_check(there):
    done = autoflash("lock", "--check", there)
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{there}: {len(lock.load(there).entries)} entries, digest ")
    assert autoflash("lock", "--check", there, *FLAGS).code == 0
    done = autoflash("lock", "--check", there, *NEAR_FLAGS, "--op", "fwd,bwd", "--json")
    assert done.code == 1
    assert done.json["faults"] == [
        f"no entry for {dataclasses.replace(NEAR, op=op).label()} on NVIDIA H200 (tensors: tma)"
        for op in ("fwd", "bwd")
    ]
    done = autoflash("lock", "--check", there, *FLAGS, "--target", "h100")
    assert (done.code, "on NVIDIA H100 80GB HBM3 (tensors: tma)" in done.told) == (1, True)
    text = there.read_text()
    there.write_text(text.replace('"source_hash":"', '"source_hash":"0'))
    assert autoflash("lock", "--check", there).code == 2
    before = lock.parse(text.encode())
    write_text(there, lock.dump(before.entries, {**before.versions, "triton": "3.0.0"}))
    done = autoflash("lock", "--check", there)
    assert (done.code, "was locked with triton 3.0.0" in done.told) == (1, True)


def test_doctor_looks_at_the_lock(there, monkeypatch):
    def found():
        findings = autoflash("doctor", "--json").json
        return [(f["state"], f["text"]) for f in findings if f["subject"] == "lock"]

    assert found() == []
    monkeypatch.setenv("AUTOFLASH_LOCK", str(there))
    ((state, text),) = found()
    assert (state, "nothing else is served" in text) == ("ok", True)
    there.unlink()
    ((state, text),) = found()
    assert (state, "can't be read" in text) == ("error", True)
