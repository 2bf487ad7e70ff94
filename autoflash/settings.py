"""Every environment variable that AutoFlash reads, typed. ``os.environ`` is read nowhere else.

| variable               | meaning                                      | default              |
|------------------------|----------------------------------------------|----------------------|
| AUTOFLASH_DB           | the store: a path, or a PostgreSQL URL       | user data directory  |
| AUTOFLASH_SITE_DB      | a database that is only read, path or URL    | none                 |
| AUTOFLASH_CACHE_DIR    | folder of the emitted kernel files           | user cache directory |
| AUTOFLASH_MODE         | lookup (best known) or lock (exact only)     | lookup               |
| AUTOFLASH_LOCK         | a lock file, which alone is served from      | none                 |
| AUTOFLASH_WORKERS      | compiler processes while tuning              | this process's cores |
| AUTOFLASH_SHIPPED_DB   | 0 ignores the records that ship              | 1                    |
| AUTOFLASH_ORIGIN       | label of this host in new records            | host name            |
| AUTOFLASH_NOTE_MISSED  | 1 notes which problems are called untuned    | 0                    |
| AUTOFLASH_TEST_KERNELS | a module with kernels to test the tuner with | none                 |
| CUDA_VISIBLE_DEVICES   | the GPUs of which a tune takes some          | all                  |
"""

import os
import socket
import urllib.parse
from dataclasses import dataclass, field, replace
from pathlib import Path

from autoflash.errors import InvalidInputError

MODES = ("lookup", "lock")
_POSTGRES = "postgresql+psycopg"


@dataclass(frozen=True)
class DatabaseUrl:
    """Where a PostgreSQL database is. ``str`` and ``repr`` leave out what may be secret: the
    password and the query."""

    with_password: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> "DatabaseUrl":
        """Raises InvalidInputError, which says nothing of ``text`` but its scheme."""
        scheme, _, rest = text.partition("://")
        if scheme not in ("postgresql", _POSTGRES):
            raise InvalidInputError(
                f"scheme {scheme[:40]!r} is not served: give a file path or "
                f"{_POSTGRES}://user@host/database"
            )
        try:
            parts = urllib.parse.urlsplit(f"{_POSTGRES}://{rest}")
            _ = parts.port
        except ValueError:
            # Its words would show a part of the URL.
            raise InvalidInputError(
                "the host or the port is not understood: special characters of a password "
                "must be percent-encoded"
            ) from None
        if not parts.path.strip("/"):
            raise InvalidInputError(f"names no database: {_POSTGRES}://user@host/database")
        return cls(f"{_POSTGRES}://{rest}")

    def __str__(self) -> str:
        parts = urllib.parse.urlsplit(self.with_password)
        who, at, where = parts.netloc.rpartition("@")
        return f"{parts.scheme}://{who.partition(':')[0]}{at}{where}{parts.path}"

    def __repr__(self) -> str:
        return f"DatabaseUrl({str(self)!r})"


# Where a store lies.
Place = Path | DatabaseUrl


def place_of(text: str) -> Place:
    """Where the store ``text`` lies: a path, or the URL of a PostgreSQL database. Raises
    InvalidInputError."""
    if "://" in text:
        return DatabaseUrl.parse(text)
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise InvalidInputError(f"{text!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A snapshot of the environment.

    With a ``db_url`` that is the store; beside ``db_path`` lies what stays on this host. A
    ``site_db`` is one that others fill. With a ``lock_path`` the mode is lock.
    """

    db_path: Path
    db_url: DatabaseUrl | None = None
    site_db: Place | None = None
    cache_dir: Path
    mode: str
    lock_path: Path | None
    workers: int
    use_shipped_records: bool
    origin: str
    visible_gpus: tuple[str, ...]
    note_missed: bool

    @property
    def db(self) -> Place:
        """The user's store."""
        return self.db_url or self.db_path

    def stores(self) -> dict[str, Place]:
        """The databases to serve from, by layer, the first one first."""
        return {"user": self.db} | ({} if self.site_db is None else {"site": self.site_db})

    def at(self, store: Place) -> "Settings":
        """The same with another user's store; what stays on this host lies where it lay if that is
        a server."""
        if isinstance(store, DatabaseUrl):
            return replace(self, db_url=store)
        return replace(self, db_path=store, db_url=None)


def settings() -> Settings:
    """Read the environment. Raises InvalidInputError for a value out of its range."""
    mode = os.environ.get("AUTOFLASH_MODE", "lookup")
    if mode not in MODES:
        raise InvalidInputError(f"AUTOFLASH_MODE={mode!r}: must be one of {', '.join(MODES)}")
    lock_path = _lock_path()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    db_url = _url("AUTOFLASH_DB")
    db_path = None if db_url else _path("AUTOFLASH_DB")
    return Settings(
        db_path=db_path or _default_dir("data") / "autoflash.sqlite",
        db_url=db_url,
        site_db=_url("AUTOFLASH_SITE_DB") or _path("AUTOFLASH_SITE_DB"),
        cache_dir=_path("AUTOFLASH_CACHE_DIR") or _default_dir("cache") / "kernels",
        mode=mode if lock_path is None else "lock",
        lock_path=lock_path,
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


def _url(variable: str) -> DatabaseUrl | None:
    text = os.environ.get(variable, "")
    if "://" not in text:
        return None
    try:
        return DatabaseUrl.parse(text)
    except InvalidInputError as error:
        raise InvalidInputError(f"{variable}: {error}") from None


def _path(variable: str) -> Path | None:
    text = os.environ.get(variable)
    if not text:
        return None
    if "://" in text:
        raise InvalidInputError(f"{variable}: give a path, not a URL")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise InvalidInputError(f"{variable}={text!r}: {error}") from error


def _lock_path() -> Path | None:
    if os.environ.get("AUTOFLASH_LOCK") == "":
        # What was meant to lock must not be served unlocked for a variable that isn't set.
        raise InvalidInputError("AUTOFLASH_LOCK is empty: name the lock file, or unset it")
    return _path("AUTOFLASH_LOCK")


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
