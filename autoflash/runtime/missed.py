"""Which problems are called and not tuned: counted in memory, written when the process ends.

Off by default, and then nothing here is on a call's path. With AUTOFLASH_NOTE_MISSED=1 a plan that
no record tuned for its problem has made counts its launches. A compiled model launches through the
same plans; a CUDA graph only while it is captured, so its replays can't be counted. Neither can the
calls of a process that is killed.
"""

import atexit
import functools
import importlib
import itertools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from autoflash.errors import StoreError
from autoflash.problem import Problem
from autoflash.runtime.choose import Choice
from autoflash.settings import settings
from autoflash.target import Target

if TYPE_CHECKING:
    from autoflash.runtime.launcher import Addresses, Bound

logger = logging.getLogger(__name__)

# A server with free-form lengths would note them without end. The most used come early.
MAX_PROBLEMS = 10_000


class _Calls:
    """How often a problem was called. One step of ``count`` is C code, so threads lose none."""

    def __init__(self) -> None:
        self.count = itertools.count()
        self._taken = 0

    def take(self) -> int:
        """The calls since the last time."""
        # Looking is a step, too.
        seen = next(self.count)
        fresh, self._taken = seen - self._taken, seen + 1
        return fresh


_calls: dict[tuple[Problem, Target], _Calls] = {}


def counted(run: "Bound", choice: Choice, problem: Problem, target: Target) -> "Bound":
    """``run``, with its calls counted as missed ones of ``problem``; ``run`` itself if the choice
    can't be bettered by a tune or nothing shall be noted."""
    if not choice.tunable or not settings().note_missed:
        return run
    _start()
    calls = _calls.get((problem, target))
    if calls is None:
        if len(_calls) >= MAX_PROBLEMS:
            return run
        calls = _calls.setdefault((problem, target), _Calls())
        if len(_calls) == MAX_PROBLEMS:
            logger.warning("%d problems were called untuned: no more are noted", MAX_PROBLEMS)
    count = calls.count

    def run_and_count(stream: int, addresses: "Addresses") -> None:
        run(stream, addresses)
        next(count)

    return run_and_count


def flush(db_path: Path) -> None:
    """Add what was counted since the last time to the file beside ``db_path``; a failure costs no
    more than a warning."""
    from autoflash.store.missed import append, missed_path
    from autoflash.store.record import MissedCalls, time_stamp

    now = time_stamp()
    noted = [
        MissedCalls(problem=problem, target=target, calls=number, noted_at=now)
        for (problem, target), calls in list(_calls.items())
        if (number := calls.take())
    ]
    if not noted:
        return
    try:
        append(missed_path(db_path), noted)
    except StoreError as error:
        logger.warning("the calls that were not tuned are not noted: %s", error)


@functools.cache
def _start() -> None:
    """See that the counts are written when this process ends; once, when there is one."""
    # A process that is ending may no longer load what starts threads, as filelock's asyncio would.
    importlib.import_module("autoflash.store.missed")
    atexit.register(flush, settings().db_path)
    os.register_at_fork(after_in_child=_leave_to_parent)


def _leave_to_parent() -> None:
    """In a forked child: what was counted before is the parent's to write."""
    for calls in _calls.values():
        calls.take()
