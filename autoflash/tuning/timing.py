"""Timing on the GPU: launches by turns over sets of inputs, the L2 cache flushed before each.

Runs in a worker, and in the scripts that compare implementations.
"""

import logging
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from autoflash.runtime import counters

logger = logging.getLogger(__name__)

Launch = Callable[[], object]

_FLUSH_BYTES = 256 << 20
# After a pause, or a launch that drew less, clocks are high until the power cap bites: what counts
# comes after launches that don't.
_SETTLE_MS = 20.0
# After a longer rest than this it takes as long as that was, and this long at most: on an H200 the
# first 1.5 s of a kernel that draws much ran at clocks that were 10 % higher than what came then.
_REST_S = 0.5
_WARM_S = 1.5
_TURN_MS = 30.0
# Launches in one graph, at least: a replay costs the host some 10 us.
_PER_REPLAY = 3


class Timed(Protocol):
    """What can be timed again and again; ``method`` is a Measurement's."""

    method: str

    def samples(self, count: int) -> list[float]:
        """Milliseconds of ``count`` launches."""
        ...


class Timer:
    """Makes Timed, and takes their samples."""

    # When the GPU last ended samples.
    _busy_until = -math.inf

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def eager(self, *launches: Launch) -> Timed:
        """Launches as they are, in turn, between two events."""
        return _Eager(self._flush, launches)

    def replayed(self, *launches: Launch) -> Timed:
        """The same from a CUDA graph, so that the host is out of the time; eager where that fails.

        The launches must be ours: nothing is allocated, and counters are left zero.
        """
        try:
            return _Replayed(self._flush, launches)
        except (RuntimeError, TypeError) as error:
            logger.warning("timing without a CUDA graph: %s", error)
            torch.cuda.synchronize()
            return self.eager(*launches)

    def time(
        self, timed: Timed, *, budget_ms: float = 60.0, give_up_ms: float | None = None
    ) -> list[float]:
        """Samples for about ``budget_ms``, at least 5, once the clocks have settled.

        Stops at 5 when their median is already above ``give_up_ms``.
        """
        first = timed.samples(2)[-1]
        self._warm_up(timed, first)
        timed.samples(_count(_SETTLE_MS, first, least=1))
        times = timed.samples(5)
        if give_up_ms is None or statistics.median(times) <= give_up_ms:
            more = int(min(100, max(5, budget_ms / max(first, 0.05))))
            times += timed.samples(more)
        self._busy_until = time.monotonic()
        return times

    def interleave(self, several: Sequence[Timed], rounds: int) -> list[list[float]]:
        """Samples of each, taken in ``rounds`` turns so that drift hits all alike.

        Each turn has another order (the same in every run): under a power cap a launch is faster
        after one that draws less, so that none may always have the same neighbour.
        """
        times: list[list[float]] = [[] for _ in several]
        first = [timed.samples(2)[-1] for timed in several]
        lot = random.Random(0)
        self._warm_up(several[0], first[0])
        for _ in range(rounds):
            for index in lot.sample(range(len(several)), len(several)):
                several[index].samples(_count(_SETTLE_MS, first[index], least=1))
                times[index] += several[index].samples(_count(_TURN_MS, first[index], least=3))
        self._busy_until = time.monotonic()
        return times

    def _warm_up(self, timed: Timed, ms: float) -> None:
        """Launch ``timed``, which takes ``ms``, until a rest of the GPU is made up for."""
        now = time.monotonic()
        rest = now - self._busy_until
        if rest > _REST_S:
            until = now + min(rest, _WARM_S)
            while time.monotonic() < until:
                timed.samples(_count(_SETTLE_MS, ms, least=1))


def _count(budget_ms: float, ms: float, *, least: int) -> int:
    """How many launches of ``ms`` a budget holds; no more than 30, for each flushes the cache."""
    return int(min(30, max(least, budget_ms / max(ms, 0.01))))


class _Eager:
    method = "events"

    def __init__(self, flush: torch.Tensor, launches: Sequence[Launch]) -> None:
        self._flush = flush
        self._launches = launches
        self._next = 0

    def samples(self, count: int) -> list[float]:
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        stops = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for start, stop in zip(starts, stops, strict=True):
            launch = self._launches[self._next % len(self._launches)]
            self._next += 1
            self._flush.zero_()
            start.record()
            launch()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in zip(starts, stops, strict=True)]


class _Replayed:
    method = "cuda_graph"

    def __init__(self, flush: torch.Tensor, launches: Sequence[Launch]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        self._graph = torch.cuda.CUDAGraph()
        self._held = launches
        count = -(-_PER_REPLAY // len(launches)) * len(launches)
        # External: nodes of the graph that stamp the event at each replay.
        starts, stops = (
            [torch.cuda.Event(enable_timing=True, external=True) for _ in range(count)]
            for _ in range(2)
        )
        self._events = list(zip(starts, stops, strict=True))
        with torch.cuda.stream(stream):
            # The stream's counter is made here, since none can be in a capture.
            for launch in launches:
                launch()
            stream.synchronize()
            self._graph.capture_begin()
            try:
                with counters.one_after_the_other():
                    for i, (start, stop) in enumerate(self._events):
                        flush.zero_()
                        start.record()
                        launches[i % len(launches)]()
                        stop.record()
            finally:
                self._graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def samples(self, count: int) -> list[float]:
        times: list[float] = []
        while len(times) < count:
            self._graph.replay()
            torch.cuda.synchronize()
            times += [start.elapsed_time(stop) for start, stop in self._events]
        return times[:count]
