"""The GPU's part of a study: one candidate after the other, in a thread of its own."""

import dataclasses
import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from autoflash.problem import Problem
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.runner import Runner


class Measuring:
    """Has the runner measure one candidate at a time while the caller does something else.

    As a context manager it waits at its end for what is being measured, unless there was an
    exception: then whoever closes the runner ends that too.
    """

    def __init__(self, runner: Runner, problem: Problem) -> None:
        self._runner = runner
        self._problem = problem
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autoflash-gpu")
        self._under_way: dict[Future[tuple[Outcome, float]], Candidate] = {}
        # In which something was measured, as far as it was taken.
        self.seconds = 0.0

    @property
    def idle(self) -> bool:
        """Whether nothing is being measured, or waits to be taken."""
        return not self._under_way

    @property
    def candidates(self) -> list[Candidate]:
        """What is being measured: one or none."""
        return list(self._under_way.values())

    @property
    def futures(self) -> "list[Future[tuple[Outcome, float]]]":
        """For ``concurrent.futures.wait``; their results are ``take``'s."""
        return list(self._under_way)

    def start(self, candidate: Candidate, compiled: Outcome, give_up_ms: float | None) -> None:
        """Measure a candidate that was ``compiled``; only when idle."""
        assert self.idle, "one at a time"
        future = self._thread.submit(self._measure, candidate, compiled, give_up_ms)
        self._under_way[future] = candidate

    def take(self, *, waiting: bool = False) -> tuple[Candidate, Outcome] | None:
        """What has been measured, with the resources of its binary; None if there is nothing yet.
        ``waiting``: for what is under way."""
        for future, candidate in self._under_way.items():
            if waiting or future.done():
                outcome, seconds = future.result()
                del self._under_way[future]
                self.seconds += seconds
                return candidate, outcome
        return None

    def _measure(
        self, candidate: Candidate, compiled: Outcome, give_up_ms: float | None
    ) -> tuple[Outcome, float]:
        begin = time.monotonic()
        measured = self._runner.measure(self._problem, candidate, give_up_ms)
        outcome = dataclasses.replace(measured, resources=compiled.resources)
        return outcome, time.monotonic() - begin

    def __enter__(self) -> "Measuring":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=kind is None)
