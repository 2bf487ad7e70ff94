"""What must be computed (Problem), and the rounded form under which a record is shared (Bucket)."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoflash.dtypes import (
    DTYPE_BYTES,
    FP8,
    HALF_DTYPES,
    canonical_dtype,
    default_out,
    kindred_dtypes,
)
from autoflash.errors import InvalidInputError
from autoflash.fp8 import GRANULARITIES, V_LAYOUTS

MAX_HEAD_DIM = 256
_SUFFIXES = {"k": 1024, "m": 1024 * 1024}
OPS = ("fwd", "bwd")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention call: softmax(scale * q kᵀ) v, or its gradients (op "bwd"), by shape and type.

    q is [batch, heads, seqlen_q, head_dim], k [batch, kv_heads, seqlen_k, head_dim] and
    v [batch, kv_heads, seqlen_k, head_dim_v]. ``causal`` is aligned bottom-right: row i sees key j
    when j <= i + seqlen_k - seqlen_q. ``dtype`` is q's.

    The other fields are of fp8 and have their defaults elsewhere; text, files and stored rows leave
    defaults out. ``kv_dtype`` is that of k and v if it isn't q's: float8_e4m3fn beside 16 bits (the
    mixed mode). ``out_dtype`` is out's, "" for q's or, if that is fp8, bfloat16. ``scales`` is the
    finest granularity of the descales that are given ("tensor", "head" or "block": autoflash.fp8),
    and "" where nothing is fp8. ``v_layout`` is how v lies ("rows", "columns" or "permuted"). What
    comes to the same is made the same: kv_dtype=dtype becomes "", and so does out_dtype.

    Raises InvalidInputError for values that describe no call.
    """

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool = False
    op: str = "fwd"
    kv_dtype: str = ""
    out_dtype: str = ""
    scales: str = ""
    v_layout: str = "rows"

    def __post_init__(self) -> None:
        for name in ("batch", "seqlen_q", "seqlen_k"):
            _check_int(name, getattr(self, name), 0)
        for name in ("heads", "kv_heads", "head_dim", "head_dim_v"):
            _check_int(name, getattr(self, name), 1)
        for name in ("head_dim", "head_dim_v"):
            if getattr(self, name) > MAX_HEAD_DIM:
                raise InvalidInputError(
                    f"{name}={getattr(self, name)}: the largest that is served is {MAX_HEAD_DIM}"
                )
        if self.heads % self.kv_heads:
            raise InvalidInputError(
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}: "
                "each key/value head must serve the same number of query heads"
            )
        if self.dtype not in DTYPE_BYTES:
            raise InvalidInputError(
                f"dtype={self.dtype!r}: must be one of {', '.join(DTYPE_BYTES)}"
            )
        if not isinstance(self.causal, bool):
            raise InvalidInputError(f"causal={self.causal!r}: must be true or false")
        if self.op not in OPS:
            raise InvalidInputError(f"op={self.op!r}: must be one of {', '.join(OPS)}")
        # Whether k and v are told to be what q is, or out what it is anyway, makes no difference.
        if self.kv_dtype == self.dtype:
            object.__setattr__(self, "kv_dtype", "")
        if self.out_dtype == default_out(self.dtype):
            object.__setattr__(self, "out_dtype", "")
        _check_fp8(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Problem":
        """Build a Problem from text or a file's mapping: '4k' lengths, dtype aliases, defaults.

        ``seqlen`` sets both lengths; kv_heads defaults to heads, head_dim_v to head_dim, dtype to
        bfloat16, scales of fp8 to "head", as quantize_fp8's. Raises InvalidInputError and names an
        unknown or missing field.
        """
        values = dict(fields)
        if "seqlen" in values:
            length = values.pop("seqlen")
            values.setdefault("seqlen_q", length)
            values.setdefault("seqlen_k", length)
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := [name for name in values if name not in known]:
            raise InvalidInputError(
                f"unknown problem field {unknown[0]!r}: known are {', '.join(known)} and seqlen"
            )
        values.setdefault("kv_heads", values.get("heads"))
        values.setdefault("head_dim_v", values.get("head_dim"))
        values.setdefault("dtype", "bfloat16")
        for name in ("dtype", "kv_dtype", "out_dtype"):
            if values.get(name):
                values[name] = canonical_dtype(values[name])
        if FP8 in (values["dtype"], values.get("kv_dtype")):
            values.setdefault("scales", "head")
        for name in known:
            if name in ("dtype", "causal", "op", *FP8_FIELDS):
                continue
            if values.get(name) is None:
                raise InvalidInputError(f"problem field {name!r} is missing")
            values[name] = parse_length(name, values[name])
        return cls(**values)

    @property
    def dtype_of_kv(self) -> str:
        """The dtype of k and v."""
        return self.kv_dtype or self.dtype

    @property
    def dtype_of_out(self) -> str:
        """The dtype of out."""
        return self.out_dtype or default_out(self.dtype)

    @property
    def is_fp8(self) -> bool:
        """Whether k and v are fp8; q is too, or has 16 bits."""
        return self.dtype_of_kv == FP8

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs of one head that the mask lets through."""
        if not self.causal:
            return self.seqlen_q * self.seqlen_k
        # Row i sees i + 1 + seqlen_k - seqlen_q keys, if that is positive.
        rows = min(self.seqlen_q, self.seqlen_k)
        return rows * self.seqlen_k - rows * (rows - 1) // 2

    @property
    def flops(self) -> int:
        """Floating-point operations of the products over the visible pairs: two forward, five
        backward (those that must be; a kernel may do some twice)."""
        dims = self.head_dim + self.head_dim_v
        if self.op == "bwd":
            # q kᵀ, dS k and dSᵀ q; dout vᵀ and Pᵀ dout.
            dims = 3 * self.head_dim + 2 * self.head_dim_v
        return 2 * self.batch * self.heads * self.visible_pairs * dims

    def tflops(self, ms: float) -> float:
        """The rate, in TFLOP/s, of a run that takes ``ms`` milliseconds."""
        return self.flops / ms * 1e-9

    @property
    def min_bytes(self) -> int:
        """Bytes that must move at least: q, k and v read once, out and LSE written once; backward
        these and dout read once, and three gradients written."""
        # Backward: q, dq, out, dout beside q, out; k, v, dk, dv beside k, v.
        times = 2 if self.op == "bwd" else 1
        row = self.head_dim * DTYPE_BYTES[self.dtype]
        row += self.head_dim_v * DTYPE_BYTES[self.dtype_of_out]
        key = (self.head_dim + self.head_dim_v) * DTYPE_BYTES[self.dtype_of_kv]
        rows = self.batch * self.heads * self.seqlen_q * (times * row + 4)
        return rows + self.batch * self.kv_heads * self.seqlen_k * times * key

    def as_dict(self) -> dict[str, Any]:
        """The fields, in their order; those of fp8 only if they differ from their defaults."""
        fields = dataclasses.asdict(self)
        return {name: x for name, x in fields.items() if FP8_FIELDS.get(name) != x}

    def label(self) -> str:
        """A short name for tables and logs."""
        dims = f"d{self.head_dim}"
        if self.head_dim_v != self.head_dim:
            dims += f"v{self.head_dim_v}"
        heads = str(self.heads) if self.group == 1 else f"{self.heads}/{self.kv_heads}"
        lengths = f"s{self.seqlen_q}"
        if self.seqlen_k != self.seqlen_q:
            lengths += f"x{self.seqlen_k}"
        mask = " causal" if self.causal else ""
        sizes = f"b{self.batch} h{heads} {lengths} {dims}{mask}"
        return f"{self.op} {_dtypes_in_words(self)} {sizes}{_fp8_in_words(self)}"

    def flags(self) -> str:
        """The options that name it on the command line."""
        parts = [
            f"--batch {self.batch} --heads {self.heads} --kv-heads {self.kv_heads}",
            f"--seqlen-q {self.seqlen_q} --seqlen-k {self.seqlen_k}",
            f"--head-dim {self.head_dim} --head-dim-v {self.head_dim_v} --dtype {self.dtype}",
        ]
        parts += ["--causal"] if self.causal else []
        fp8 = {name: getattr(self, name) for name in FP8_FIELDS}
        parts += [
            f"--{name.replace('_', '-')} {value}"
            for name, value in fp8.items()
            if value != FP8_FIELDS[name]
        ]
        return " ".join(parts + ([] if self.op == "fwd" else [f"--op {self.op}"]))


# The fields of Problem, and of Bucket, that fp8 needs, with what they are without it.
FP8_FIELDS: dict[str, Any] = {
    field.name: field.default
    for field in dataclasses.fields(Problem)
    if field.name in ("kv_dtype", "out_dtype", "scales", "v_layout")
}


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The rounded Problem under which a record is shared.

    What changes the code is kept (dtypes, head dims, causal, group, scales and layout of fp8);
    sizes are rounded up to a power of two, since neighbours in size want the same tiles.
    """

    op: str
    dtype: str
    head_dim: int
    head_dim_v: int
    causal: bool
    group: int
    batch_heads: int
    seqlen_q: int
    seqlen_k: int
    kv_dtype: str = ""
    out_dtype: str = ""
    scales: str = ""
    v_layout: str = "rows"

    @classmethod
    def of(cls, problem: Problem) -> "Bucket":
        """The bucket that ``problem`` falls into."""
        return cls(
            op=problem.op,
            dtype=problem.dtype,
            head_dim=problem.head_dim,
            head_dim_v=problem.head_dim_v,
            causal=problem.causal,
            group=problem.group,
            batch_heads=next_power_of_2(problem.batch * problem.heads),
            seqlen_q=next_power_of_2(problem.seqlen_q),
            seqlen_k=next_power_of_2(problem.seqlen_k),
            kv_dtype=problem.kv_dtype,
            out_dtype=problem.out_dtype,
            scales=problem.scales,
            v_layout=problem.v_layout,
        )

    def distance(self, other: "Bucket") -> float | None:
        """How far ``other``'s best config is likely to be from ours, in octaves of size.

        None when the code differs so that a config doesn't carry over. float16 and bfloat16 take
        the same instructions and registers: their configs do. So do those of other scales.
        """
        for name in ("op", "head_dim", "head_dim_v", "causal", "kv_dtype", "v_layout"):
            if getattr(self, name) != getattr(other, name):
                return None
        if other.dtype not in kindred_dtypes(self.dtype):
            return None
        octaves = abs(_log2(self.batch_heads) - _log2(other.batch_heads)) / 2
        octaves += abs(_log2(self.seqlen_k) - _log2(other.seqlen_k))
        octaves += abs(_log2(self.seqlen_q) - _log2(other.seqlen_q))
        for name in ("dtype", "out_dtype", "scales"):
            octaves += 0.25 if getattr(self, name) != getattr(other, name) else 0.0
        return octaves + (0.5 if self.group != other.group else 0.0)

    def label(self) -> str:
        """A short name for tables and logs."""
        mask = " causal" if self.causal else ""
        return (
            f"{self.op} {_dtypes_in_words(self)} bh{self.batch_heads} group{self.group} "
            f"s{self.seqlen_q}x{self.seqlen_k} d{self.head_dim}v{self.head_dim_v}{mask}"
            f"{_fp8_in_words(self)}"
        )


def parse_length(name: str, value: object) -> int:
    """An int, or text such as '4096', '4k' or '1m' (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    factor = _SUFFIXES.get(text[-1:], 1)
    digits = text[:-1] if factor > 1 else text
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 12):
        raise InvalidInputError(f"{name}={value!r}: must be a whole number such as 4096 or 4k")
    return int(digits) * factor


def next_power_of_2(value: int) -> int:
    """The smallest power of two that is at least ``value``; 1 for 0."""
    return 1 << max(value - 1, 0).bit_length()


def _dtypes_in_words(noun: Problem | Bucket) -> str:
    """q's dtype, with that of k and v and of out if they are others."""
    kv = f"/{noun.kv_dtype}" if noun.kv_dtype else ""
    return noun.dtype + kv + (f"->{noun.out_dtype}" if noun.out_dtype else "")


def _fp8_in_words(noun: Problem | Bucket) -> str:
    """How scales and v lie, if anything is fp8."""
    layout = f" v_{noun.v_layout}" if noun.v_layout != "rows" else ""
    return f" {noun.scales}_scales{layout}" if noun.scales else ""


def _check_fp8(problem: Problem) -> None:
    """Raise InvalidInputError unless dtypes, scales and layout of v go together."""
    p = problem
    for name in FP8_FIELDS:
        if not isinstance(getattr(p, name), str):
            raise InvalidInputError(f"{name}={getattr(p, name)!r}: must be text")
    if p.kv_dtype and (p.kv_dtype != FP8 or p.dtype not in HALF_DTYPES):
        raise InvalidInputError(
            f"kv_dtype={p.kv_dtype!r} with dtype={p.dtype!r}: must be dtype, or {FP8} where that "
            f"is one of {', '.join(HALF_DTYPES)}"
        )
    if p.out_dtype and (p.dtype != FP8 or p.out_dtype not in HALF_DTYPES):
        allowed = " or ".join(HALF_DTYPES) if p.dtype == FP8 else p.dtype
        raise InvalidInputError(
            f"out_dtype={p.out_dtype!r} with dtype={p.dtype!r}: must be {allowed}"
        )
    if not p.is_fp8:
        for name in ("scales", "v_layout"):
            if getattr(p, name) != FP8_FIELDS[name]:
                raise InvalidInputError(
                    f"{name}={getattr(p, name)!r}: only k and v in {FP8} have that"
                )
        return
    if p.op != "fwd":
        raise InvalidInputError(f"op={p.op!r}: fp8 attention has no gradients, its op is 'fwd'")
    if p.scales not in GRANULARITIES:
        known = ", ".join(GRANULARITIES)
        raise InvalidInputError(f"scales={p.scales!r}: of fp8 they must be one of {known}")
    if p.v_layout not in V_LAYOUTS:
        raise InvalidInputError(f"v_layout={p.v_layout!r}: must be one of {', '.join(V_LAYOUTS)}")


def _log2(power: int) -> int:
    return power.bit_length() - 1


def _check_int(name: str, value: object, low: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**31:
        raise InvalidInputError(f"{name}={value!r}: must be a whole number from {low} to 2^31 - 1")
