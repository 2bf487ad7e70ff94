"""The finals: the fastest candidates timed in turns, and again without those that fail there.

A worker that dies or hangs takes all answers with it. Whose fault it was each candidate then shows
alone: one that fails is out, however fast it was before.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from autoflash.problem import Problem
from autoflash.store.record import Measurement, Trial
from autoflash.tuning.job import Candidate, Outcome
from autoflash.tuning.runner import Runner

_FINALISTS = 5
_ROUNDS = 7
# Alone it is launched more often than in all that came before: a fault may wait for a count.
_ROUNDS_ALONE = 2 * _ROUNDS
# After the first failure no question is asked later than this. Each has a limit of its own.
_REPEATS_S = 90.0
# Finalists within this of the best are ties: the one that needs less of the GPU wins, so that the
# choice is stable from run to run.
_TIE = 1.005


def finalists(timed: Sequence[Trial]) -> list[Trial]:
    """The fastest of these trials, and the fastest of each kernel that isn't among them."""
    ordered = sorted(timed, key=_first_ms)
    best = {trial.kernel: trial for trial in reversed(ordered)}
    head = ordered[:_FINALISTS]
    return head + [trial for trial in best.values() if all(trial is not t for t in head)]


def winners(trials: Sequence[Trial], measured: Mapping[int, Measurement]) -> list[int]:
    """The place in ``trials`` of each kernel's best, of those that were ``measured``."""
    places: dict[str, list[int]] = {}
    for i in measured:
        places.setdefault(trials[i].kernel, []).append(i)
    return [_winner(trials, {i: measured[i] for i in own}) for own in places.values()]


class Finals:
    """The finals of one study.

    ``timed`` gives the trials that may win; ``fall`` is told at once of one that failed, which then
    is none of them any more.
    """

    def __init__(
        self,
        runner: Runner,
        problem: Problem,
        timed: Callable[[], Sequence[Trial]],
        fall: Callable[[Trial, Outcome], None],
    ) -> None:
        self._runner = runner
        self._problem = problem
        self._timed = timed
        self._fall = fall
        self._deadline = math.inf

    def hold(self) -> tuple[list[Trial], dict[int, Measurement]]:
        """The finalists and, by place, the times of those that survived.

        Taken in turns, with the next fastest in the places of those that fell; alone where together
        they fail though none does alone, or where there is no time left for turns.
        """
        while chosen := finalists(self._timed()):
            candidates = [Candidate.of(t) for t in chosen]
            together = self._runner.interleave(self._problem, candidates, _ROUNDS)
            if any(map(_survived, together)):
                return chosen, self._settle(chosen, enumerate(together))
            self._deadline = min(self._deadline, time.monotonic() + _REPEATS_S)
            one = len(chosen) == 1
            measured = self._settle(chosen, enumerate(together) if one else self._alone(candidates))
            if len(measured) == len(chosen) or self._over():
                return chosen, measured
        return [], {}

    def _alone(self, candidates: Sequence[Candidate]) -> Iterator[tuple[int, Outcome]]:
        """Place and outcome of each that there is time to ask alone."""
        for i, candidate in enumerate(candidates):
            if self._over():
                return
            (outcome,) = self._runner.interleave(self._problem, [candidate], _ROUNDS_ALONE)
            yield i, outcome

    def _settle(
        self, chosen: Sequence[Trial], outcomes: Iterable[tuple[int, Outcome]]
    ) -> dict[int, Measurement]:
        """The times by place; who has none has fallen, as soon as it is known."""
        measured: dict[int, Measurement] = {}
        for i, outcome in outcomes:
            measurement = outcome.measurement or chosen[i].measurement
            if _survived(outcome) and measurement is not None:
                measured[i] = measurement
            else:
                self._fall(chosen[i], outcome)
        return measured

    def _over(self) -> bool:
        return time.monotonic() >= self._deadline


def _survived(outcome: Outcome) -> bool:
    return outcome.status.is_right


def _winner(trials: Sequence[Trial], measured: Mapping[int, Measurement]) -> int:
    best = min(m.median_ms for m in measured.values())
    ties = [i for i, m in measured.items() if m.median_ms <= best * _TIE]
    return min(
        ties,
        key=lambda i: (
            trials[i].shared_bytes or 0,
            trials[i].registers or 0,
            measured[i].median_ms,
        ),
    )


def _first_ms(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.median_ms
