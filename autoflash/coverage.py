"""What the stored records say of a set of problems on a set of GPUs."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.kernels.kernel import ALIGNED
from autoflash.problem import FP8_FIELDS, Bucket, Problem
from autoflash.runtime.choose import Choice, expected_loss, serving
from autoflash.settings import DatabaseUrl, Settings
from autoflash.store.layers import Layers, is_there
from autoflash.store.record import LockEntry, TuningRecord
from autoflash.store.shipped import all_shipped_records
from autoflash.target import NAMED_TARGETS, Target

# Best first. What no record helps with is missing: the kernel's default serves it.
LEVELS = ("exact", "neighbour", "predicted", "missing")
_LEVEL_OF = {"tuned": "exact", "default": "missing"}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What serves a problem on a target: ``level`` is one of LEVELS, ``why`` says it in a sentence.

    ``choice`` is None where no kernel serves. ``expected_loss`` is of a neighbour, as in
    ``Explanation``: a fraction of time, or None where no trial says.
    """

    problem: Problem
    target: Target
    level: str
    why: str
    choice: Choice | None = None
    expected_loss: float | None = None


def level_of(choice: Choice) -> str:
    """How well the records cover what ``choice`` serves."""
    return _LEVEL_OF.get(choice.how, choice.how)


def reaches(level: str, wanted: str) -> bool:
    """Whether ``level`` is at least ``wanted``."""
    return LEVELS.index(level) <= LEVELS.index(wanted)


def check_level(text: str) -> str:
    """``text`` if it is one of LEVELS. Raises InvalidInputError."""
    if text not in LEVELS:
        raise InvalidInputError(f"--require {text[:80]!r}: must be one of {', '.join(LEVELS)}")
    return text


def cover(
    problems: Iterable[Problem],
    targets: Sequence[Target],
    layers: Layers,
    *,
    deterministic: bool = False,
) -> list[Cell]:
    """What serves aligned tensors of each problem on each target, problem by problem; gradients
    that must repeat bit for bit if ``deterministic``."""
    lookup = functools.cache(layers.lookup)
    cells = []
    for problem in problems:
        access = dataclasses.replace(ALIGNED, repeatable=deterministic and problem.op == "bwd")
        for target in targets:
            try:
                choice = serving(problem, target, access, lookup)
            except UnsupportedError as error:
                cell = Cell(problem=problem, target=target, level="missing", why=str(error))
            else:
                cell = _cell(problem, target, choice, layers)
            cells.append(cell)
    return cells


def stored_records(snapshot: Settings) -> tuple[list[TuningRecord], list[TuningRecord]]:
    """The records of the user's store and the site's, and those that ship. Raises StoreError for a
    store or a file that can't be read: what is decided by them must not be decided without them."""
    # It loads SQLAlchemy, which most commands don't need.
    from autoflash.store.opening import open_store

    own: list[TuningRecord] = []
    for layer, where in snapshot.stores().items():
        if isinstance(where, DatabaseUrl) or is_there(layer, where):
            own += open_store(where, read_only=True).records()
    return own, all_shipped_records() if snapshot.use_shipped_records else []


def problems_of(records: Iterable[TuningRecord]) -> list[Problem]:
    """A problem of each bucket that ``records`` are of, the smallest, in their order."""
    found: dict[Bucket, Problem] = {}
    for problem in sorted({record.problem for record in records}, key=_size):
        found.setdefault(Bucket.of(problem), problem)
    return list(found.values())


def targets_of(records: Iterable[TuningRecord | LockEntry]) -> list[Target]:
    """The targets that ``records`` are of, by name."""
    found = {record.target.identity: record.target for record in records}
    return [found[identity] for identity in sorted(found)]


def named_targets(
    names: Iterable[str], records: Iterable[TuningRecord | LockEntry]
) -> list[Target]:
    """The targets called ``names``: a short one ('h100'), or the name that ``records`` have, which
    may be of several (slices of a GPU). Raises InvalidInputError for an unknown one."""
    from autoflash.tuning.tune import target_to_tune

    known = targets_of(records)
    found: list[Target] = []
    for name in names:
        if name.lower() in NAMED_TARGETS:
            # The GPU that is here knows itself better than the table does.
            matches = [target_to_tune(name)]
        else:
            matches = [target for target in known if target.name == name]
        if not matches:
            names_known = ", ".join([*sorted(NAMED_TARGETS), *(repr(t.name) for t in known)])
            raise InvalidInputError(f"unknown target {name[:80]!r}: known are {names_known}")
        found += [target for target in matches if target not in found]
    return found


def _size(problem: Problem) -> tuple[object, ...]:
    p = problem
    code = (p.op, p.dtype, p.head_dim, p.head_dim_v, p.causal)
    sizes = (p.seqlen_q, p.seqlen_k, p.batch, p.heads, p.kv_heads)
    return (*code, *(getattr(p, name) for name in FP8_FIELDS), *sizes)


def _cell(problem: Problem, target: Target, choice: Choice, layers: Layers) -> Cell:
    level = level_of(choice)
    losses = layers.losses(choice.record) if level == "neighbour" and choice.record else []
    return Cell(
        problem=problem,
        target=target,
        level=level,
        why=choice.why,
        choice=choice,
        expected_loss=expected_loss(losses),
    )
