"""Making lock files, and checking that they still hold here."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from autoflash.codegen.render import compiled_hash
from autoflash.coverage import LEVELS, level_of, reaches
from autoflash.errors import InvalidInputError, LockError, UnsupportedError
from autoflash.kernels import kernels_for
from autoflash.kernels.access import ACCESSES
from autoflash.problem import Bucket, Problem
from autoflash.runtime.choose import Choice, Lookup, serving, tune_command
from autoflash.runtime.locked import why_not_here, why_not_the_same
from autoflash.store.lock import Lock, dump, keys_of, load, merged
from autoflash.store.record import LockEntry
from autoflash.target import Target
from autoflash.tuning.versions import versions

# What a call is like whose tensors are as usual: the level that is asked for holds for these.
USUAL = "tma"
USUAL_REPEATABLE = "tma repeatable"


@dataclass(kw_only=True)
class Frozen:
    """What serves now, to be locked. ``below`` says of what is served by less than was asked for,
    and how to better it; its entries are left out."""

    entries: list[LockEntry] = field(default_factory=list)
    below: list[str] = field(default_factory=list)


def freeze(
    problems: Iterable[Problem],
    target: Target,
    lookup: Lookup,
    require: str,
    *,
    deterministic: bool = False,
) -> Frozen:
    """The configs that serve ``problems`` on ``target`` by the records that ``lookup`` finds, for
    whatever their tensors may be like.

    ``require`` is the least level (``coverage.LEVELS``) for tensors as usual and, if
    ``deterministic``, for gradients that must repeat. Raises InvalidInputError where no config can
    run all problems of a bucket.
    """
    frozen = Frozen()
    for bucket, of_bucket in _by_bucket(problems).items():
        try:
            choices = _choices(bucket, of_bucket, target, lookup)
        except UnsupportedError as error:
            frozen.below.append(str(error))
            continue
        usual = [USUAL] + ([USUAL_REPEATABLE] if deterministic and bucket.op == "bwd" else [])
        level = max((level_of(choices[name]) for name in usual), key=LEVELS.index)
        if not reaches(level, require):
            frozen.below.append(
                f"{of_bucket[0].label()} on {target.name} is {level}, not {require}: run "
                f"`{tune_command(of_bucket[0])}` there, or lock with --require {level}"
            )
            continue
        frozen.entries += _entries(of_bucket[0], target, choices)
    return frozen


def lock_text(entries: Sequence[LockEntry]) -> tuple[str, int]:
    """The lock file of ``entries``, which are good in this process, and how many they are."""
    return dump(entries, versions()), len(entries)


def add(path: Path, entries: Iterable[LockEntry]) -> tuple[str, int]:
    """The text of the lock at ``path`` with those of ``entries`` that it lacks, and how many these
    are. What is locked stays as it is. Raises LockError for a lock that isn't good here."""
    lock = load(path)
    if reasons := faults(lock):
        raise LockError(f"{path}: nothing is added: {reasons[0]}")
    known = {key for entry in lock.entries for key in keys_of(entry)}
    lacking = []
    for entry in entries:
        names = tuple(key[2] for key in keys_of(entry) if key not in known)
        if names:
            lacking.append(dataclasses.replace(entry, access=names))
    return lock_text(merged([*lock.entries, *lacking]))[0], len(lacking)


def faults(lock: Lock) -> list[str]:
    """Why ``lock`` can't be served from here as it was made: its compiler, and each entry whose
    source or config is no longer what it was."""
    reasons = [why_not_here(lock)]
    reasons += [why_not_the_same(e, e.problem, e.target, lock) for e in lock.entries]
    return [reason for reason in reasons if reason is not None]


def lacking(
    lock: Lock, problems: Iterable[Problem], targets: Sequence[Target], *, deterministic: bool
) -> list[str]:
    """Which of ``problems`` have no entry on which of ``targets``, for tensors as usual."""
    found = []
    for problem in problems:
        repeatable = deterministic and problem.op == "bwd"
        name = USUAL_REPEATABLE if repeatable else USUAL
        for target in targets:
            if lock.find(problem, target, ACCESSES[problem.op][name]) is None:
                found.append(f"no entry for {problem.label()} on {target.name} (tensors: {name})")
    return found


def _by_bucket(problems: Iterable[Problem]) -> Mapping[Bucket, list[Problem]]:
    found: dict[Bucket, list[Problem]] = {}
    # The smallest stands for its bucket, in whatever order they come.
    for problem in sorted(set(problems), key=dataclasses.astuple):
        found.setdefault(Bucket.of(problem), []).append(problem)
    return found


def _choices(
    bucket: Bucket, problems: list[Problem], target: Target, lookup: Lookup
) -> dict[str, Choice]:
    """What runs all of ``problems``, by what tensors may be like. Raises UnsupportedError."""
    for problem in problems:
        kernels_for(problem, target)
    found = {}
    for name, access in ACCESSES[bucket.op].items():
        try:
            offered = [serving(problem, target, access, lookup) for problem in problems]
        except UnsupportedError:
            # No kernel runs such tensors: there is nothing to lock.
            continue
        offered.sort(key=lambda choice: LEVELS.index(level_of(choice)))
        fit = (c for c in offered if all(_runs(c, problem, target) for problem in problems))
        choice = next(fit, None)
        if choice is None:
            raise InvalidInputError(
                f"{' and '.join(problem.label() for problem in problems)} on {target.name} share "
                "a bucket, and no config of theirs can run them all: leave one out"
            )
        found[name] = choice
    if USUAL not in found or (bucket.op == "bwd" and USUAL_REPEATABLE not in found):
        raise UnsupportedError(f"no kernel serves {problems[0].label()} on {target.name}")
    return found


def _runs(choice: Choice, problem: Problem, target: Target) -> bool:
    kernel = choice.kernel
    return (
        kernel.serves(problem, target) is None
        and kernel.space.why_not(choice.config, problem, target, advice=False) is None
    )


def _entries(problem: Problem, target: Target, choices: Mapping[str, Choice]) -> list[LockEntry]:
    return merged(
        LockEntry(
            problem=problem,
            target=target,
            kernel=choice.kernel.name,
            config=choice.config,
            access=(name,),
            how=choice.how,
            source_hash=compiled_hash(choice.kernel, problem, choice.config),
        )
        for name, choice in choices.items()
    )
