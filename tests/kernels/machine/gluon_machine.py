"""Runs a Gluon kernel's own Python on the CPU: what Triton has no interpreter for.

The emitted file is executed with stand-ins for Gluon's modules. Partitions of a program are
threads; mbarriers, the copy engine and asynchronous products behave as the hardware may: a copy
reads and writes at its issue or as late as when somebody waits for it, and a product reads its
operands at its issue or as late as at its wait. So a missing wait, a buffer
that is given up too early, a wrong coordinate or mask gives a wrong result, and a lost arrival a
deadlock, which is found out. Layouts, registers and speed are not modelled.
"""

import importlib
import linecache
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from autoflash.fp8 import E4M3_MAX, key_order

# What waits longer than this for a barrier will wait for ever.
DEADLOCK_S = 30.0


class Number(torch.Tensor):
    """A value in registers, of any rank: a tensor with the attributes that Gluon code asks for."""

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None)

    def __iadd__(self, other: Any) -> "Number":  # type: ignore[override]
        # A name gets a new value; others that shared the old one keep it.
        return self + other

    def __mod__(self, other: Any) -> "Number":
        return number(-1) if _is_zero(other) else super().__mod__(other)

    def __floordiv__(self, other: Any) -> "Number":
        # A GPU doesn't stop at a division by zero: it goes on with something.
        return number(-1) if _is_zero(other) else super().__floordiv__(other)


def _is_zero(x: Any) -> bool:
    return not (isinstance(x, torch.Tensor) and x.dim()) and int(x) == 0


def number(value: Any) -> Number:
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
    return tensor.as_subclass(Number)


@dataclass(frozen=True)
class Pointer:
    """Memory and offsets into it, in elements."""

    memory: torch.Tensor
    offset: Any = 0

    def __add__(self, other: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + other)

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=self.memory.dtype)


@dataclass(frozen=True)
class Desc:
    """A tensor with the block that one copy moves."""

    tensor: torch.Tensor
    block: tuple[int, ...]
    layout: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def block_type(self) -> Any:
        return types.SimpleNamespace(shape=list(self.block))

    def part(self, at: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor, and of a block, a copy to or from ``at`` touches.

        The hardware takes an address that is no multiple of 16 bytes for an illegal instruction.
        """
        assert at[-1] * self.tensor.element_size() % 16 == 0, f"a copy at {at} is not aligned"
        outer, inner = [], []
        for start, size, length in zip(at, self.block, self.tensor.shape, strict=True):
            first, last = min(max(start, 0), length), min(max(start + size, 0), length)
            outer.append(slice(first, last))
            inner.append(slice(first - start, last - start))
        return tuple(outer), tuple(inner)


@dataclass(frozen=True)
class Shared:
    """Shared memory, or a view of it."""

    data: torch.Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        return self.data.dim()

    @property
    def numel(self) -> int:
        return self.data.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> "Shared":
        return Shared(self.data[int(i)])

    def slice(self, start: Any, length: int, dim: int = 0) -> "Shared":
        return Shared(self.data.narrow(dim, int(start), length))

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> "Shared":
        return Shared(self.data.view(*shape))

    def reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> "Shared":
        del layout
        return Shared(self.data.view(-1).view(dtype).view(*shape))

    # Gluon's name for it before it had a public one.
    _reinterpret = reinterpret

    def load(self, layout: Any) -> Number:
        del layout
        return number(self.data.clone())

    def store(self, value: torch.Tensor) -> None:
        assert value.shape == self.data.shape, (value.shape, self.data.shape)
        self.data.copy_(value)


# What moves the data of a copy and reports it.
Copy = Callable[[], None]


@dataclass
class Barrier:
    """An mbarrier: a phase ends when all arrivals and all bytes have come."""

    count: int = 0
    pending: int = 0
    missing_bytes: int = 0
    phase: int = 0
    copies: "list[Copy]" = field(default_factory=list)

    def settle(self) -> None:
        if self.pending == 0 and self.missing_bytes == 0:
            self.phase += 1
            self.pending = self.count


@dataclass(frozen=True)
class Barriers:
    each: list[Barrier]

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


@dataclass
class Product:
    """A product that was issued: its value once it is waited for."""

    compute: Callable[[], torch.Tensor]
    value: torch.Tensor | None = None

    @property
    def shape(self) -> list[int]:
        return list(self.finish().shape)

    def finish(self) -> torch.Tensor:
        if self.value is None:
            self.value = self.compute()
        return self.value


@dataclass
class Machine:
    """One run of a kernel: all of its programs side by side, each in threads of its own."""

    seed: int
    patience_s: float = DEADLOCK_S
    programs: int = 1
    lock: threading.Condition = field(default_factory=threading.Condition)
    failure: BaseException | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        # How often a copy is made, and a product reads its operands, as soon as it is issued.
        self.eager_copies, self.eager_products = self.random.choices((0.0, 0.5, 1.0), k=2)
        self.here = threading.local()
        self.under_way = 0

    # -- running -------------------------------------------------------------------------------

    def run(self, kernel: Callable[..., None], arguments: Sequence[Any], programs: int) -> None:
        """Raises what a partition raised; RuntimeError at a deadlock."""
        self.programs = programs
        self._threads([(program, lambda: kernel(*arguments)) for program in range(programs)])
        assert self.under_way == 0, "a copy was under way when the programs ended"

    def warp_specialize(
        self, parts: Sequence[tuple[Any, Any]], warps: Sequence[int], registers: Sequence[int]
    ) -> None:
        assert len(warps) == len(registers) == len(parts) - 1
        program = self.here.program
        self._threads([(program, lambda f=f, a=a: f(*a)) for f, a in parts])

    def _threads(self, bodies: Sequence[tuple[int, Callable[[], None]]]) -> None:
        def run(program: int, body: Callable[[], None]) -> None:
            self.here.program, self.here.products, self.here.stores = program, [], []
            try:
                body()
            except BaseException as error:  # noqa: BLE001 raised again by who started the threads
                with self.lock:
                    self.failure = self.failure or error
                    self.lock.notify_all()

        threads = [threading.Thread(target=run, args=each, daemon=True) for each in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def wait_until(self, done: Callable[[], bool], copies: list[Copy]) -> None:
        """Meanwhile the copy engine works on ``copies``, which are what is waited for."""
        with self.lock:
            while not done():
                if self.failure is not None:
                    raise RuntimeError("another partition failed")
                if copies:
                    self._make(copies)
                elif not self.lock.wait(self.patience_s):
                    raise RuntimeError("deadlock: a barrier is never completed")

    def _make(self, copies: list[Copy]) -> None:
        copies.pop(self.random.randrange(len(copies)))()
        self.under_way -= 1
        self.lock.notify_all()

    def issue(self, copies: list[Copy], copy: Copy) -> None:
        """Gives the copy engine something to do: now, or when somebody waits for it."""
        with self.lock:
            copies.append(copy)
            self.under_way += 1
            if self.random.random() < self.eager_copies:
                self._make(copies)
            self.lock.notify_all()

    # -- barriers and copies -------------------------------------------------------------------

    def wait(self, barrier: Barrier, parity: Any) -> None:
        expected = int(parity)
        assert expected in (0, 1)
        self.wait_until(lambda: barrier.phase & 1 != expected, barrier.copies)

    def arrive(self, barrier: Barrier) -> None:
        with self.lock:
            assert barrier.pending > 0, "more arrivals than the barrier counts"
            barrier.pending -= 1
            barrier.settle()
            self.lock.notify_all()

    def expect(self, barrier: Barrier, size: Any) -> None:
        with self.lock:
            barrier.missing_bytes += int(size)
            barrier.pending -= 1
            barrier.settle()
            self.lock.notify_all()

    def load(self, desc: Desc, at: Sequence[Any], barrier: Barrier, place: Shared) -> None:
        at = [int(x) for x in at]
        assert place.shape == list(desc.block)

        def copy() -> None:
            outer, inner = desc.part(at)
            place.data.zero_()
            place.data[inner] = desc.tensor[outer]
            # Bytes count whether or not they lie inside the tensor.
            barrier.missing_bytes -= place.data.numel() * place.data.element_size()
            barrier.settle()

        self.issue(barrier.copies, copy)

    def store(self, desc: Desc, at: Sequence[Any], place: Shared, add: bool = False) -> None:
        at = [int(x) for x in at]
        assert place.shape == list(desc.block)

        # The hardware calls one that begins before the tensor an illegal instruction.
        assert min(at) >= 0, f"a copy to {at}"

        def copy() -> None:
            outer, inner = desc.part(at)
            if add:
                desc.tensor[outer] += place.data[inner]
            else:
                desc.tensor[outer] = place.data[inner]

        self.issue(self.here.stores, copy)

    def store_wait(self, left: int) -> None:
        mine = self.here.stores
        self.wait_until(lambda: len(mine) <= left, mine)

    # -- products ------------------------------------------------------------------------------

    def product(
        self, a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False
    ) -> Product:
        assert is_async
        left = a.data if isinstance(a, Shared) else a
        assert left.dtype == b.dtype
        assert left.shape[1] == b.shape[0]
        add = bool(use_acc)

        def compute() -> torch.Tensor:
            found = left.float() @ b.data.float()
            before = acc.finish() if isinstance(acc, Product) else acc
            assert found.shape == before.shape
            return number(before + found if add else found)

        product = Product(compute)
        self.here.products.append(product)
        if self.random.random() < self.eager_products:
            # Early, and all before it.
            for other in self.here.products:
                other.finish()
        return product

    def product_wait(self, left: int, deps: Sequence[Any]) -> Any:
        pending = self.here.products
        while len(pending) > left:
            pending.pop(0).finish()
        found = []
        for x in deps:
            if isinstance(x, Product):
                assert x not in pending, "a product is used that is still pending"
                found.append(x.finish())
            else:
                found.append(x)
        return found[0] if len(found) == 1 else tuple(found)

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
        if layout == "barriers":
            return Barriers([Barrier() for _ in range(shape[0])])
        # What lies there before must not matter.
        if dtype.is_floating_point:
            return Shared(torch.full(tuple(shape), float("nan")).to(dtype))
        return Shared(torch.full(tuple(shape), 77, dtype=dtype))

    def atomic_add(self, pointer: Pointer, value: int) -> Number:
        with self.lock:
            old = pointer.memory[int(pointer.offset)].clone()
            pointer.memory[int(pointer.offset)] += value
        return number(old)

    def atomic_xchg(self, pointer: Pointer, value: int) -> Number:
        with self.lock:
            old = pointer.memory[int(pointer.offset)].clone()
            pointer.memory[int(pointer.offset)] = value
        return number(old)


def _load(pointer: Pointer, mask: Any = True, other: Any = None) -> Number:
    if not bool(mask):
        return number(other)
    return number(pointer.memory[torch.as_tensor(pointer.offset).long()])


def _store(pointer: Pointer, value: torch.Tensor, mask: Any = None) -> None:
    offsets, value = torch.broadcast_tensors(torch.as_tensor(pointer.offset), value)
    kept = torch.ones_like(offsets, dtype=torch.bool) if mask is None else mask
    kept = torch.as_tensor(kept).expand(offsets.shape)
    pointer.memory[offsets[kept].long()] = value[kept].to(pointer.memory.dtype)


def _expand_dims(x: Any, axis: int) -> Any:
    if isinstance(x, Pointer):
        return Pointer(x.memory, x.offset.unsqueeze(axis))
    return x.unsqueeze(axis)


def _full(shape: Sequence[int], value: Any, dtype: torch.dtype, layout: Any = None) -> Number:
    del layout
    return number(torch.zeros(tuple(shape), dtype=dtype) + value).to(dtype)


def _split(x: torch.Tensor) -> tuple[Number, Number]:
    return number(x[..., 0]), number(x[..., 1])


def _where(condition: Any, x: Any, y: Any) -> Number:
    return number(torch.where(torch.as_tensor(condition), x, y))


def _max(x: torch.Tensor, axis: int) -> Number:
    """As the hardware's: what isn't a number doesn't count."""
    return number(torch.where(x.isnan(), -torch.inf, x) if x.is_floating_point() else x).amax(axis)


def _pair(function: Any) -> Callable[[Any, Any], Number]:
    return lambda x, y: number(function(torch.as_tensor(x), torch.as_tensor(y)))


def _layout(*arguments: Any, **others: Any) -> None:
    del arguments, others


class _SharedLayout:
    """NVMMASharedLayout, of which only the names count."""

    get_default_for = staticmethod(_layout)

    def __init__(self, *arguments: Any) -> None:
        del arguments


def gluon_modules(machine: Machine) -> dict[str, types.ModuleType]:
    """Stand-ins for the modules that an emitted file imports, by their names."""
    language = types.ModuleType("language")
    language.__dict__.update(
        constexpr=lambda value: value, static_range=range,
        tensor=Number, shared_memory_descriptor=Shared,
        float32=torch.float32, float16=torch.float16, bfloat16=torch.bfloat16,
        float8e4nv=torch.float8_e4m3fn, int16=torch.int16,
        int32=torch.int32, int64=torch.int64,
        NVMMADistributedLayout=_layout, SliceLayout=_layout, DotOperandLayout=_layout,
        BlockedLayout=_layout, SwizzledSharedLayout=_layout, NVMMASharedLayout=_SharedLayout,
        program_id=lambda axis: number(machine.here.program),
        num_programs=lambda axis: number(machine.programs),
        cdiv=lambda x, y: (x + y - 1) // y,
        minimum=_pair(torch.fmin), maximum=_pair(torch.fmax), where=_where,
        full=_full, zeros=lambda shape, dtype, layout=None: _full(shape, 0, dtype),
        arange=lambda start, end, layout=None: number(
            torch.arange(start, end, dtype=torch.int32)
        ),
        expand_dims=_expand_dims, split=_split, join=lambda x, y: number(torch.stack((x, y), -1)),
        static_assert=_assert,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        exp2=torch.exp2, log2=torch.log2,
        sum=lambda x, axis: x.sum(axis), max=_max,
        min=lambda x, axis: x.amin(axis),
        load=_load, store=_store, atomic_add=machine.atomic_add, atomic_xchg=machine.atomic_xchg,
        allocate_shared_memory=machine.allocate, warp_specialize=machine.warp_specialize,
    )  # fmt: skip
    mbarrier = types.SimpleNamespace(
        MBarrierLayout=lambda: "barriers", init=_init, wait=machine.wait, arrive=machine.arrive,
        expect=machine.expect,
    )  # fmt: skip
    tma = types.SimpleNamespace(
        async_load=machine.load, async_store=machine.store, store_wait=machine.store_wait,
        async_atomic_add=lambda desc, at, place: machine.store(desc, at, place, add=True),
    )  # fmt: skip
    hopper = types.ModuleType("hopper")
    hopper.__dict__.update(
        fence_async_shared=lambda: None, mbarrier=mbarrier, tma=tma,
        warpgroup_mma=machine.product, warpgroup_mma_wait=machine.product_wait,
    )  # fmt: skip
    gluon = types.ModuleType("gluon")
    gluon.__dict__.update(
        jit=lambda function: function,
        constexpr_function=lambda function: function,
        language=language,
    )
    host = types.ModuleType("host")
    host.__dict__.update(TensorDescriptor=None)
    name = "triton.experimental.gluon"
    return {
        name: gluon, f"{name}.language": language, f"{name}.language.nvidia.hopper": hopper,
        f"{name}.nvidia.hopper": host,
    }  # fmt: skip


def _to_e4m3(x: torch.Tensor) -> Number:
    """As the conversion of the hardware: what is too large becomes the largest, NaN stays."""
    return number(x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))


def _transpose(rows: Shared, columns: Shared, keys: int, warps: int) -> None:
    del warps
    assert rows.shape[0] % keys == 0
    bits = rows.data.view(torch.uint8)[key_order(rows.shape[0])]
    columns.data.view(torch.uint8).copy_(bits.T)


def _row_max_beside(s: torch.Tensor, m: torch.Tensor) -> Number:
    """As integers where that may do: what isn't above m is some number that isn't."""
    parts = s.reshape(s.shape[0], -1, 4, 2)
    top = parts.view(torch.int32).amax((1, 3))
    low = (top < 0) & (m.view(torch.int32) < 0).unsqueeze(1)
    # A warp has 16 rows, and decides for all of them.
    by_warp = low.reshape(-1, 16 * 4).any(1).repeat_interleave(16).unsqueeze(1)
    return _max(torch.where(by_warp, parts.amax((1, 3)), top.view(torch.float32)), 1)


def _assert(condition: bool) -> None:
    assert condition


def _init(barrier: Barrier, count: int) -> None:
    barrier.count = barrier.pending = count


@contextmanager
def _imports(modules: dict[str, types.ModuleType]) -> Iterator[None]:
    # Those that are there before may be put back: what imports Gluon later finds it whole.
    saved = {name: importlib.import_module(name) for name in modules}
    gluon = saved["triton.experimental.gluon"]
    experimental = importlib.import_module("triton.experimental")
    sys.modules.update(modules)
    experimental.gluon = modules[gluon.__name__]  # type: ignore[attr-defined]
    try:
        yield
    finally:
        experimental.gluon = gluon  # type: ignore[attr-defined]
        sys.modules.update(saved)


def device_code(text: str, machine: Machine) -> dict[str, Any]:
    """The names of an emitted file, its Gluon functions ready to run on ``machine``.

    What is inline assembly there is replaced by what it computes.
    """
    path = f"<emitted {hash(text)}>"
    names: dict[str, Any] = {"__name__": "emitted", "__file__": path}
    # Triton, whose own functions may be in the file, asks linecache for their lines.
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    with _imports(gluon_modules(machine)):
        exec(compile(text, path, "exec"), names)
    names.update(
        {
            "rescale": lambda acc, alpha: acc * alpha,
            "computed": lambda x: x,
            "pack": lambda p, dtype: p.to(dtype),
            "operand": lambda packed, dtype, layout: packed,
            "exp2": lambda x, by_fma: torch.exp2(x),
            "pack_e4m3": lambda p: _to_e4m3(p[:, key_order(p.shape[1])]),
            "operand_e4m3": lambda packed, layout: packed,
            "load_e4m3": lambda q, layout: q.load(layout),
            "row_max_beside": _row_max_beside,
            "transpose": _transpose,
        }
    )
    return names
