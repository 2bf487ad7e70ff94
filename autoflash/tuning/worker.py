"""The worker process: compiles, checks and times candidates, and may die doing so.

Started as ``python -m autoflash.tuning.worker`` and spoken to in JSON, a line a message, so that it
never imports the user's program. The parent sets the time limits and kills it.
"""

import functools
import importlib
import json
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autoflash.errors import AutoFlashError, CompileError, OutOfResourcesError
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import Problem
from autoflash.store.record import TrialStatus
from autoflash.tuning.job import Candidate, Message, Outcome, study_from_message
from autoflash.tuning.ptxas import log_of_compiling, why_serialized
from autoflash.tuning.resources import Resources, resources_of

if TYPE_CHECKING:
    from autoflash.runtime.launcher import Launcher
    from autoflash.tuning.check import Case, FullProblem
    from autoflash.tuning.check_bwd import FullGradients, GradientCase
    from autoflash.tuning.check_fp8 import Fp8Case
    from autoflash.tuning.timing import Timed, Timer


# Sets of a problem's tensors that launches go over by turns, memory allowing.
_COPIES = 3


def describe(message: Message) -> Message:
    """The GPU of this machine and the versions that make a time comparable."""
    import dataclasses

    import torch

    from autoflash.target import current_target
    from autoflash.tuning.versions import versions

    busy = _busy_at_first(message["parents_contexts"])
    # Makes the context: that is no part of the time that a candidate has.
    torch.cuda.synchronize()
    target = dataclasses.asdict(current_target())
    return {"target": target, "versions": versions(), "busy": busy}


@functools.cache
def _busy_at_first(parents_contexts: int) -> str:
    """What others did on the GPU before this process had a context on it."""
    from autoflash.tuning.measure import why_busy

    return why_busy(parents_contexts)


def start(message: Message) -> Message:
    """Import what compiling takes."""
    del message
    importlib.import_module("autoflash.runtime.compiler")
    return {}


def compile_candidate(message: Message) -> Message:
    """Compile into Triton's disk cache and report what the binary needs."""
    from autoflash.runtime.compiler import compile_config

    problem, target = study_from_message(message)
    candidate = Candidate.from_message(message)
    kernel, config = candidate.kernel, candidate.config
    try:
        with log_of_compiling() as log:
            compiled = compile_config(kernel, problem, config, ALIGNED, target)
        resources = Resources.most(map(resources_of, compiled))
        reason = resources.why_not(target)
        if reason is None and kernel.language == "gluon":
            # Its registers are dealt out by hand: more than a few spills, or products that wait
            # for each other, are a mistake and not worth the GPU's time.
            reason = resources.why_spilled(kernel.tolerable_spills)
            serialized = (why_serialized(binary, log.getvalue()) for binary in compiled)
            reason = reason or next(filter(None, serialized), None)
    except CompileError as error:
        return Outcome(status=TrialStatus.compile_error, reason=str(error)).to_message()
    status = TrialStatus.ok if reason is None else TrialStatus.out_of_resources
    return Outcome(status=status, reason=reason or "", resources=resources).to_message()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The problem that is being measured: inputs and expected outputs, made once."""

    problem: Problem
    full: "FullProblem | FullGradients"
    cases: "Sequence[Case | Fp8Case | GradientCase]"
    timer: "Timer"

    def why_wrong(self, launcher: "Launcher") -> str | None:
        """How the launcher breaks the accuracy rule, on any case or at full size."""
        reasons = (case.why_wrong(launcher) for case in (*self.cases, self.full))
        return next(filter(None, reasons), None)

    def timed(self, launcher: "Launcher") -> "Timed":
        """The launcher on every set of the tensors, ready to be timed."""
        return self.timer.replayed(*self.full.launches(launcher))


def checks_of(problem: Problem) -> tuple[Any, Any]:
    """What makes the full problem of ``problem``'s kind, and what its cases."""
    if problem.op == "bwd":
        from autoflash.tuning.check_bwd import FullGradients, gradient_cases

        return FullGradients, gradient_cases
    if problem.is_fp8:
        from autoflash.tuning.check_fp8 import FullFp8, fp8_cases

        return FullFp8, fp8_cases
    from autoflash.tuning.check import FullProblem, check_cases

    return FullProblem, check_cases


class Bench:
    """Checks and times candidates of one problem at a time."""

    def __init__(self) -> None:
        self._prepared: Prepared | None = None
        self._copies = _COPIES

    def prepare(self, problem: Problem) -> Prepared:
        """The tensors of ``problem``; those of the one before are freed first."""
        from autoflash.tuning.timing import Timer

        if self._prepared is None or self._prepared.problem != problem:
            if self._prepared is not None:
                self._copies = _COPIES
            self._free()
            full, cases = checks_of(problem)
            self._prepared = Prepared(
                problem=problem,
                full=full(problem, copies=self._copies),
                cases=cases(problem),
                timer=Timer(),
            )
        return self._prepared

    def measure(self, message: Message) -> Message:
        """Check a candidate by the accuracy rule, then time it."""
        return self._with_less_memory(lambda: self._measure(message), Outcome.to_message)

    def interleave(self, message: Message) -> Message:
        """Time candidates that were found right, in turns."""
        count = len(message["candidates"])
        return self._with_less_memory(
            lambda: self._interleave(message),
            lambda outcome: {"outcomes": [outcome.to_message()] * count},
        )

    def _with_less_memory(
        self, answer: Callable[[], Message], failed: Callable[[Outcome], Message]
    ) -> Message:
        """``answer``; where memory doesn't suffice once more with a single set of tensors, and if
        it still doesn't, an Outcome that says so. Either way the allocator stays usable."""
        import torch

        while True:
            try:
                return answer()
            except torch.OutOfMemoryError as error:
                reason = f"out of memory: {' '.join(str(error).split())[:300]}"
            # Outside of the handler: the traceback holds tensors.
            self._free()
            if self._copies == 1:
                self._copies = _COPIES
                return failed(Outcome(status=TrialStatus.out_of_resources, reason=reason))
            self._copies = 1

    def _free(self) -> None:
        import torch

        self._prepared = None
        torch.cuda.empty_cache()

    def _measure(self, message: Message) -> Message:
        from autoflash.runtime.launcher import Launcher
        from autoflash.tuning.measure import gpu_state, summarize

        problem, target = study_from_message(message)
        candidate = Candidate.from_message(message)
        prepared = self.prepare(problem)
        try:
            launcher = Launcher(candidate.kernel, problem, candidate.config, ALIGNED, target)
        except OutOfResourcesError as error:
            return Outcome(status=TrialStatus.out_of_resources, reason=str(error)).to_message()
        except CompileError as error:
            return Outcome(status=TrialStatus.compile_error, reason=str(error)).to_message()
        reason = prepared.why_wrong(launcher)
        if reason is not None:
            return Outcome(status=TrialStatus.wrong_result, reason=reason).to_message()
        before = gpu_state()
        timed = prepared.timed(launcher)
        times = prepared.timer.time(timed, give_up_ms=message["give_up_ms"])
        measurement = summarize(times, before, gpu_state(), timed.method)
        status = TrialStatus.noisy if measurement.noisy else TrialStatus.ok
        reason = measurement.throttle if measurement.noisy else ""
        return Outcome(status=status, reason=reason, measurement=measurement).to_message()

    def _interleave(self, message: Message) -> Message:
        from autoflash.runtime.launcher import Launcher
        from autoflash.tuning.measure import gpu_state, summarize

        problem, target = study_from_message(message)
        prepared = self.prepare(problem)
        several: list[Timed] = []
        for item in message["candidates"]:
            c = Candidate.from_message(item)
            launcher = Launcher(c.kernel, problem, c.config, ALIGNED, target)
            several.append(prepared.timed(launcher))
        before = gpu_state()
        times = prepared.timer.interleave(several, message["rounds"])
        after = gpu_state()
        outcomes = []
        for timed, samples in zip(several, times, strict=True):
            measurement = summarize(samples, before, after, timed.method)
            status = TrialStatus.noisy if measurement.noisy else TrialStatus.ok
            outcomes.append(Outcome(status=status, measurement=measurement).to_message())
        return {"outcomes": outcomes}


def _end_with_parent() -> None:
    """Kill this process and its tools once the parent is gone.

    Between two messages the end of the input says so; in a job that hangs nobody would look, and
    the GPU would be held for good.
    """
    # Without a wish it tells of a hang-up alone.
    pipe = select.poll()
    pipe.register(sys.stdin, 0)
    pipe.poll()
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Answer messages until standard input closes."""
    # A worker leads a session; one that a person runs by hand may have a pipe that ends early.
    if os.getsid(0) == os.getpid():
        threading.Thread(target=_end_with_parent, daemon=True).start()
    # What kernels and compilers print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    bench = Bench()
    actions: dict[str, Callable[[Message], Message]] = {
        "describe": describe,
        "start": start,
        "compile": compile_candidate,
        "measure": bench.measure,
        "interleave": bench.interleave,
    }
    for line in sys.stdin:
        message = json.loads(line)
        try:
            answer = actions[message["do"]](message)
        except AutoFlashError as error:
            answer = {"error": str(error)}
        except Exception as error:  # noqa: BLE001 - the worker boundary: it becomes a status
            # The CUDA context may be poisoned: answer, and let the parent start a fresh process.
            text = " ".join(f"{type(error).__name__}: {error}".split())[:400]
            answers.write(json.dumps({"error": text, "fatal": True}) + "\n")
            answers.flush()
            os._exit(1)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
