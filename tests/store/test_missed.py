"""The file of missed calls: many writers, strangers' lines, and how it stays small."""

import json
import multiprocessing
import os
import resource
import stat
from pathlib import Path

import filelock
import pytest

from autoflash.errors import InvalidInputError, StoreError
from autoflash.store import missed as module
from autoflash.store.missed import append, compact, merged, missed_path, read
from autoflash.store.plain import missed_to_plain
from autoflash.store.record import MAX_CALLS, MissedCalls
from autoflash.target import named_target
from tests.store.support import H200, as_a_stranger, problem_of

H100 = named_target("h100")
PROCESSES = 8
TIMES = 25


def missed(calls=1, target=H200, day=1, **changes):
    return MissedCalls(
        problem=problem_of(**changes),
        target=target,
        calls=calls,
        noted_at=f"2025-03-{day:02d}T12:30:00+00:00",
    )


def plain(**changes):
    return missed_to_plain(missed()) | changes


@pytest.fixture
def file(tmp_path):
    return missed_path(tmp_path / "new folder" / "tuning #1?.sqlite")


def lock_of(file):
    return file.with_name(file.name + ".lock")


def test_it_stands_beside_the_store(file):
    assert file.name == "tuning #1?.sqlite.missed.jsonl"


@pytest.mark.parametrize("calls", [0, -1, MAX_CALLS + 1])
def test_a_count_is_of_calls(calls):
    with pytest.raises(InvalidInputError, match=f"calls={calls}: must be from 1 to 2"):
        missed(calls)


@pytest.mark.parametrize("name", ["batch", "seqlen_q", "seqlen_k"])
def test_nothing_to_compute_is_nothing_missed(name):
    with pytest.raises(InvalidInputError, match="there is nothing to compute, nor to miss"):
        missed(**{name: 0})


# --- writing and reading


def test_lines_are_appended_and_come_back(file):
    first = [missed(3), missed(MAX_CALLS, H100, op="bwd", causal=False)]
    append(file, first)
    append(file, [missed(5)])
    assert read(file) == ([*first, missed(5)], [])
    assert [json.loads(x) for x in file.read_text().splitlines() if x] == [
        missed_to_plain(one) for one in (*first, missed(5))
    ]


def test_no_file_is_nothing_missed(file):
    assert read(file) == ([], [])
    compact(file)
    assert not file.parent.exists()


def add(file, number, start):
    start.wait()
    for time in range(TIMES):
        append(file, [missed(1 + time, batch=1 + number), missed(1 + time, heads=4 * (1 + number))])
        if number == 0 and time % 5 == 4:
            compact(file)


def test_processes_that_append_at_once_lose_nothing(file):
    """Nor do those whose file is compacted meanwhile."""
    fresh = multiprocessing.get_context("forkserver")
    fresh.set_forkserver_preload(["autoflash.store.missed", "pytest"])
    start = fresh.Barrier(PROCESSES)
    workers = [fresh.Process(target=add, args=(file, n, start)) for n in range(PROCESSES)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=240)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    noted, refusals = read(file)
    assert refusals == []
    total = TIMES * (TIMES + 1) // 2
    expected = [problem_of(batch=1 + n) for n in range(PROCESSES)]
    expected += [problem_of(heads=4 * (1 + n)) for n in range(PROCESSES)]
    found = {m.problem: m.calls for m in merged(noted)}
    # batch=2 and heads=16 are one problem.
    assert found == {p: total * expected.count(p) for p in expected}
    assert {p.name for p in file.parent.iterdir()} <= {file.name, lock_of(file).name}


def test_an_unfinished_line_spoils_no_other(file):
    append(file, [missed(3)])
    with file.open("a") as raw:
        raw.write('{"problem": {"batch"')
    append(file, [missed(4)])
    noted, (refusal,) = read(file)
    assert noted == [missed(3), missed(4)]
    assert refusal.startswith("line 2 refused: not JSON: ")


def test_a_full_disk_leaves_what_was_there(file):
    append(file, [missed(3)])
    before = file.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, hard))
    try:
        with pytest.raises(StoreError, match="can't be written: the disk is full"):
            append(file, [missed(4), missed(5)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert file.read_bytes() == before


def test_a_file_does_not_grow_for_ever(file, monkeypatch):
    append(file, [missed(3)])
    monkeypatch.setattr(module, "MAX_BYTES", 2 * file.stat().st_size + 1)
    append(file, [missed(4)])
    before = file.read_bytes()
    assert len(before) == module.MAX_BYTES
    with pytest.raises(StoreError, match=r"would grow beyond .* `autoflash tune --missed` merges"):
        append(file, [missed(5)])
    assert file.read_bytes() == before
    compact(file)
    append(file, [missed(5)])
    assert read(file) == ([missed(7), missed(5)], [])
    monkeypatch.setattr(module, "MAX_BYTES", 10)
    with pytest.raises(StoreError, match="is larger than 10 bytes: move it away"):
        read(file)


def test_a_lock_that_is_held_is_not_waited_for_long(file, monkeypatch):
    monkeypatch.setattr(module, "_LOCK_TIMEOUT_S", 0.05)
    append(file, [missed(3)])
    with filelock.FileLock(lock_of(file)):
        for action in (lambda: append(file, [missed(4)]), lambda: compact(file)):
            with pytest.raises(StoreError, match=r"another process held its lock for 0\.05 s"):
                action()
        # Who only reads needs none.
        assert read(file) == ([missed(3)], [])


def test_a_file_system_without_locks_is_an_error(file, monkeypatch):
    def acquire(self, *arguments, **options):
        raise NotImplementedError("no flock here")

    monkeypatch.setattr(filelock.FileLock, "acquire", acquire)
    with pytest.raises(StoreError, match="can't be written: no flock here"):
        append(file, [missed(3)])
    assert not file.exists()


def test_a_folder_that_may_not_be_written(file, monkeypatch):
    append(file, [missed(3)])
    lock_of(file).unlink(missing_ok=True)
    file.parent.chmod(0o555)
    # The folders above are the tester's own.
    monkeypatch.chdir(file.parent)
    here = Path(file.name)

    def work():
        said = []
        for action in (lambda: append(here, [missed(4)]), lambda: compact(here)):
            try:
                action()
            except StoreError as error:
                said.append("can't be written" in str(error) and "Permission" in str(error))
        return f"{said} {read(here) == ([missed(3)], [])}"

    assert as_a_stranger(work) == "[True, True] True"
    assert [p.name for p in file.parent.iterdir()] == [file.name]


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), os.mkfifo], ids=["folder", "pipe"])
def test_what_is_not_a_file_is_refused(file, make):
    file.parent.mkdir()
    make(file)
    for action in (lambda: append(file, [missed()]), lambda: read(file), lambda: compact(file)):
        with pytest.raises(StoreError, match="is not a file: move it away"):
            action()


# --- a stranger's lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"hello", "not JSON: Expecting value"),
        (b'"\xff"', "not JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"[" * 4000, "not JSON: "),
        (b"1" * 4096, "missed calls: must be an object, not int"),
        (b" " * 4096 + b"{}", "longer than 4096 bytes"),
        (b"[]", "missed calls: must be an object, not list"),
        (b"{}", "missed calls: field 'calls' is missing"),
        (plain(more=1), "missed calls: field 'more' is unknown"),
        (plain(calls=True), "calls: must be int, not bool"),
        (plain(calls=1.0), "calls: must be int, not float"),
        (plain(calls=float("nan")), "calls: must be int, not float"),
        (plain(calls=0), "calls=0: must be from 1 to 2^53"),
        (plain(calls=10**400), f"calls={'1' + '0' * 200}"),
        (plain(noted_at="today"), "noted_at='today': must be UTC like 2025-01-31T23:59:59+00:00"),
        (plain(noted_at=5), "noted_at: must be str, not int"),
        (plain(problem=[]), "problem: must be an object, not list"),
        (plain(problem=problem_of().as_dict() | {"op": "exec"}), "op='exec': must be one of fwd, "),
        (plain(problem=problem_of().as_dict() | {"batch": "2"}), "batch: must be int, not str"),
        (plain(problem=problem_of().as_dict() | {"batch": 0}), "there is nothing to compute"),
        (plain(problem=problem_of().as_dict() | {"head_dim": 999}), "head_dim=999: the largest "),
        (plain(target={}), "target: field 'arch' is missing"),
        (plain(target=plain()["target"] | {"arch": "../.."}), "arch='../..': must look like sm_90"),
        (plain(target=plain()["target"] | {"name": "\x1b[31m"}), "name='\\x1b[31m': must be print"),
    ],
    ids=range(23),
)
def test_a_bad_line_is_refused_by_itself(file, line, reason):
    line = line if isinstance(line, bytes) else json.dumps(line).encode()
    good = json.dumps(plain()).encode()
    file.parent.mkdir()
    file.write_bytes(b"\n".join([good, line, b"", b"  ", good]))
    noted, (refusal,) = read(file)
    assert noted == [missed(), missed()]
    assert refusal.startswith("line 2 refused: ")
    assert reason in refusal
    assert len(refusal) <= 320
    assert refusal.isprintable()
    compact(file)
    assert read(file) == ([missed(2)], [])


def test_a_file_of_something_else_has_not_a_reason_for_each_line(file):
    file.parent.mkdir()
    file.write_text("#\n" * 1000)
    noted, refusals = read(file)
    assert noted == []
    assert refusals[:20] == [
        f"line {n} refused: not JSON: Expecting value: line 1 column 1 (char 0)"
        for n in range(1, 21)
    ]
    assert refusals[20:] == ["further lines refused"]


# --- merging


def test_counts_are_merged_by_problem_and_gpu():
    noted = [
        missed(1, batch=1), missed(2, day=3), missed(7, H100), missed(4, day=2), missed(3, batch=4),
        missed(2, batch=1, day=9),
    ]  # fmt: skip
    assert merged(noted) == [
        missed(7, H100),
        missed(6, day=3),
        # Of two that were called alike the one noted first.
        missed(3, batch=1, day=9),
        missed(3, batch=4),
    ]
    assert merged([missed(MAX_CALLS), missed(MAX_CALLS)]) == [missed(MAX_CALLS)]
    assert merged([]) == []


def test_compaction_merges_and_keeps_the_most_called(file, monkeypatch):
    monkeypatch.setattr(module, "MAX_KEPT", 3)
    for batch in (1, 2, 3, 4, 3):
        append(file, [missed(batch, batch=batch)])
    file.chmod(0o640)
    compact(file)
    expected = [missed(6, batch=3), missed(4, batch=4), missed(2, batch=2)]
    assert read(file) == (expected, [])
    assert len(file.read_text().splitlines()) == 3
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert {p.name for p in file.parent.iterdir()} <= {file.name, lock_of(file).name}
    append(file, [missed(1, batch=2)])
    assert merged(read(file)[0]) == [*expected[:2], missed(3, batch=2)]


def test_a_draft_that_was_left_or_planted_is_replaced(file, tmp_path):
    append(file, [missed(1), missed(2)])
    victim = tmp_path / "victim"
    victim.write_text("mine")
    file.with_name(file.name + ".new").symlink_to(victim)
    compact(file)
    assert victim.read_text() == "mine"
    assert not file.is_symlink()
    assert read(file) == ([missed(3)], [])
