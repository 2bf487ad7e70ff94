"""Studies on the GPUs of one host: a thread for each GPU, and one queue of problems."""

import threading
from collections.abc import Callable, Iterator, Sequence

from autoflash.problem import Problem
from autoflash.store.base import AnyStore
from autoflash.tuning.progress import Budget, Listener, TuneResult
from autoflash.tuning.runner import Runner
from autoflash.tuning.study import tune_each

# How often a thread that waits for others looks whether Ctrl-C was pressed, in seconds.
_LOOK_S = 0.2


def tune_on(
    runners: Sequence[Runner],
    problems: Sequence[Problem],
    store: AnyStore,
    budget: Budget,
    listener: Listener,
) -> list[TuneResult]:
    """The results of ``problems``, in their order.

    On KeyboardInterrupt every study stores its best so far, and it is raised again; an error of one
    runner ends the others' studies in the same way.
    """
    queue = _Queue(problems)
    stop = threading.Event()
    results: dict[int, TuneResult] = {}
    errors: list[BaseException] = []

    def work(runner: Runner) -> None:
        places: list[int] = []
        try:
            for result in tune_each(queue.taking(places), runner, store, budget, listener, stop):
                results[places.pop(0)] = result
                forget_plans()
                if result.interrupted:
                    raise KeyboardInterrupt
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            errors.append(error)
            stop.set()

    if len(runners) == 1:
        # In this thread, where Ctrl-C arrives.
        work(runners[0])
    else:
        _in_threads(work, runners, stop, errors)
    if errors:
        raise next((e for e in errors if not isinstance(e, KeyboardInterrupt)), errors[0])
    return [results[place] for place in sorted(results)]


def forget_plans() -> None:
    """Let the next calls of this process look the records up again."""
    from autoflash.runtime.dispatch import forget

    forget()


def _in_threads(
    work: Callable[[Runner], None],
    runners: Sequence[Runner],
    stop: threading.Event,
    errors: list[BaseException],
) -> None:
    threads = [
        threading.Thread(target=work, args=(runner,), name=f"autoflash-gpu-{i}")
        for i, runner in enumerate(runners)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        try:
            for thread in threads:
                thread.join(_LOOK_S)
        except KeyboardInterrupt as error:
            errors.append(error)
            stop.set()


class _Queue:
    """Problems with their places, handed out once each to whichever thread asks."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self._left = iter(enumerate(problems))
        self._lock = threading.Lock()

    def taking(self, places: list[int]) -> Iterator[Problem]:
        """The problems that the caller gets; the place of each is appended to ``places``."""
        while True:
            with self._lock:
                place, problem = next(self._left, (None, None))
            if place is None or problem is None:
                return
            places.append(place)
            yield problem
