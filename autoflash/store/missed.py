"""The file of missed calls: JSON Lines beside the store, written without a database.

Serving processes add a few lines when they end, `autoflash tune --missed` reads and merges them.
Like the store it is data from a stranger: each line is checked, and refused by itself.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import filelock

from autoflash.errors import AutoFlashError, InvalidInputError, StoreError
from autoflash.store.plain import missed_from_plain, missed_to_plain
from autoflash.store.record import MAX_CALLS, MissedCalls

# Forty thousand lines: far more than anyone tunes, and read in a few seconds.
MAX_BYTES = 16 << 20
# Lines that a compaction keeps.
MAX_KEPT = 10_000
# Twelve bytes for each of a name's 200 characters, at worst, and the rest.
_MAX_LINE = 4096
_MAX_REFUSALS = 20
# A process that ends must not hang.
_LOCK_TIMEOUT_S = 5.0


def missed_path(store: Path) -> Path:
    """Where the missed calls of those who are served from ``store`` stand."""
    return store.with_name(store.name + ".missed.jsonl")


def append(path: Path, missed: Iterable[MissedCalls]) -> None:
    """Add a line for each of ``missed``, all or none. Raises StoreError.

    Any number of processes may do so at once: each makes one write, under the lock that keeps a
    compaction from putting another file in its place meanwhile.
    """
    lines = "".join(map(_line, missed)).encode()
    with _locked(path):
        _exists(path)
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            # A line that someone left unfinished must not spoil ours: blank ones are skipped.
            text = b"\n" + lines if size else lines
            if size + len(text) > MAX_BYTES:
                raise StoreError(
                    f"{path}: would grow beyond {MAX_BYTES} bytes: `autoflash tune --missed` "
                    "merges its lines"
                )
            if file.write(text) != len(text):
                file.truncate(size)
                raise StoreError(f"{path}: can't be written: the disk is full")


def read(path: Path) -> tuple[list[MissedCalls], list[str]]:
    """What was noted, and why other lines were refused; nothing of a file that isn't there.

    Raises StoreError for a file that can't be read, or that ``append`` would not have left so.
    """
    if not _exists(path):
        return [], []
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise StoreError(f"{path}: can't be read: {error}") from error
    if len(data) > MAX_BYTES:
        raise StoreError(f"{path}: is larger than {MAX_BYTES} bytes: move it away")
    noted = []
    refusals: list[str] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            noted.append(missed_from_plain(_parse(line)))
        except AutoFlashError as error:
            # A file of something else has a reason for each of its lines.
            if len(refusals) <= _MAX_REFUSALS:
                refusals.append(f"line {number} refused: {str(error)[:300]}")
    if len(refusals) > _MAX_REFUSALS:
        refusals[_MAX_REFUSALS] = "further lines refused"
    return noted, refusals


def merged(noted: Iterable[MissedCalls]) -> list[MissedCalls]:
    """One for each problem and target, the most called first, then the one noted first."""
    found: dict[Any, MissedCalls] = {}
    for missed in noted:
        key = (missed.problem, missed.target.identity)
        so_far = found.get(key)
        if so_far is None:
            found[key] = missed
        else:
            found[key] = replace(
                so_far,
                calls=min(so_far.calls + missed.calls, MAX_CALLS),
                noted_at=max(so_far.noted_at, missed.noted_at),
            )
    return sorted(found.values(), key=lambda missed: -missed.calls)


def compact(path: Path) -> None:
    """Merge the lines of ``path``, so that it doesn't grow for ever; those refused go, and so do
    the least called beyond MAX_KEPT. Raises StoreError."""
    if not _exists(path):
        return
    with _locked(path):
        noted, _ = read(path)
        draft = path.with_name(path.name + ".new")
        draft.unlink(missing_ok=True)
        with draft.open("x", encoding="utf-8") as file:
            file.writelines(map(_line, merged(noted)[:MAX_KEPT]))
        shutil.copymode(path, draft)
        draft.replace(path)


def _line(missed: MissedCalls) -> str:
    return json.dumps(missed_to_plain(missed), allow_nan=False) + "\n"


def _parse(line: bytes) -> object:
    if len(line) > _MAX_LINE:
        raise InvalidInputError(f"longer than {_MAX_LINE} bytes")
    try:
        return json.loads(line.decode("utf-8"))
    # Not UTF-8, too deep, or a number of more digits than Python converts.
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"not JSON: {str(error)[:200]}") from error


def _exists(path: Path) -> bool:
    """Whether there is a file. Raises StoreError for something else, which might block."""
    try:
        if path.is_file():
            return True
        odd = path.exists()
    except OSError as error:
        raise StoreError(f"{path}: can't be looked at: {error}") from error
    if odd:
        raise StoreError(f"{path}: is not a file: move it away")
    return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(path.with_name(path.name + ".lock"), timeout=_LOCK_TIMEOUT_S):
            yield
    except filelock.Timeout as error:
        raise StoreError(
            f"{path}: another process held its lock for {_LOCK_TIMEOUT_S:g} s"
        ) from error
    # Some file systems know no locks.
    except (OSError, NotImplementedError) as error:
        raise StoreError(f"{path}: can't be written: {error}") from error
