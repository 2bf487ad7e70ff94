"""Files from a stranger: opened so that they can't surprise, parsed so that they can't mislead."""

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from autoflash.errors import InvalidInputError, StoreError

# So many are named; what is of something else has a reason for each of its lines.
MAX_REFUSALS = 1000
MAX_BYTES = 256 << 20
# A record has objects in an object, and nothing deeper.
MAX_DEPTH = 8
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_BRACKETS = re.compile(r"[\[{]")


def read_bytes(path: Path, *, limit: int = MAX_BYTES) -> bytes:
    """What the file ``path`` holds. Raises StoreError for what isn't a file of at most ``limit``.

    A link is followed only to a file of its own folder (`latest.jsonl`): in a folder that others
    write to, one that leads elsewhere would have us read, and quote, what they couldn't.
    """
    try:
        real = _resolved(path)
        # A pipe would block at the opening, and a link put here since would lead elsewhere.
        handle = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            os.close(handle)
            raise StoreError(f"{path}: is not a file")
        with open(handle, "rb") as file:  # noqa: PTH123 - of a descriptor
            data = file.read(limit + 1) if found.st_size <= limit else None
    # ValueError: a NUL in the path. RuntimeError: links in a circle, before Python 3.13.
    except (OSError, ValueError, RuntimeError) as error:
        raise StoreError(f"{path}: can't be read: {error}") from error
    if data is None or len(data) > limit:
        raise StoreError(f"{path}: is larger than {limit} bytes")
    return data


def exposure(path: Path) -> list[str]:
    """Warnings: who else may change what ``path`` holds. A sticky folder, as /tmp is, is none:
    there nobody replaces another's file."""
    found = []
    folder = path.absolute().parent
    for place, what in ((path, "the file"), (folder, f"its folder {folder}")):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            found.append(
                f"{path}: {what} is world-writable: any user of this host may have changed it"
            )
    return found


def parse_object(line: bytes, *, limit: int) -> dict[str, Any]:
    """The JSON object that ``line`` holds. Raises InvalidInputError for anything else: what two
    readers could read differently (a key twice, NaN), and what is too long or too deep."""
    if len(line) > limit:
        raise InvalidInputError(f"longer than {limit} bytes")
    try:
        text = line.decode("utf-8")
        _check_depth(text)
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except InvalidInputError:
        raise
    # Not UTF-8, not JSON, too deep, or a number of more digits than Python converts.
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"not JSON: {str(error)[:120]}") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"must be an object, not {type(found).__name__}")
    return found


def refuse_stamp(created_at: str, latest: str) -> None:
    """Raises StoreError for a date after ``latest``."""
    if created_at > latest:
        raise StoreError(
            f"created_at={created_at!r}: more than a day ahead of this host's "
            "clock; its word would stand until then"
        )


def write_text(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Put ``text`` in the place of ``path``, whole or not at all. Raises StoreError.

    A link there is replaced, not followed.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        write_new(draft, text, mode=mode)
        try:
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: can't be written: {error}") from error


def write_new(path: Path, text: str, *, mode: int) -> None:
    """Write a file that isn't there yet. Raises OSError, FileExistsError for one that is."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(handle, "w", encoding="utf-8", newline="") as file:  # noqa: PTH123
        file.write(text)
        file.flush()
        os.fsync(handle)


def _resolved(path: Path) -> Path:
    if not path.is_symlink():
        return path
    real = path.resolve(strict=True)
    if real.parent != path.parent.resolve(strict=True):
        raise StoreError(f"{path}: is a link that leads out of its folder: name the file it means")
    return real


def _check_depth(text: str) -> None:
    # Most lines have no bracket inside a string, and as many outside as a record has objects.
    if len(_BRACKETS.findall(text)) <= MAX_DEPTH:
        return
    depth = 0
    for character in _STRING.sub("", text):
        depth += (character in "[{") - (character in "]}")
        if depth > MAX_DEPTH:
            raise InvalidInputError(f"nested deeper than {MAX_DEPTH}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidInputError(f"key {twice[:80]!r} stands twice")
    return found


def _refuse_constant(text: str) -> None:
    raise InvalidInputError(f"{text} is no number")
