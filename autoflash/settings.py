"""Every environment variable that AutoFlash reads, typed. ``os.environ`` is read nowhere else.

| variable               | meaning                                      | default              |
|------------------------|----------------------------------------------|----------------------|
| AUTOFLASH_DB           | path of the SQLite store                     | user data directory  |
| AUTOFLASH_CACHE_DIR    | folder of the emitted kernel files           | user cache directory |
| AUTOFLASH_MODE         | lookup (best known) or lock (exact only)     | lookup               |
| AUTOFLASH_WORKERS      | compiler processes while tuning              | this process's cores |
| AUTOFLASH_SHIPPED_DB   | 0 ignores the records that ship              | 1                    |
| AUTOFLASH_ORIGIN       | label of this host in new records            | host name            |
| AUTOFLASH_NOTE_MISSED  | 1 notes which problems are called untuned    | 0                    |
| AUTOFLASH_TEST_KERNELS | a module with kernels to test the tuner with | none                 |
| CUDA_VISIBLE_DEVICES   | the GPUs of which a tune takes some          | all                  |
"""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from autoflash.errors import InvalidInputError

MODES = ("lookup", "lock")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A snapshot of the environment."""

    db_path: Path
    cache_dir: Path
    mode: str
    workers: int
    use_shipped_records: bool
    origin: str
    visible_gpus: tuple[str, ...]
    note_missed: bool


def settings() -> Settings:
    """Read the environment. Raises InvalidInputError for a value out of its range."""
    mode = os.environ.get("AUTOFLASH_MODE", "lookup")
    if mode not in MODES:
        raise InvalidInputError(f"AUTOFLASH_MODE={mode!r}: must be one of {', '.join(MODES)}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return Settings(
        db_path=_path("AUTOFLASH_DB") or _default_dir("data") / "autoflash.sqlite",
        cache_dir=_path("AUTOFLASH_CACHE_DIR") or _default_dir("cache") / "kernels",
        mode=mode,
        workers=_workers(),
        use_shipped_records=os.environ.get("AUTOFLASH_SHIPPED_DB", "1") != "0",
        origin=os.environ.get("AUTOFLASH_ORIGIN", socket.gethostname())[:64],
        visible_gpus=tuple(map(str.strip, visible.split(","))) if visible else (),
        note_missed=_switch("AUTOFLASH_NOTE_MISSED"),
    )


def kernels_module() -> str:
    """The module of AUTOFLASH_TEST_KERNELS; "" by default. Asked while autoflash is imported, when
    no other variable may raise yet, so it is no part of Settings."""
    return os.environ.get("AUTOFLASH_TEST_KERNELS", "")


def _path(variable: str) -> Path | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if "://" in text:
        raise InvalidInputError(f"{variable}={text!r}: give a file path; only SQLite is served yet")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise InvalidInputError(f"{variable}={text!r}: {error}") from error


def _default_dir(kind: str) -> Path:
    import platformdirs

    user_dir = {"data": platformdirs.user_data_path, "cache": platformdirs.user_cache_path}[kind]
    return user_dir("autoflash", appauthor=False)


def _switch(variable: str) -> bool:
    text = os.environ.get(variable, "0")
    if text not in ("0", "1"):
        raise InvalidInputError(f"{variable}={text!r}: must be 0 or 1")
    return text == "1"


def _workers() -> int:
    text = os.environ.get("AUTOFLASH_WORKERS")
    if text is None:
        affinity = getattr(os, "sched_getaffinity", None)
        return len(affinity(0)) if affinity else os.cpu_count() or 1
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise InvalidInputError(f"AUTOFLASH_WORKERS={text!r}: must be a whole number, at least 1")
    return int(text)
