"""The nouns of the tuning store. Pure Python: no database, no torch."""

import dataclasses
import functools
import operator
import re
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from enum import Enum

from autoflash.errors import InvalidInputError
from autoflash.problem import Bucket, Problem
from autoflash.space import Config
from autoflash.target import NAMED_TARGETS, Target

MAX_TEXT = 200
MAX_MS = 1e9
MAX_CALLS = 2**53
METHODS = ("events", "cuda_graph", "model")
KINDS = ("measured", "predicted")
# How a choice came about: by an exact measured record, a neighbour's, a predicted one, or none.
HOWS = ("tuned", "neighbour", "predicted", "default")
_HASH = re.compile(r"[0-9a-f]{16}")
_ARCH = {"nvidia": re.compile(r"sm_[0-9]{2,3}"), "amd": re.compile(r"gfx[0-9a-f]{3,5}")}


class TrialStatus(str, Enum):
    """How a trial ended. A ``predicted`` one never ran: it was ranked by the written model."""

    ok = "ok"
    invalid = "invalid"
    compile_error = "compile_error"
    out_of_resources = "out_of_resources"
    wrong_result = "wrong_result"
    timeout = "timeout"
    crashed = "crashed"
    noisy = "noisy"
    predicted = "predicted"

    def __str__(self) -> str:
        return self.value

    @property
    def is_right(self) -> bool:
        """Whether it ran and was right."""
        return self in (TrialStatus.ok, TrialStatus.noisy)


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """Where a record or trial comes from; "" is unknown.

    ``source_hash`` is the rendered kernel's, ``created_at`` is UTC, written just as
    '2025-01-31T23:59:59+00:00' so that text order is time order, ``origin`` a label of the host.
    Raises InvalidInputError for text that is longer than 200 characters or not printable.
    """

    autoflash: str = ""
    triton: str = ""
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    source_hash: str = ""
    created_at: str
    origin: str = ""

    def __post_init__(self) -> None:
        texts = _TEXTS(self)
        # All at once, since nearly all are good.
        if not "".join(texts).isprintable() or max(map(len, texts)) > MAX_TEXT:
            for field, text in zip(dataclasses.fields(self), texts, strict=True):
                _check_text(field.name, text)
        _check_time("created_at", self.created_at)


_TEXTS = operator.attrgetter(*(field.name for field in dataclasses.fields(Provenance)))


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """A time in milliseconds and how it was taken.

    ``method`` is 'events', 'cuda_graph' or 'model' (the written model: nothing ran). ``noisy``: the
    GPU was busy or throttled. ``throttle`` holds the driver's reasons. Raises InvalidInputError.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    repeats: int
    method: str
    noisy: bool
    sm_clock_mhz: int | None = None
    throttle: str = ""

    def __post_init__(self) -> None:
        # All at once, since nearly all are good.
        if not (
            0 < self.median_ms < MAX_MS and 0 < self.p20_ms < MAX_MS and 0 < self.p80_ms < MAX_MS
        ):
            for name in ("median_ms", "p20_ms", "p80_ms"):
                _check_ms(name, getattr(self, name))
        _check_count("repeats", self.repeats, low=0 if self.method == "model" else 1)
        if self.method not in METHODS:
            raise InvalidInputError(f"method={self.method!r}: must be one of {', '.join(METHODS)}")
        if self.sm_clock_mhz is not None:
            _check_count("sm_clock_mhz", self.sm_clock_mhz, low=0)
        if self.throttle:
            _check_text("throttle", self.throttle)


@dataclass(frozen=True, kw_only=True)
class TuningRecord:
    """The config that won on ``problem`` (the one that was tuned) and the evidence it won by.

    ``kind`` is 'measured', or 'predicted' for a time of the written model (method 'model').
    """

    problem: Problem
    target: Target
    kernel: str
    config: Config
    measurement: Measurement
    provenance: Provenance
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInputError(f"kind={self.kind!r}: must be one of {', '.join(KINDS)}")
        if (self.kind == "predicted") != (self.measurement.method == "model"):
            raise InvalidInputError(
                f"kind={self.kind!r} with method={self.measurement.method!r}: "
                "a predicted record is one whose time comes from the model"
            )

    @property
    def bucket(self) -> Bucket:
        """The bucket that the record is shared under."""
        return _bucket_of(self.problem)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One config tried on one problem and target.

    ``reason`` says why a failed one failed, ``came_from`` who proposed the config: the record of a
    neighbour, say, or 'tpe'. shared_bytes (bytes), registers and spills (per thread)
    are the compiler's; None is unknown, as is a missing measurement or prediction (milliseconds).
    """

    problem: Problem
    target: Target
    kernel: str
    config: Config
    status: TrialStatus
    reason: str = ""
    measurement: Measurement | None = None
    predicted_ms: float | None = None
    shared_bytes: int | None = None
    registers: int | None = None
    spills: int | None = None
    came_from: str = ""
    provenance: Provenance

    def __post_init__(self) -> None:
        _check_text("came_from", self.came_from)
        if self.predicted_ms is not None:
            _check_ms("predicted_ms", self.predicted_ms)
        for name in ("shared_bytes", "registers", "spills"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), low=0)

    @property
    def timed_ms(self) -> float | None:
        """The time of a trial that ran right; None for any other, whatever was measured."""
        right = self.status.is_right
        return self.measurement.median_ms if right and self.measurement else None

    @property
    def bucket(self) -> Bucket:
        """The bucket of the study that the trial belongs to."""
        return _bucket_of(self.problem)


# Of many records few problems differ.
_bucket_of = functools.lru_cache(maxsize=4096)(Bucket.of)


@dataclass(frozen=True, kw_only=True)
class MissedCalls:
    """How many calls of ``problem`` on ``target`` were served by no record tuned for it.

    ``noted_at`` is when the last of them were noted, written as ``Provenance.created_at`` is.
    Raises InvalidInputError.
    """

    problem: Problem
    target: Target
    calls: int
    noted_at: str

    def __post_init__(self) -> None:
        p = self.problem
        if 0 in (p.batch, p.seqlen_q, p.seqlen_k):
            raise InvalidInputError(f"{p.label()}: there is nothing to compute, nor to miss")
        if not 1 <= self.calls <= MAX_CALLS:
            raise InvalidInputError(f"calls={self.calls!r}: must be from 1 to 2^53")
        _check_time("noted_at", self.noted_at)


@dataclass(frozen=True, kw_only=True)
class LockEntry:
    """What alone may run calls in the bucket of ``problem`` on ``target`` in lock mode, if their
    tensors are like one of ``access`` (names of ``kernels.access``).

    ``config`` is what is run, just as it is; ``how`` says how it was chosen; ``source_hash`` is
    ``codegen.render.compiled_hash`` of it. Raises InvalidInputError.
    """

    problem: Problem
    target: Target
    kernel: str
    config: Config
    access: tuple[str, ...]
    how: str
    source_hash: str

    def __post_init__(self) -> None:
        if not self.access or list(self.access) != sorted(set(self.access)):
            raise InvalidInputError("access: must be names, sorted, each once")
        if self.how not in HOWS:
            raise InvalidInputError(f"how={self.how[:80]!r}: must be one of {', '.join(HOWS)}")
        if not _HASH.fullmatch(self.source_hash):
            raise InvalidInputError(
                f"source_hash={self.source_hash[:80]!r}: must be 16 hexadecimal digits"
            )

    @property
    def bucket(self) -> Bucket:
        """The bucket that is locked."""
        return Bucket.of(self.problem)


def time_stamp() -> str:
    """Now, as records, trials and missed calls say it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def latest_stamp() -> str:
    """A ``time_stamp`` that none can be later than: a day ahead, since clocks differ."""
    ahead = datetime.now(timezone.utc) + timedelta(days=1)
    return ahead.isoformat(timespec="seconds")


@functools.lru_cache(maxsize=1024)
def target_from_identity(
    *, vendor: str, name: str, arch: str, sm_count: int, memory_gib: int
) -> Target:
    """The Target with this identity; what isn't part of it comes from the nearest named target.

    Rates scale with the number of SMs. Compare targets by ``identity``: a live GPU's Target may
    differ in the rest. Raises InvalidInputError for an identity that no GPU has.
    """
    identity = (vendor, name, arch, sm_count, memory_gib)
    for target in NAMED_TARGETS.values():
        if target.identity == identity:
            return target
    _check_text("name", name)
    _check_count("sm_count", sm_count, low=1)
    _check_count("memory_gib", memory_gib, low=1)
    if vendor not in _ARCH:
        raise InvalidInputError(f"vendor={vendor!r}: must be one of {', '.join(_ARCH)}")
    if not _ARCH[vendor].fullmatch(arch):
        raise InvalidInputError(f"arch={arch!r}: must look like sm_90 (nvidia) or gfx942 (amd)")
    kin = _kin(vendor, arch)
    share = sm_count / kin.sm_count
    return dataclasses.replace(
        kin,
        name=name,
        arch=arch,
        sm_count=sm_count,
        memory_gib=memory_gib,
        tflops=round(kin.tflops * share, 1),
        bandwidth_tbs=kin.bandwidth_tbs if share == 1 else round(kin.bandwidth_tbs * share, 3),
    )


def _kin(vendor: str, arch: str) -> Target:
    """The named target of the same arch, or else the vendor's newest that isn't newer."""
    named = [target for target in NAMED_TARGETS.values() if target.vendor == vendor]
    same = [target for target in named if target.arch == arch]
    if same or vendor != "nvidia":
        return (same or named)[0]
    capability = int(arch.removeprefix("sm_"))
    older = [target for target in named if target.capability <= capability]
    return max(older, key=lambda target: target.capability, default=named[0])


# One way to write a second, so that stamps sort as text; datetime alone takes others too.
_SECOND = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\+00:00")


def _check_time(name: str, text: str) -> None:
    try:
        good = _SECOND.fullmatch(text) and datetime.fromisoformat(text)
    except ValueError:
        good = None
    if not good:
        raise InvalidInputError(f"{name}={text[:80]!r}: must be UTC like 2025-01-31T23:59:59+00:00")


def _check_text(name: str, value: str) -> None:
    # Unprintable text would reach terminals, and a lone surrogate can't be stored.
    if len(value) > MAX_TEXT or not value.isprintable():
        raise InvalidInputError(
            f"{name}={value[:80]!r}: must be printable, at most {MAX_TEXT} characters"
        )


def _check_ms(name: str, value: float) -> None:
    if not 0 < value < MAX_MS:
        raise InvalidInputError(f"{name}={value!r}: must be more than 0 ms and below {MAX_MS:g}")


def _check_count(name: str, value: int, *, low: int) -> None:
    if not low <= value < 2**31:
        raise InvalidInputError(f"{name}={value!r}: must be from {low} to 2^31 - 1")
