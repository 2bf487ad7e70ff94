"""Candidates that were timed while the GPU was busy or throttled, to be timed again later."""

from collections import Counter, deque

from autoflash.store.record import TrialStatus
from autoflash.tuning.job import Candidate, Outcome

# So many others are measured first: what disturbed the GPU may be over by then.
_LATER = 8
_MOST = 2


class Retries:
    """A queue of noisy candidates, each of which comes back at most twice.

    One that was slower than ``hopeless`` times the best clean time isn't worth it.
    """

    def __init__(self, hopeless: float) -> None:
        self._hopeless = hopeless
        self._queue: deque[tuple[int, Candidate, Outcome]] = deque()
        self._tries: Counter[Candidate] = Counter()
        self._measured = 0

    def note(self, candidate: Candidate, outcome: Outcome) -> None:
        """A candidate was measured: ``outcome``, with its resources."""
        self._measured += 1
        if outcome.status is TrialStatus.noisy and self._tries[candidate] < _MOST:
            self._tries[candidate] += 1
            self._queue.append((self._measured + _LATER, candidate, outcome))

    def due(self, best_ms: float | None, *, nothing_else: bool) -> tuple[Candidate, Outcome] | None:
        """The next one whose turn has come, or who is all there is to do, with its last outcome."""
        while self._queue and (nothing_else or self._queue[0][0] <= self._measured):
            _, candidate, outcome = self._queue.popleft()
            ms = outcome.measurement.median_ms if outcome.measurement else None
            if best_ms is None or ms is None or ms <= best_ms * self._hopeless:
                return candidate, outcome
        return None
