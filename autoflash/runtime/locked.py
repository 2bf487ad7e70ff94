"""Serving by a lock file alone. What it locks is run just as it was, or not at all."""

import functools
import logging
import shlex
from pathlib import Path

from autoflash.codegen.render import compiled_hash
from autoflash.errors import LockError, MissingRecordError, UnsupportedError
from autoflash.kernels import KERNELS, kernels_for
from autoflash.kernels.access import access_name
from autoflash.kernels.kernel import Access
from autoflash.problem import Problem
from autoflash.store.lock import Lock, load
from autoflash.store.record import LockEntry
from autoflash.store.untrusted import exposure
from autoflash.target import Target
from autoflash.version import VERSION

logger = logging.getLogger(__name__)

_AGAIN = "or lock again (`autoflash lock`)"


def locked_entry(
    path: Path, problem: Problem, target: Target, access: Access
) -> tuple[LockEntry, str]:
    """The entry of the lock at ``path`` that runs a call, and the lock's digest.

    The file is read once per process. Raises MissingRecordError if the call isn't locked, LockError
    if the file isn't good or what it locks can't be run here just as it was.
    """
    lock = _read(path)
    entry = lock.find(problem, target, access)
    if entry is None:
        try:
            kernels_for(problem, target)
        except UnsupportedError as error:
            raise MissingRecordError(f"{path} has no entry for it: {error}") from error
        raise MissingRecordError(
            f"{path} has no entry for {problem.label()} on {target.name} "
            f"(tensors: {access_name(access, problem.op)}): "
            f"run `{lock_command(path, problem)}` there, or unset AUTOFLASH_LOCK"
        )
    reason = why_not_here(lock) or why_not_the_same(entry, problem, target, lock)
    if reason is not None:
        raise LockError(f"{path}: {reason}")
    return entry, lock.digest


def lock_command(path: Path, problem: Problem) -> str:
    """The command that adds ``problem``, on the GPU where it runs, to the lock at ``path``."""
    return f"autoflash lock --add {shlex.quote(str(path))} {problem.flags()}"


def why_not_here(lock: Lock) -> str | None:
    """Why nothing of ``lock`` runs here as it was, or None: another Triton compiles the same source
    to other code."""
    import triton

    made_with = lock.versions["triton"]
    if made_with == triton.__version__:
        return None
    return (
        f"was locked with triton {made_with or '?'}, and this is triton {triton.__version__}, "
        f"which may compile the same source to other code: install that, {_AGAIN}"
    )


def why_not_the_same(entry: LockEntry, problem: Problem, target: Target, lock: Lock) -> str | None:
    """Why ``entry`` can't run ``problem``, of its bucket, just as it was locked, or None."""
    kernel = KERNELS[entry.kernel]
    reason = kernel.serves(problem, target) or kernel.space.why_not(
        entry.config, problem, target, advice=False
    )
    if reason is not None:
        return f"the {entry.kernel} locked for {entry.bucket.label()} can't run it: {reason}"
    found = compiled_hash(kernel, problem, entry.config)
    if found == entry.source_hash:
        return None
    return (
        f"{entry.kernel} for {problem.label()} on {target.name}: autoflash {VERSION} here "
        f"generates source {found}, and autoflash {lock.versions['autoflash'] or '?'} locked "
        f"{entry.source_hash}: install that, {_AGAIN}"
    )


@functools.lru_cache(maxsize=8)
def _read(path: Path) -> Lock:
    lock = load(path)
    for warning in exposure(path):
        logger.warning("%s", warning)
    logger.info("%s: %d entries, digest %s", path, len(lock.entries), lock.digest)
    return lock
