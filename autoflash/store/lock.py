"""Lock files: which config alone may run which calls, as JSON Lines that git can compare.

A header with the versions that it was made with, then a line for each kernel and config of a bucket
on a target, sorted. The same choices give the same text. A lock is read as a stranger's file and,
unlike an exchange file, as a whole: what isn't good to the last line locks nothing.
"""

import dataclasses
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autoflash.errors import AutoFlashError, InvalidInputError, LockError, StoreError
from autoflash.kernels.access import access_name
from autoflash.kernels.kernel import Access
from autoflash.problem import Bucket, Problem
from autoflash.store.digest import canonical
from autoflash.store.exchange import place_of_choice
from autoflash.store.header import MAX_HEADER, Form, is_whole
from autoflash.store.plain import lock_entry_from_plain, lock_entry_to_plain
from autoflash.store.record import MAX_TEXT, LockEntry
from autoflash.store.untrusted import parse_object, read_bytes
from autoflash.target import Target

FORM = Form(
    name="autoflash-lock",
    version=1,
    again="lock again (`autoflash lock`)",
    more=frozenset({"versions"}),
)
VERSIONS = ("autoflash", "triton", "torch", "cuda", "driver")
# A hundred thousand entries.
MAX_BYTES = 64 << 20
_MAX_LINE = 8 << 10

# What an entry is found by: the target's identity, the bucket, and what the tensors are like.
Key = tuple[tuple[object, ...], Bucket, str]


@dataclass(frozen=True, kw_only=True)
class Lock:
    """What a lock file says. ``versions`` are those that it was made with, '' where unknown;
    ``digest`` is that of its lines."""

    versions: Mapping[str, str]
    entries: tuple[LockEntry, ...]
    digest: str

    @cached_property
    def _by_key(self) -> dict[Key, LockEntry]:
        return {key: entry for entry in self.entries for key in keys_of(entry)}

    def find(self, problem: Problem, target: Target, access: Access) -> LockEntry | None:
        """What runs a call of ``problem`` whose tensors are like ``access``, if it is locked."""
        name = access_name(access, problem.op)
        return self._by_key.get((target.identity, Bucket.of(problem), name))


def keys_of(entry: LockEntry) -> list[Key]:
    """All that ``entry`` is found by."""
    return [(entry.target.identity, entry.bucket, name) for name in entry.access]


def dump(entries: Iterable[LockEntry], versions: Mapping[str, str]) -> str:
    """The file of ``entries``: the same whatever their order. Raises InvalidInputError for two that
    answer the same call."""
    known = list(entries)
    _refuse_twice(known)
    # The text decides between what differs in nothing but tensors.
    told = sorted((place_of_choice(e), canonical(lock_entry_to_plain(e))) for e in known)
    body = "".join(text + "\n" for _, text in told)
    return canonical(FORM.header(body, versions=dict(versions))) + "\n" + body


def load(path: Path) -> Lock:
    """The lock that the file ``path`` holds. Raises LockError, which names it."""
    try:
        data = read_bytes(path, limit=MAX_BYTES)
    except StoreError as error:
        raise LockError(str(error)) from error
    try:
        return parse(data)
    except LockError as error:
        raise LockError(f"{path}: {error}") from error


def parse(data: bytes) -> Lock:
    """The lock that a stranger's ``data`` is. Raises LockError unless all of it is good."""
    lines = io.BytesIO(data)
    try:
        header = FORM.parse(lines.readline(MAX_HEADER + 1))
        versions = _versions(header["versions"])
    except AutoFlashError as error:
        raise LockError(str(error)) from error
    body = data[lines.tell() :]
    entries = []
    for number, line in enumerate(lines, 2):
        try:
            plain = parse_object(line.removesuffix(b"\n"), limit=_MAX_LINE)
            entries.append(lock_entry_from_plain(plain))
        except AutoFlashError as error:
            raise LockError(f"line {number}: {str(error)[:300]}") from error
    if not is_whole(header, body) or len(entries) != header["count"]:
        raise LockError(
            "it was cut or changed since it was written, its lines aren't those of its digest: "
            "take the file as it was, or lock again (`autoflash lock`)"
        )
    try:
        _refuse_twice(entries)
    except InvalidInputError as error:
        raise LockError(str(error)) from error
    return Lock(versions=versions, entries=tuple(entries), digest=header["digest"])


def _versions(plain: Any) -> dict[str, str]:
    if not isinstance(plain, dict) or set(plain) != set(VERSIONS):
        raise InvalidInputError(f"versions: must be {', '.join(VERSIONS)} and no more")
    for name, text in plain.items():
        if not isinstance(text, str) or len(text) > MAX_TEXT or not text.isprintable():
            raise InvalidInputError(f"versions: {name} must be short, printable text")
    return plain


def _refuse_twice(entries: Iterable[LockEntry]) -> None:
    seen: dict[Key, LockEntry] = {}
    for entry in entries:
        for key in keys_of(entry):
            if key in seen:
                raise InvalidInputError(
                    f"two entries for {key[2]} tensors of {entry.bucket.label()} on "
                    f"{entry.target.name[:80]}: {seen[key].kernel} and {entry.kernel}"
                )
            seen[key] = entry


def merged(entries: Iterable[LockEntry]) -> list[LockEntry]:
    """Entries that say the same but for their access made one."""
    found: dict[LockEntry, set[str]] = {}
    for entry in entries:
        found.setdefault(dataclasses.replace(entry, access=("",)), set()).update(entry.access)
    return [dataclasses.replace(e, access=tuple(sorted(names))) for e, names in found.items()]
