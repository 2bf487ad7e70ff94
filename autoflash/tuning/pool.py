"""The parent's side of the workers: start, ask with a time limit, kill, start again."""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from autoflash.errors import AutoFlashError
from autoflash.tuning.job import Message

_START_LIMIT_S = 120.0
# A process that was killed may be held by the driver of a GPU that hangs.
_REAP_LIMIT_S = 10.0
_START: Message = {"do": "start"}


class WorkerDiedError(AutoFlashError):
    """The worker process ended without an answer; the message says how."""


class WorkerTimeoutError(AutoFlashError):
    """The worker gave no answer within the limit and was killed."""


class Worker:
    """One worker process. Not thread-safe: each belongs to one thread at a time.

    A fresh process is first told ``first``, under a limit of its own: the imports that this takes
    are no part of a question's limit, nor does a question that hangs get their time too.
    """

    def __init__(self, first: Message = _START, gpu: str | None = None) -> None:
        """``gpu``: the one that it sees alone, by its name in CUDA_VISIBLE_DEVICES."""
        self._first = first
        self._gpu = gpu
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""
        self._started = False
        self._closed = False

    def ask(self, message: Message, limit_s: float) -> Message:
        """The answer to ``message``. Raises WorkerTimeoutError, WorkerDiedError, or AutoFlashError
        for an error that the worker survived."""
        if self._process is not None and self._process.poll() is not None:
            self.stop()
        self._running()
        if not self._started:
            self._exchange(self._first, _START_LIMIT_S)
            self._started = True
        return self._exchange(message, limit_s)

    def _exchange(self, message: Message, limit_s: float) -> Message:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(message).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDiedError(self._obituary()) from None
        answer: Message = json.loads(self._read_line(limit_s))
        if answer.get("fatal"):
            self.stop()
            raise WorkerDiedError(answer["error"])
        if "error" in answer:
            raise AutoFlashError(answer["error"])
        return answer

    def kill(self) -> None:
        """Kill the process; a thread that waits for its answer gets WorkerDiedError."""
        process = self._process
        if process is not None and process.poll() is None:
            # By its own pid: the worker leads a session, so its children go too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process for good; may be called while another thread is in ``ask``."""
        self._closed = True
        self.kill()

    def _kill_if_closed(self) -> None:
        if self._closed:
            self.kill()

    def stop(self) -> None:
        """Kill the process, if it runs; the next ``ask`` starts a fresh one."""
        self.kill()
        process, self._process, self._buffer = self._process, None, b""
        self._started = False
        if process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_LIMIT_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _running(self) -> "subprocess.Popen[bytes]":
        if self._closed:
            raise WorkerDiedError("the worker was closed")
        if self._process is None:
            # A session of its own: Ctrl-C reaches the parent alone, which then decides.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autoflash.tuning.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                env=_environment(self._gpu),
            )
            self._kill_if_closed()
        return self._process

    def _read_line(self, limit_s: float) -> bytes:
        assert self._process is not None
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        deadline = time.monotonic() + limit_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([pipe], [], [], left)[0]:
                self.stop()
                raise WorkerTimeoutError(f"no answer within {limit_s:.0f} s")
            part = os.read(pipe, 1 << 16)
            if not part:
                raise WorkerDiedError(self._obituary())
            self._buffer += part
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _obituary(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        self.stop()
        if code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}"
        return f"the worker exited with code {code} and no answer"

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *unused: object) -> None:
        self.stop()


def _environment(gpu: str | None) -> dict[str, str]:
    """A worker's: ours, but that it sees ``gpu`` alone, if one is named, and that ``python -m``
    looks for modules in the working directory only if this process does too. What lies there is
    the user's (Python 3.10 always looks)."""
    found = {**os.environ, "OMP_NUM_THREADS": "1"}
    here = {""}
    with contextlib.suppress(FileNotFoundError):
        here.add(str(Path.cwd()))
    if here.isdisjoint(sys.path):
        found["PYTHONSAFEPATH"] = "1"
    if gpu is not None:
        found["CUDA_VISIBLE_DEVICES"] = gpu
    return found


class WorkerPool:
    """Workers that answer messages side by side, in any order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers = [Worker() for _ in range(size)]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._free.put(worker)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="autoflash-worker")

    def submit(self, message: Message, limit_s: float) -> "Future[Message]":
        """Like Worker.ask, but at once."""
        return self._threads.submit(self._ask, message, limit_s)

    def close(self) -> None:
        """Kill all workers; what was submitted and hasn't been answered fails."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.stop()

    def _ask(self, message: Message, limit_s: float) -> Message:
        worker = self._free.get()
        try:
            return worker.ask(message, limit_s)
        finally:
            self._free.put(worker)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
