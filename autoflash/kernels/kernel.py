"""What every kernel module declares: the contract between templates, tuner and runtime."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from autoflash.dtypes import FP8
from autoflash.fp8 import padded_keys
from autoflash.problem import Problem, next_power_of_2
from autoflash.space import Config, SearchSpace, Value
from autoflash.target import Target


@dataclass(frozen=True, kw_only=True)
class Access:
    """What a kernel may assume of a call, beside its problem.

    ``aligned``: every base pointer and every stride that is used is a multiple of 16 bytes.
    ``tma``: moreover the strides suit the tensor copy engine (none is zero, none too long).
    ``whole``: all results of the op are asked for. ``repeatable``: they must come out the same bit
    for bit each time.
    """

    aligned: bool
    tma: bool
    whole: bool = True
    repeatable: bool = False


ALIGNED = Access(aligned=True, tma=True)


# The tensors of each op, in the order of the addresses that a launch is given. lse, dlse, the
# gradients and the descales (of fp8 alone, and the last) may be left out of a call: their address
# is then 0.
TENSORS: dict[str, tuple[str, ...]] = {
    "fwd": ("q", "k", "v", "out", "lse", "q_descale", "k_descale", "v_descale"),
    "bwd": ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv"),
}


@dataclass(frozen=True, kw_only=True)
class Call:
    """One call, but for the addresses: problem, scale, strides, and the tensors that are ``given``.

    ``strides`` maps each 4-D tensor to its (batch, head, row) strides in elements; a dimension of
    size one has stride 0, whatever the tensor says. A row of a transposed v is one of its dims. A
    descale that is given has (batch, key/value head, head in its group, block of 128 rows) strides,
    0 where it doesn't vary. The others (lse, dlse, scratch) are contiguous.
    """

    problem: Problem
    scale: float
    strides: Mapping[str, tuple[int, ...]]
    given: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """An argument slot that takes the address of the named tensor, or scratch buffer."""

    tensor: str


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """An argument slot that takes a host-made TMA descriptor of the named tensor, up to 5-D.

    ``dtype`` is torch's name, and the problem's unless it says otherwise.
    """

    tensor: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True, kw_only=True)
class Counter:
    """An argument slot that takes the address of two int32, which are zero when the kernel starts.

    The kernel leaves them zero. No two launches that may overlap in time are given the same.
    """


Argument = Pointer | Descriptor | Counter | int | float


@dataclass(frozen=True, kw_only=True)
class Scratch:
    """A contiguous buffer that one function of a call fills and a later one reads: allocated with
    the call, uninitialised, and of no meaning after it. ``dtype`` is torch's name."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Function:
    """One device function of a kernel's file, as one config has it compiled and launched.

    ``signature`` gives name and Triton type of the arguments before the constexprs, ``bind`` their
    values or slots; both and ``constexprs`` go in the function's order. ``options`` are Triton's
    num_warps, num_stages, maxnreg. ``grid`` is the number of programs; of a persistent function,
    what the target can hold at a time. It is launched for the sake of ``results``: only if one of
    these tensors is given. ``language`` is what it is written in: "triton" or "gluon".
    ``divisible``: what an aligned call promises of an argument, where that isn't what it promises
    of 16-bit tensors: bytes of a pointer, elements of a stride; 1 is nothing.
    """

    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Value]
    options: Mapping[str, int]
    bind: Callable[[Call], list[Argument]]
    grid: Callable[[Problem, Target], int]
    results: frozenset[str]
    language: str = "triton"
    divisible: Mapping[str, int] = field(default_factory=dict)


def tensor_shape(tensor: str, problem: Problem) -> tuple[int, int, int, int]:
    """(batch, heads, rows, dim) of a 4-D tensor: a gradient is shaped like its tensor. A transposed
    v is (batch, heads, dim, keys)."""
    name = tensor.removeprefix("d")
    query = name in ("q", "out")
    if name == "v" and problem.v_layout != "rows":
        keys = padded_keys(problem.seqlen_k)
        return (problem.batch, problem.kv_heads, problem.head_dim_v, keys)
    return (
        problem.batch,
        problem.heads if query else problem.kv_heads,
        problem.seqlen_q if query else problem.seqlen_k,
        problem.head_dim_v if name in ("v", "out") else problem.head_dim,
    )


def copy_strides(tensor: str, problem: Problem, strides: tuple[int, ...]) -> tuple[int, int, int]:
    """``strides`` of a Call as the copy engine takes them.

    A dimension of size one is never stepped along, but it too wants a positive stride.
    """
    filler = next_power_of_2(max(*strides, tensor_shape(tensor, problem)[3], 16))
    batch, head, row = (stride or filler for stride in strides)
    return batch, head, row


TRITON_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32", FP8: "fp8e4nv"}
LOG2_E = 1.4426950408889634
# Programs that one launch may have.
MAX_GRID = 2**31 - 1
# Rounded up to whole tiles, lengths are 32-bit numbers in the kernels.
_MAX_LENGTH = 2**31 - 512


def why_too_long(problem: Problem) -> str | None:
    """Why the problem's lengths are more than a kernel can count, or None."""
    longest = max(problem.seqlen_q, problem.seqlen_k)
    if longest > _MAX_LENGTH:
        return f"a length of {longest}: the longest that is served is {_MAX_LENGTH}"
    return None


def slug_parts(problem: Problem) -> list[str]:
    """The part of a file's name that the problem gives: dtype, head dims, causal."""
    dims = f"d{problem.head_dim}"
    if problem.head_dim_v != problem.head_dim:
        dims += f"v{problem.head_dim_v}"
    p = problem
    dtypes = [p.dtype, *filter(None, (p.kv_dtype, p.out_dtype))]
    words = ["fp8" if name == FP8 else TRITON_DTYPES[name] for name in dtypes]
    return [*words, dims, *(["causal"] if p.causal else [])]


class Variant(ABC):
    """All Jinja decisions of a kernel."""

    @abstractmethod
    def template_context(self) -> dict[str, Any]:
        """The names that the template sees."""

    @abstractmethod
    def slug(self, problem: Problem) -> str:
        """A readable part of the file name."""


class Kernel(ABC):
    """A template with its search space, and how what it renders to is launched.

    A kernel is one file of source with one device function or a chain of them, which are launched
    in turn. A config tunes the whole chain: it is compiled, checked, timed, stored and served as
    one, so that no two functions can disagree about what they share.
    """

    name: ClassVar[str]
    template: ClassVar[str]
    # Where the template lies, if not among those that ship.
    template_folder: ClassVar[Path | None] = None
    # What the template is written in: "triton", or "gluon" (tile layouts and warps in the open).
    language: ClassVar[str]
    op: ClassVar[str]
    # Whether it serves problems whose k and v are fp8; else it serves all others.
    fp8: ClassVar[bool] = False
    space: ClassVar[SearchSpace]
    # Bytes per thread that a variant may spill and still be ranked without a GPU.
    tolerable_spills: ClassVar[int] = 0

    @abstractmethod
    def serves(self, problem: Problem, target: Target) -> str | None:
        """None, or why no config of this kernel can run ``problem`` on ``target``."""

    @abstractmethod
    def variant(self, problem: Problem, config: Config) -> Variant:
        """The body of source that ``config`` asks for."""

    def example(self, problem: Problem) -> Problem:
        """The problem that the emitted file checks and times: ``problem``'s code, fixed sizes."""
        fields = {**problem.as_dict(), "batch": 4, "heads": 16, "kv_heads": 16}
        return Problem(**{**fields, "seqlen_q": 4096, "seqlen_k": 4096})

    @abstractmethod
    def functions(self, problem: Problem, config: Config) -> tuple[Function, ...]:
        """The device functions in the order of their launches, never none."""

    def scratch(self, problem: Problem) -> tuple[Scratch, ...]:
        """What the functions hand on to each other. The same for all configs."""
        del problem
        return ()

    @abstractmethod
    def defaults(self, problem: Problem, target: Target) -> list[Config]:
        """Configs that run well enough when nothing is known, never none: each more modest than
        the one before, for when that doesn't build."""

    def default(self, problem: Problem, target: Target) -> Config:
        """The first of ``defaults``."""
        return self.defaults(problem, target)[0]

    @abstractmethod
    def adapt(self, config: Config, access: Access) -> Config | None:
        """``config``, changed as little as it takes to run tensors that lie as ``access`` says;
        None if this kernel can't run them at all."""

    def pipeline(self, problem: Problem, config: Config) -> list[str]:
        """How a program of ``config`` divides its work, in lines for a person."""
        del problem, config
        return []

    @abstractmethod
    def estimate_ms(
        self, problem: Problem, config: Config, target: Target, blocks_per_sm: int
    ) -> float:
        """The written model's time, for ranking candidates that haven't been timed."""

    @abstractmethod
    def estimate_blocks_per_sm(self, problem: Problem, config: Config, target: Target) -> int:
        """Resident programs per SM, guessed before compiling."""


class OneFunction(Kernel):
    """A kernel of one device function, which bears the kernel's name."""

    results: ClassVar[frozenset[str]]

    def functions(self, problem: Problem, config: Config) -> tuple[Function, ...]:
        return (
            Function(
                name=self.name,
                signature=self.signature(problem, config),
                constexprs=self.constexprs(problem, config),
                options=self.options(config),
                bind=lambda call: self.bind(call, config),
                grid=lambda problem, target: self.grid(problem, config, target),
                results=self.results,
                language=self.language,
                divisible=self.divisible(problem, config),
            ),
        )

    def divisible(self, problem: Problem, config: Config) -> dict[str, int]:
        """See ``Function.divisible``."""
        del problem, config
        return {}

    @abstractmethod
    def constexprs(self, problem: Problem, config: Config) -> dict[str, Value]:
        """The constexpr arguments, in the kernel's order."""

    @abstractmethod
    def options(self, config: Config) -> dict[str, int]:
        """Launch options of Triton: num_warps, num_stages, maxnreg."""

    @abstractmethod
    def signature(self, problem: Problem, config: Config) -> dict[str, str]:
        """Name to Triton type of the arguments before the constexprs, in the kernel's order."""

    @abstractmethod
    def bind(self, call: Call, config: Config) -> list[Argument]:
        """Values or slots for the arguments of ``signature``, in its order."""

    @abstractmethod
    def grid(self, problem: Problem, config: Config, target: Target) -> int:
        """Number of programs; of a persistent kernel, what ``target`` can hold at a time."""
