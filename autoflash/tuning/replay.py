"""How soon a search finds the best: replayed over a space that was timed to its end.

Nothing runs: the times are those of recorded trials, so that ways of searching can be compared on
equal terms and many times over.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoflash.kernels import KERNELS
from autoflash.store.record import Trial
from autoflash.tuning.job import Candidate
from autoflash.tuning.offline import model_ms
from autoflash.tuning.resources import Resources
from autoflash.tuning.search import Search, ranked

# A candidate to try next, and being told of its time (None: it failed).
Asking = Callable[[], Candidate | None]
Telling = Callable[[Candidate, float | None], None]


@dataclass(frozen=True, kw_only=True)
class Space:
    """The trials of one problem and target, every feasible config among them."""

    trials: Sequence[Trial]

    @property
    def times(self) -> dict[Candidate, float | None]:
        """Milliseconds by candidate; None for those that failed."""
        return {Candidate.of(trial): trial.timed_ms for trial in self.trials}

    @property
    def best_ms(self) -> float:
        """The fastest time there is."""
        return min(ms for ms in self.times.values() if ms is not None)

    def ranking(self) -> list[Candidate]:
        """The candidates as the written model ranks them before anything is compiled."""
        first = self.trials[0]
        kernels = [KERNELS[name] for name in sorted({trial.kernel for trial in self.trials})]
        known = self.times
        return [c for c in ranked(kernels, first.problem, first.target) if c in known]

    def compiled_ranking(self) -> list[Candidate]:
        """The candidates that compiled, as the written model ranks them by what their binaries
        need: the offline order."""
        scored = []
        for trial in self.trials:
            resources = Resources.of(trial)
            if resources is None:
                continue
            candidate = Candidate.of(trial)
            ms = model_ms(candidate, trial.problem, trial.target, resources)
            scored.append((ms, trial.kernel, trial.config.to_json(), candidate))
        scored.sort(key=lambda item: item[:3])
        return [candidate for *_, candidate in scored]


def best_so_far(
    space: Space, ask: Asking, tell: Telling, count: int, depth: int = 1
) -> list[float]:
    """The best share of the exhaustive best's rate after each of ``count`` trials, 0 at first.

    ``depth`` candidates are under way at a time, as when several compile ahead: a search hears of
    one only ``depth`` later.
    """
    times, best_ms = space.times, space.best_ms
    waiting: deque[Candidate] = deque()
    shares: list[float] = []
    best = 0.0
    while len(shares) < count:
        while len(waiting) < depth and (candidate := ask()) is not None:
            waiting.append(candidate)
        if not waiting:
            break
        candidate = waiting.popleft()
        ms = times.get(candidate)
        tell(candidate, ms)
        best = max(best, best_ms / ms if ms else 0.0)
        shares.append(best)
    return shares


def by_search(space: Space, advice: Iterable[Candidate], seed: int) -> tuple[Asking, Telling]:
    """The tuner's own search: ``advice``, the ranking's first, then TPE."""
    search = Search(space.ranking(), first=advice, seed=seed)
    return search.ask, search.tell


def in_order(candidates: Iterable[Candidate]) -> tuple[Asking, Telling]:
    """One after the other, whatever their times."""
    left: Iterator[Candidate] = iter(candidates)
    return (lambda: next(left, None)), (lambda candidate, ms: None)


def at_random(space: Space, seed: int) -> tuple[Asking, Telling]:
    """In an order drawn by ``seed``."""
    candidates = sorted(space.times, key=lambda c: (c.kernel.name, c.config.to_json()))
    random.Random(seed).shuffle(candidates)
    return in_order(candidates)


def trials_to_reach(shares: Sequence[float], share: float) -> int | None:
    """How many trials it took to reach ``share`` of the best's rate; None if it never did."""
    return next((i + 1 for i, found in enumerate(shares) if found >= share), None)
