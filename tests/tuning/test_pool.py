"""Real worker processes: they answer, they die, they are killed, and the next one is as good."""

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autoflash.errors import AutoFlashError
from autoflash.store.record import TrialStatus
from autoflash.target import named_target
from autoflash.tuning import pool
from autoflash.tuning.job import Candidate, Outcome, study_from_message, study_message
from autoflash.tuning.pool import Worker, WorkerDiedError, WorkerPool, WorkerTimeoutError
from autoflash.tuning.resources import Resources
from autoflash.tuning.runner import live_runners

H100 = named_target("h100")


@pytest.fixture(scope="module")
def tiny(lab):
    """A candidate that compiles fast, on a GPU that isn't here."""
    config = lab.kernel.space.parse(
        {
            "BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 1, "LOAD": "pointer",
            "GROUP_HEADS": 1, "DIAGONAL_FIRST": False, "maxnreg": 0,
        }
    )  # fmt: skip
    return Candidate(kernel=lab.kernel, config=config)


@pytest.fixture
def compile_message(lab, tiny):
    return {"do": "compile", **study_message(lab.problem, H100), **tiny.to_message()}


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def pid_of(worker):
    return worker._process.pid


def test_a_worker_answers_dies_and_is_replaced(lab, compile_message):
    """One story, since a process takes seconds to import torch and Triton."""
    with Worker() as worker:
        outcome = Outcome.from_message(worker.ask(compile_message, 60))
        assert (outcome.status, outcome.reason, outcome.measurement) == (TrialStatus.ok, "", None)
        # Less than the query tile with three blocks of keys and values, 64 values of 2 bytes each.
        assert 0 < outcome.resources.shared_bytes <= (16 + 3 * 2 * 32) * 64 * 2
        assert 24 <= outcome.resources.registers <= 255
        assert outcome.resources.spills == 0
        first = pid_of(worker)

        # An error of ours: told, survived.
        wrong = {**compile_message, "problem": {**lab.problem.as_dict(), "head_dim": 300}}
        with pytest.raises(AutoFlashError, match=r"^head_dim=300: the largest"):
            worker.ask(wrong, 60)
        assert pid_of(worker) == first
        assert Outcome.from_message(worker.ask(compile_message, 60)) == outcome

        # Any other error: told, and the process ends, since its CUDA context may be poisoned.
        with pytest.raises(WorkerDiedError, match=r"^KeyError: 'dance'$"):
            worker.ask({"do": "dance"}, 60)
        assert not alive(first)

        assert Outcome.from_message(worker.ask(compile_message, 60)) == outcome
        second = pid_of(worker)
        assert second != first

        # It hangs: killed when the limit is over.
        os.kill(second, signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=r"^no answer within 0 s$"):
            worker.ask(compile_message, 0.4)
        assert 0.3 < time.monotonic() - begin < 5
        assert not alive(second)

        # Killed from outside between two messages: the next ask starts a fresh one unasked.
        assert Outcome.from_message(worker.ask(compile_message, 60)) == outcome
        third = pid_of(worker)
        os.kill(third, signal.SIGKILL)
        # Until it can be reaped: a zombie may have threads that still end.
        os.waitid(os.P_PID, third, os.WEXITED | os.WNOWAIT)
        assert Outcome.from_message(worker.ask(compile_message, 60)) == outcome
        fourth = pid_of(worker)
        assert fourth not in (first, second, third)
    assert not alive(fourth)


def test_without_a_gpu_nothing_is_described(monkeypatch):
    """CUDA_VISIBLE_DEVICES hides the GPU of a machine that has one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    before = children()
    with pytest.raises(WorkerDiedError), live_runners(1):
        pass
    assert children() == before


def children():
    """Processes of ours that run a worker."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if b"autoflash.tuning.worker" in command and parent == os.getpid():
            found.add(int(folder.name))
    return found


# --- the protocol, with a process that starts fast and misbehaves as it is told


FAKE = """#!{python} -SE
import json, os, signal, sys, time
for line in sys.stdin:
    message = json.loads(line)
    action = message["do"]
    if action == "start":
        time.sleep(message.get("pause", 0))
        print(json.dumps({{}}), flush=True)
    elif action == "echo":
        text = json.dumps({{"pid": os.getpid(), "said": message["text"]}}) + "\\n"
        half = len(text) // 2
        for part in (text[:half], text[half:]):
            sys.stdout.write(part)
            sys.stdout.flush()
            time.sleep(message.get("pause", 0))
    elif action == "exit":
        os._exit(message["code"])
    elif action == "signal":
        os.kill(os.getpid(), message["number"])
    elif action == "half":
        sys.stdout.write("{{")
        sys.stdout.flush()
        os._exit(3)
    elif action == "meet":
        open(os.path.join(message["folder"], str(os.getpid())), "w").close()
        while len(os.listdir(message["folder"])) < message["count"]:
            time.sleep(0.01)
        print(json.dumps({{"pid": os.getpid()}}), flush=True)
    elif action == "error":
        print(json.dumps({{"error": "told", "fatal": message["fatal"]}}), flush=True)
"""


@pytest.fixture
def misbehaving(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(FAKE.format(python=sys.executable), encoding="utf-8")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


def echo(text, **fields):
    return {"do": "echo", "text": text, **fields}


def test_answers_come_whole(misbehaving):
    with Worker() as worker:
        long = "x" * 300_000
        assert worker.ask(echo(long), 30)["said"] == long
        assert worker.ask(echo("in halves", pause=0.05), 30)["said"] == "in halves"


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"do": "exit", "code": 0}, "the worker exited with code 0 and no answer"),
        ({"do": "exit", "code": 7}, "the worker exited with code 7 and no answer"),
        ({"do": "half"}, "the worker exited with code 3 and no answer"),
        ({"do": "signal", "number": 9}, "the worker was killed by SIGKILL"),
        ({"do": "signal", "number": 11}, "the worker was killed by SIGSEGV"),
        ({"do": "error", "fatal": True}, "told"),
    ],
)
def test_how_it_died(misbehaving, message, reason):
    with Worker() as worker:
        first = worker.ask(echo("hello"), 30)["pid"]
        with pytest.raises(WorkerDiedError) as caught:
            worker.ask(message, 30)
        assert str(caught.value) == reason
        assert not alive(first)
        again = worker.ask(echo("again"), 30)
        assert (again["said"], again["pid"] != first) == ("again", True)


def test_an_error_that_it_survives(misbehaving):
    with Worker() as worker:
        first = worker.ask(echo("hello"), 30)["pid"]
        with pytest.raises(AutoFlashError, match=r"^told$") as caught:
            worker.ask({"do": "error", "fatal": False}, 30)
        assert not isinstance(caught.value, WorkerDiedError)
        assert worker.ask(echo("again"), 30)["pid"] == first


def test_a_late_answer_is_not_taken_for_the_next(misbehaving):
    with Worker() as worker:
        worker.ask(echo("hello"), 30)
        with pytest.raises(WorkerTimeoutError):
            worker.ask(echo("late", pause=0.6), 0.3)
        assert worker.ask(echo("next"), 30)["said"] == "next"


def test_a_fresh_process_has_the_limit_of_any_other(misbehaving):
    """Starting has one of its own: a hang that follows a crash must not cost both."""
    with Worker({"do": "start", "pause": 0.8}) as worker:
        begin = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=r"^no answer within 0 s$"):
            worker.ask(echo("slow", pause=30), 0.4)
        assert 1.0 < time.monotonic() - begin < 10
        # Starting took longer than this, which counts for nothing.
        assert worker.ask(echo("again"), 0.5)["said"] == "again"


@pytest.mark.parametrize("code", [0, 7])
def test_a_process_that_cannot_start(misbehaving, code):
    with Worker({"do": "exit", "code": code}) as worker:
        for _ in range(2):
            with pytest.raises(WorkerDiedError, match=f"exited with code {code} and no answer"):
                worker.ask(echo("hello"), 30)


def test_a_process_that_does_not_go_is_left_behind(misbehaving, monkeypatch):
    """A GPU that hangs may hold it."""
    with Worker() as worker:
        first = worker.ask(echo("hello"), 30)["pid"]
        held, wait = worker._process, worker._process.wait
        monkeypatch.setattr(pool, "_REAP_LIMIT_S", 0.1)

        def never(timeout):
            raise subprocess.TimeoutExpired("worker", timeout)

        monkeypatch.setattr(held, "wait", never)
        worker.stop()
        assert worker.ask(echo("next"), 30)["pid"] != first
        assert wait(timeout=30) == -signal.SIGKILL


def test_killed_from_outside_while_it_works(misbehaving):
    with Worker() as worker:
        pid = worker.ask(echo("hello"), 30)["pid"]
        killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
        killer.start()
        with pytest.raises(WorkerDiedError, match=r"^the worker was killed by SIGKILL$"):
            worker.ask(echo("long", pause=30), 60)
        killer.join()
        assert worker.ask(echo("again"), 30)["said"] == "again"


def test_kill_from_another_thread_ends_the_wait(misbehaving):
    with Worker() as worker:
        worker.ask(echo("hello"), 30)
        killer = threading.Timer(0.3, worker.kill)
        killer.start()
        with pytest.raises(WorkerDiedError, match=r"^the worker was killed by SIGKILL$"):
            worker.ask(echo("long", pause=30), 60)
        killer.join()


def test_stopping_twice_or_unstarted_is_fine(misbehaving):
    worker = Worker()
    worker.stop()
    worker.kill()
    pid = worker.ask(echo("hello"), 30)["pid"]
    worker.stop()
    worker.stop()
    assert not alive(pid)


def test_a_pool_works_side_by_side(misbehaving, tmp_path):
    """Each answers only once both have been asked."""
    folder = tmp_path / "met"
    folder.mkdir()
    message = {"do": "meet", "folder": str(folder), "count": 2}
    with WorkerPool(2) as workers:
        answers = [workers.submit(message, 60) for _ in range(2)]
        pids = {answer.result(timeout=60)["pid"] for answer in answers}
    assert pids == {int(path.name) for path in folder.iterdir()}
    assert len(pids) == 2


def test_a_pool_outlives_its_workers_deaths(misbehaving):
    with WorkerPool(2) as workers:
        deaths = [workers.submit({"do": "exit", "code": i}, 30) for i in range(4)]
        for code, death in enumerate(deaths):
            with pytest.raises(WorkerDiedError, match=f"exited with code {code} and no answer"):
                death.result(timeout=30)
        answers = [workers.submit(echo(str(i)), 30) for i in range(4)]
        assert [answer.result(timeout=30)["said"] for answer in answers] == list("0123")


def test_closing_a_pool_kills_what_runs_and_cancels_what_waits(misbehaving):
    workers = WorkerPool(1)
    pid = workers.submit(echo("hello"), 30).result(timeout=30)["pid"]
    running, waiting = (workers.submit(echo("long", pause=60), 90) for _ in range(2))
    time.sleep(0.2)
    begin = time.monotonic()
    workers.close()
    assert time.monotonic() - begin < 5
    with pytest.raises(WorkerDiedError, match="SIGKILL"):
        running.result(timeout=1)
    assert waiting.cancelled()
    assert not alive(pid)


# --- messages


def test_jobs_survive_json(lab, tiny):
    import json

    message = json.loads(json.dumps(study_message(lab.problem, H100) | tiny.to_message()))
    assert study_from_message(message) == (lab.problem, H100)
    assert Candidate.from_message(message) == tiny


@pytest.mark.parametrize("full", [False, True])
def test_outcomes_survive_json(lab, full):
    import json

    outcome = Outcome(status=TrialStatus.crashed, reason="é")
    if full:
        outcome = Outcome(
            status=TrialStatus.noisy,
            reason="busy",
            resources=Resources(shared_bytes=1, registers=2, spills=3),
            measurement=lab.measurement(1.5, noisy=True),
        )
    assert Outcome.from_message(json.loads(json.dumps(outcome.to_message()))) == outcome


def test_closing_at_once_waits_for_nothing(lab):
    candidates = lab.candidates()
    for _ in range(4):
        workers = WorkerPool(2)
        for c in candidates[:2]:
            workers.submit(
                {"do": "compile", **study_message(lab.problem, lab.a100), **c.to_message()}, 30
            )
        begin = time.monotonic()
        workers.close()
        assert time.monotonic() - begin < 1.5
