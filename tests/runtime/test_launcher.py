"""BoundFunction and the counters of dynamic schedules: what a launch is given. No GPU is needed."""

import dataclasses
import threading

import pytest
import torch

from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import TENSORS, Call
from autoflash.problem import Problem
from autoflash.runtime import counters
from autoflash.runtime.launcher import BoundFunction, Launcher, Loaded
from autoflash.space import Config
from autoflash.target import named_target

KERNEL = KERNELS["flash_fwd_ws"]
H100 = named_target("h100")
PROBLEM = Problem(
    batch=2, heads=16, kv_heads=4, seqlen_q=2048, seqlen_k=2048, head_dim=128, head_dim_v=128,
    dtype="bfloat16", causal=True,
)  # fmt: skip
CONFIG = KERNEL.default(PROBLEM, H100)
ADDRESSES = (0x1000, 0x2000, 0x3000, 0x4000, 0x5000)


class Device:
    """What stands in for CUDA: the current device, whether it captures, the counters it made."""

    def __init__(self):
        self.index = 0
        self.capturing = False
        self.made: list[torch.Tensor] = []
        self.threads: list[int] = []

    def zeroed(self):
        self.made.append(torch.zeros(2, dtype=torch.int32))
        self.threads.append(threading.get_ident())
        return self.made[-1]


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(counters, "_addresses", {})
    monkeypatch.setattr(counters, "_kept", [])
    monkeypatch.setattr(counters, "_zeroed", device.zeroed)
    monkeypatch.setattr(counters, "_zeroed_now", lambda index: device.zeroed())
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: device.index, raising=False)
    monkeypatch.setattr(
        torch._C, "_cuda_isCurrentStreamCapturing", lambda: device.capturing, raising=False
    )
    return device


class Launches(list):
    """(programs, stream, arguments) of each launch."""

    def bound(self, config: Config = CONFIG, problem: Problem = PROBLEM) -> BoundFunction:
        strides = dict.fromkeys(("q", "k", "v", "out"), (2048 * 16 * 128, 2048 * 128, 128))
        (function,) = KERNEL.functions(problem, config)
        loaded = Loaded(
            function=function,
            encode=lambda index, host: [f"map {index}", host.base.address, *host.shape],
            launch=lambda programs, stream, arguments: self.append((programs, stream, arguments)),
        )
        given = frozenset(TENSORS["fwd"])
        call = Call(problem=problem, scale=0.5, strides=strides, given=given)
        return BoundFunction(loaded, call, TENSORS["fwd"], H100)


@pytest.fixture
def launches():
    return Launches()


def counter_of(launch):
    """The argument after the LSE's address."""
    arguments = launch[2]
    return arguments[arguments.index(ADDRESSES[4]) + 1]


def test_arguments_are_descriptors_then_lse_counter_sizes_and_constexprs(device, launches):
    launches.bound()(7, ADDRESSES)
    ((programs, stream, arguments),) = launches
    assert (programs, stream) == (132, 7)
    maps = [arguments[at : at + 6] for at in (0, 6, 12, 18)]
    assert [m[:2] for m in maps] == [[f"map {i}", ADDRESSES[i]] for i in range(4)]
    assert maps[0][2:] == [2, 16, 2048, 128]
    assert arguments[24:26] == [ADDRESSES[4], device.made[0].data_ptr()]
    constexprs = list(KERNEL.constexprs(PROBLEM, CONFIG).values())
    assert arguments[-len(constexprs) :] == constexprs
    assert arguments[26 : -len(constexprs)][1:4] == [16, 4, 32]


def test_packed_heads_have_descriptors_of_five_dimensions(device, launches):
    config = Config(**{**CONFIG, "PACK_HEADS": 4})
    launches.bound(config)(7, ADDRESSES)
    assert launches[0][2][:7] == ["map 0", ADDRESSES[0], 2, 4, 2048, 4, 128]


@pytest.mark.parametrize("schedule", ["grid", "persistent"])
def test_other_schedules_ask_for_no_counter(device, launches, schedule):
    launches.bound(Config(**{**CONFIG, "SCHEDULE": schedule}))(7, ADDRESSES)
    assert device.made == []
    assert launches[0][0] == (132 if schedule == "persistent" else 2 * 16 * 16)


def test_a_stream_keeps_its_counter(device, launches):
    one, other = launches.bound(), launches.bound(problem=dataclasses.replace(PROBLEM, batch=4))
    for stream in (7, 7, 9, 7, 9):
        one(stream, ADDRESSES)
        other(stream, ADDRESSES)
    assert len(device.made) == 2
    found = {stream: counter_of(launch) for launch in launches for stream in [launch[1]]}
    assert found == {7: device.made[0].data_ptr(), 9: device.made[1].data_ptr()}
    assert {(launch[1], counter_of(launch)) for launch in launches} == set(found.items())
    # Kept alive, and zero.
    assert [t.tolist() for t in counters._kept] == [[0, 0], [0, 0]]


def test_devices_do_not_share_streams_of_the_same_name(device, launches):
    bound = launches.bound()
    for device.index in (0, 1, 0):
        bound(0, ADDRESSES)
    assert len({counter_of(launch) for launch in launches}) == len(device.made) == 2


def test_every_captured_launch_has_its_own(device, launches):
    bound = launches.bound()
    bound(7, ADDRESSES)
    device.capturing = True
    for _ in range(3):
        bound(7, ADDRESSES)
    device.capturing = False
    bound(7, ADDRESSES)
    first, *captured, last = map(counter_of, launches)
    assert first == last == device.made[0].data_ptr()
    assert captured == [t.data_ptr() for t in device.made[1:]]
    assert len({first, *captured}) == 4
    # The graph's are its own to keep.
    assert len(counters._kept) == 1


def test_a_capture_makes_no_lasting_counter(device, launches):
    device.capturing = True
    launches.bound()(7, ADDRESSES)
    assert counters._addresses == {}


def test_the_stream_of_each_thread_is_another(device):
    per_thread = 2
    found = {}

    def work(name):
        found[name] = counters.counter(per_thread)[1]

    work("main")
    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found["main"] not in [found[i] for i in range(3)]
    assert counters.counter(per_thread)[1] == found["main"]


def test_threads_that_ask_at_once_get_one(device):
    barrier = threading.Barrier(8)
    found = []

    def work():
        barrier.wait(timeout=30)
        found.append(counters.counter(7)[1])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [device.made[0].data_ptr()] * 8


def test_a_lasting_counter_is_made_outside_of_the_callers_thread(device):
    # The caller's may be in an allocator pool that a CUDA graph's warm-up audits.
    counters.counter(7)
    assert device.threads[0] != threading.get_ident()
    device.capturing = True
    counters.counter(7)
    assert device.threads[1] == threading.get_ident()


def test_a_counter_that_can_not_be_made_is_asked_for_again(device, monkeypatch):
    def fail(index):
        raise torch.cuda.OutOfMemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(counters, "_zeroed_now", fail)
        with pytest.raises(torch.cuda.OutOfMemoryError, match="none left"):
            counters.counter(7)
    held, address = counters.counter(7)
    assert (held, address) == (None, device.made[0].data_ptr())


# -- chains ----------------------------------------------------------------------------------------


class Chain:
    """flash_bwd as a Launcher, but for the GPU."""

    kernel = KERNELS["flash_bwd"]
    problem = dataclasses.replace(PROBLEM, op="bwd")
    config = Config(**{**kernel.default(problem, H100), "LOAD": "pointer"})

    def __init__(self):
        self.launches = []
        self.launcher = object.__new__(Launcher)
        self.launcher.kernel, self.launcher.target = self.kernel, H100
        self.launcher.tensors = (*TENSORS["bwd"], "statistics")
        self.launcher.loaded = tuple(
            Loaded(function=f, launch=self.launch_of(f.name), encode=None)
            for f in self.kernel.functions(self.problem, self.config)
        )

    def launch_of(self, name):
        return lambda programs, stream, arguments: self.launches.append(
            (name, programs, stream, arguments)
        )

    def run(self, *results, dlse=False):
        """The launches of one call that wants ``results``."""
        tensors = {"q", "k", "v", "out", "dout", *results}
        strides = dict.fromkeys(tensors, (2048 * 16 * 128, 2048 * 128, 128))
        given = frozenset({"lse", *tensors, *({"dlse"} if dlse else ())})
        call = Call(problem=self.problem, scale=0.5, strides=strides, given=given)
        bound = self.launcher.bind(call)
        bound(7, [0x100 * (i + 1) for i in range(11)])
        return self.launches


def test_a_chain_is_launched_in_order_on_one_stream():
    launches = Chain().run("dq", "dk", "dv", dlse=True)
    assert [launch[0] for launch in launches] == [
        "flash_bwd_delta", "flash_bwd_dkdv", "flash_bwd_dq",
    ]  # fmt: skip
    assert {launch[2] for launch in launches} == {7}
    for (_, programs, _, arguments), function in zip(
        launches, Chain.kernel.functions(Chain.problem, Chain.config), strict=True
    ):
        assert programs == function.grid(Chain.problem, H100)
        assert len(arguments) == len(function.signature) + len(function.constexprs)
        assert arguments[len(function.signature) :] == list(function.constexprs.values())


def test_functions_of_a_chain_meet_in_the_scratch_buffer():
    address = dict(zip((*TENSORS["bwd"], "statistics"), range(0x100, 0xC00, 0x100), strict=True))
    functions = Chain.kernel.functions(Chain.problem, Chain.config)
    for launch, function in zip(Chain().run("dq", "dk", "dv", dlse=True), functions, strict=True):
        arguments = dict(zip(function.signature, launch[3], strict=False))
        for name, value in arguments.items():
            if name.endswith("_ptr"):
                assert value == address[name.removesuffix("_ptr")]
        assert arguments["statistics_ptr"] == 0xB00


@pytest.mark.parametrize(
    ("results", "names"),
    [
        (("dq",), ["flash_bwd_delta", "flash_bwd_dq"]),
        (("dk", "dv"), ["flash_bwd_delta", "flash_bwd_dkdv"]),
    ],
)
def test_what_nobody_wants_is_not_launched(results, names):
    launches = Chain().run(*results)
    assert [launch[0] for launch in launches] == names
