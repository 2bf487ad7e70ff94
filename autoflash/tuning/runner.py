"""How candidates are compiled and timed: live workers, or a replay of recorded trials."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from typing import Protocol

from autoflash.errors import AutoFlashError
from autoflash.problem import Problem
from autoflash.store.record import Trial, TrialStatus
from autoflash.target import Target
from autoflash.tuning.job import Candidate, Message, Outcome, study_message
from autoflash.tuning.pool import Worker, WorkerPool, WorkerTimeoutError
from autoflash.tuning.resources import Resources

COMPILE_LIMIT_S = 60.0
MEASURE_LIMIT_S = 20.0
DESCRIBE_LIMIT_S = 60.0


class Runner(Protocol):
    """Compiles, checks and times candidates of one problem after the other.

    A candidate's failure is an Outcome; an exception means that nothing can be run at all.
    """

    target: Target
    versions: dict[str, str]
    workers: int

    def compile(self, problem: Problem, candidate: Candidate) -> "Future[Outcome]":
        """Compile ahead; ok or the reason against it, with the binary's resources."""
        ...

    def measure(self, problem: Problem, candidate: Candidate, give_up_ms: float | None) -> Outcome:
        """Check by the accuracy rule, then time; stop early if clearly above ``give_up_ms``."""
        ...

    def interleave(
        self, problem: Problem, candidates: Sequence[Candidate], rounds: int
    ) -> list[Outcome]:
        """Time the finalists in turns."""
        ...


def describe_message() -> Message:
    """What asks a worker for the GPU that it sees."""
    # Asked of torch only if it is there: the parent makes no context.
    torch = sys.modules.get("torch")
    contexts = int(torch is not None and torch.cuda.is_initialized())
    return {"do": "describe", "parents_contexts": contexts}


@contextmanager
def live_runners(
    workers: int, target: Target | None = None, gpus: Sequence[str | None] = (None,)
) -> "Iterator[list[LiveRunner]]":
    """A runner for each of ``gpus`` (see LiveRunner), which share ``workers`` compilers.

    All processes have started when they are there, so that a short budget isn't spent on imports.
    """
    share = max(1, workers // len(gpus))
    with WorkerPool(workers) as pool, ExitStack() as stack:
        starts = [pool.submit({"do": "start"}, COMPILE_LIMIT_S) for _ in range(workers)]
        runners = [stack.enter_context(LiveRunner(pool, share, target, gpu)) for gpu in gpus]
        # One that can't start says so when it is asked to compile.
        wait(starts)
        yield runners


class LiveRunner:
    """Workers on this machine: those of ``pool`` compile, one of its own has the GPU.

    Without ``target`` the GPU is asked who it is; with one only ``compile`` works. ``gpu`` is the
    one to use, by its name in CUDA_VISIBLE_DEVICES. Owns its process: use it as a context manager.
    """

    # Why the GPU was not idle when the runner was made, or ''.
    busy = ""

    def __init__(
        self, pool: WorkerPool, workers: int, target: Target | None = None, gpu: str | None = None
    ) -> None:
        """``workers``: its share of the pool."""
        self.workers = workers
        self._pool = pool
        describe = describe_message()
        self._gpu = Worker(describe, gpu)
        if target is None:
            try:
                found = self._gpu.ask(describe, DESCRIBE_LIMIT_S)
            except BaseException:
                self.close()
                raise
            self.target = Target(**found["target"])
            self.versions: dict[str, str] = found["versions"]
            self.busy = found["busy"]
        else:
            from autoflash.tuning.versions import versions

            self.target = target
            self.versions = versions()

    def compile(self, problem: Problem, candidate: Candidate) -> "Future[Outcome]":
        message = self._message("compile", problem, candidate)
        answer = self._pool.submit(message, COMPILE_LIMIT_S)
        outcome = _Compiling(answer)
        answer.add_done_callback(lambda done: _settle(done, outcome))
        return outcome

    def measure(self, problem: Problem, candidate: Candidate, give_up_ms: float | None) -> Outcome:
        message = self._message("measure", problem, candidate) | {"give_up_ms": give_up_ms}
        try:
            return Outcome.from_message(self._gpu.ask(message, MEASURE_LIMIT_S))
        except AutoFlashError as error:
            return _failure(error)

    def interleave(
        self, problem: Problem, candidates: Sequence[Candidate], rounds: int
    ) -> list[Outcome]:
        message = {
            "do": "interleave",
            **study_message(problem, self.target),
            "candidates": [c.to_message() for c in candidates],
            "rounds": rounds,
        }
        try:
            answer = self._gpu.ask(message, MEASURE_LIMIT_S + 5 * len(candidates))
        except AutoFlashError as error:
            return [_failure(error)] * len(candidates)
        return [Outcome.from_message(item) for item in answer["outcomes"]]

    def close(self) -> None:
        self._gpu.stop()

    def __enter__(self) -> "LiveRunner":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    def _message(self, action: str, problem: Problem, candidate: Candidate) -> Message:
        study = study_message(problem, self.target)
        return {"do": action, **study, **candidate.to_message()}


class RecordedRunner:
    """Replays stored trials: the tuning loop with no GPU and no compiler, for tests and studies.

    A candidate that was never recorded is out_of_resources.
    """

    workers = 1

    def __init__(self, target: Target, versions: dict[str, str], trials: Iterable[Trial]) -> None:
        self.target = target
        self.versions = versions
        self._trials = {(t.problem, t.kernel, t.config): t for t in trials}
        self.asked: list[Candidate] = []

    def compile(self, problem: Problem, candidate: Candidate) -> "Future[Outcome]":
        self.asked.append(candidate)
        outcome: Future[Outcome] = Future()
        trial = self._find(problem, candidate)
        if trial is None:
            outcome.set_result(
                Outcome(status=TrialStatus.out_of_resources, reason="never recorded")
            )
        elif trial.status in (TrialStatus.compile_error, TrialStatus.out_of_resources):
            outcome.set_result(Outcome(status=trial.status, reason=trial.reason))
        else:
            resources = Resources(
                shared_bytes=trial.shared_bytes or 0,
                registers=trial.registers or 0,
                spills=trial.spills or 0,
            )
            outcome.set_result(Outcome(status=TrialStatus.ok, resources=resources))
        return outcome

    def measure(self, problem: Problem, candidate: Candidate, give_up_ms: float | None) -> Outcome:
        del give_up_ms
        trial = self._find(problem, candidate)
        assert trial is not None, "measured a candidate that did not compile"
        return Outcome(status=trial.status, reason=trial.reason, measurement=trial.measurement)

    def interleave(
        self, problem: Problem, candidates: Sequence[Candidate], rounds: int
    ) -> list[Outcome]:
        del rounds
        return [self.measure(problem, candidate, None) for candidate in candidates]

    def _find(self, problem: Problem, candidate: Candidate) -> Trial | None:
        return self._trials.get((problem, candidate.kernel.name, candidate.config))


class _Compiling(Future[Outcome]):
    """The outcome of a compilation; cancelling it takes a compilation off the queue."""

    def __init__(self, answer: "Future[Message]") -> None:
        super().__init__()
        self._answer = answer

    def cancel(self) -> bool:
        self._answer.cancel()
        return super().cancel()


def _settle(done: "Future[Message]", outcome: "Future[Outcome]") -> None:
    if done.cancelled():
        Future.cancel(outcome)
        return
    if not outcome.set_running_or_notify_cancel():
        return
    # An exception in here would be swallowed, and the waiting loop would never hear of it.
    try:
        outcome.set_result(Outcome.from_message(done.result()))
    except AutoFlashError as error:
        outcome.set_result(_failure(error))
    except BaseException as error:  # noqa: BLE001 - handed on to whoever waits
        outcome.set_exception(error)


def _failure(error: AutoFlashError) -> Outcome:
    timed_out = isinstance(error, WorkerTimeoutError)
    status = TrialStatus.timeout if timed_out else TrialStatus.crashed
    return Outcome(status=status, reason=str(error)[:400])
