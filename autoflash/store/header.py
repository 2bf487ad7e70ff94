"""The first line of our JSON Lines files: what the file is, and the count and digest of the lines
below it."""

import hashlib
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from autoflash.errors import AutoFlashError, StoreError
from autoflash.store.digest import sha256
from autoflash.store.untrusted import parse_object

MAX_HEADER = 4096


@dataclass(frozen=True, kw_only=True)
class Form:
    """A kind of file. ``more`` names what its header holds beside what all do; ``optional`` what it
    may hold; ``again`` is what to do about a file of another version."""

    name: str
    version: int
    again: str
    more: Set[str] = frozenset()
    optional: Set[str] = frozenset()

    @property
    def fields(self) -> Set[str]:
        """What the header must hold."""
        return {"format", "version", "count", "digest"} | self.more

    def header(self, body: str, **more: Any) -> dict[str, Any]:
        """The header of the lines ``body``."""
        return {
            "format": self.name,
            "version": self.version,
            "count": body.count("\n"),
            "digest": sha256(body),
            **more,
        }

    def parse(self, line: bytes) -> dict[str, Any]:
        """The header that a stranger's ``line`` is. Raises StoreError if it is none of ours."""
        if not line:
            raise StoreError(f"not an {self.name} file: it is empty")
        try:
            header = parse_object(line, limit=MAX_HEADER)
        except AutoFlashError as error:
            raise StoreError(f"not an {self.name} file: its first line: {error}") from error
        if header.get("format") != self.name:
            raise StoreError(
                f'not an {self.name} file: its first line has no "format": "{self.name}"'
            )
        version = header.get("version")
        if type(version) is not int or version != self.version:
            raise StoreError(
                f"{self.name} version {str(version)[:80]}: this autoflash reads version "
                f"{self.version}; upgrade autoflash, or {self.again}"
            )
        good = (
            set(header) - self.optional == self.fields
            and type(header["count"]) is int
            and isinstance(header["digest"], str)
        )
        if not good:
            named = ", ".join(sorted(self.fields - {"format", "version"}))
            raise StoreError(f"not an {self.name} file: its first line needs {named} and no more")
        return header


def is_whole(header: dict[str, Any], body: bytes) -> bool:
    """Whether ``body`` is, to the byte, what ``header`` was made of."""
    return bool(hashlib.sha256(body).hexdigest() == header["digest"])
