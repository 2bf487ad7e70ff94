"""The launch below Triton's own: the arguments must be those that Triton itself would pass.

No GPU is needed: the C launcher is replaced by one that notes what it is given.
"""

import contextvars
import inspect
import threading
from types import SimpleNamespace

import pytest
import torch
from triton.backends.nvidia import driver as nvidia
from triton.tools.tensor_descriptor import TensorDescriptor

from autoflash.runtime import triton_launch
from autoflash.runtime.triton_launch import (
    AddressOnly,
    make_encoder,
    make_launch,
    takes_encoded,
)

FUNCTION, STREAM, METADATA = 0xF00, 0x57, ("packed", "metadata")
GENERAL = "kernel_signature" in inspect.getsource(nvidia.CudaLauncher)


class Programs(int):
    """The first argument of a launch. ``noting`` calls it with the others."""

    def __call__(self, *arguments):
        self.seen = (int(self), *arguments)


# A built-in function, as the C launcher is one, that calls its first argument with the rest.
noting = contextvars.Context().run


def triton_launcher(launch, scratch=0, profile=0):
    """Triton's own launcher object around ``launch``, made without a GPU."""
    run = object.__new__(nvidia.CudaLauncher)
    vars(run).update(
        launch=launch, arg_annotations=["annotation"], kernel_signature=b"signature", num_ctas=1,
        global_scratch_size=scratch, global_scratch_align=1, profile_scratch_size=profile,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=True,
    )  # fmt: skip
    if not GENERAL:
        del run.kernel_signature, run.arg_annotations
    return run


def compiled_of(run, tensordesc_meta=()):
    return SimpleNamespace(
        run=run, function=FUNCTION, packed_metadata=METADATA,
        metadata=SimpleNamespace(tensordesc_meta=list(tensordesc_meta)),
    )  # fmt: skip


def wrapped(launcher):
    """What Triton makes of the C launcher for kernels with descriptors."""

    def inner(*arguments):
        launcher(*arguments)

    return inner


def test_the_c_launcher_gets_what_triton_would_give_it():
    run = triton_launcher(noting)
    ours, theirs = Programs(12), Programs(12)
    arguments = [0x1000, 64, 0.5, 128]
    make_launch(compiled_of(run))(ours, STREAM, arguments)
    run(theirs, 1, 1, STREAM, FUNCTION, METADATA, None, None, None, *arguments)

    def flat(seen):
        # Triton hands a tuple on, we hand the list.
        return [tuple(x) if isinstance(x, list) and x == arguments else x for x in seen]

    assert flat(ours.seen) == flat(theirs.seen)
    assert flat(ours.seen)[:5] == [12, 1, 1, STREAM, FUNCTION]
    assert (flat(ours.seen)[-1] == tuple(arguments)) == GENERAL


def test_the_c_launcher_is_found_below_tritons_wrapper_for_descriptors():
    run = triton_launcher(wrapped(noting))
    assert takes_encoded(compiled_of(run))
    programs = Programs(3)
    make_launch(compiled_of(run))(programs, STREAM, [1, 2])
    assert programs.seen[:5] == (3, 1, 1, STREAM, FUNCTION)


class Recorder:
    """A launcher object of a Triton that hides its C launcher, or that needs scratch memory."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __call__(self, *arguments):
        self.seen = arguments


@pytest.mark.parametrize(
    "attributes",
    [
        {},
        {"launch": wrapped(lambda *arguments: None)},
        {"launch": noting, "global_scratch_size": 128},
        {"launch": noting, "profile_scratch_size": 128},
    ],
    ids=["no launch", "no C function", "scratch", "profile scratch"],
)
def test_otherwise_triton_launches_itself(attributes):
    run = Recorder(**attributes)
    make_launch(compiled_of(run))(12, STREAM, [0x1000, 64])
    assert run.seen == (12, 1, 1, STREAM, FUNCTION, METADATA, None, None, None, 0x1000, 64)


@pytest.fixture
def bindings(monkeypatch):
    """Threads whose CUDA context was bound; there is no CUDA."""
    threads = []
    monkeypatch.setattr(triton_launch, "_thread", threading.local())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: threads.append(threading.get_ident()))
    return threads


def describe(address=0x4000):
    shape, block = [2, 3, 500, 64], [1, 1, 128, 64]
    strides = [3 * 500 * 64, 500 * 64, 64, 1]
    return TensorDescriptor(AddressOnly(address, torch.bfloat16), shape, strides, block)


def test_without_the_c_launcher_a_descriptor_stays_as_it_is():
    descriptor = describe()
    compiled = compiled_of(Recorder())
    assert not takes_encoded(compiled)
    assert make_encoder(compiled)(0, descriptor) == [descriptor]


def test_a_launcher_with_scratch_takes_descriptors_as_they_are():
    compiled = compiled_of(Recorder(launch=noting, global_scratch_size=128))
    assert not takes_encoded(compiled)


def test_descriptors_are_encoded_by_triton_each_with_its_own_metadata(monkeypatch, bindings):
    calls = []

    def make_tensordesc_arg(descriptor, metadata):
        calls.append((descriptor.base.data_ptr(), metadata))
        return ["map", 500, 64]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", make_tensordesc_arg)
    compiled = compiled_of(triton_launcher(noting), tensordesc_meta=["q", "k", "v"])
    assert make_encoder(compiled)(1, describe(0x5000)) == ["map", 500, 64]
    assert make_encoder(compiled)(2, describe(0x6000)) == ["map", 500, 64]
    assert calls == [(0x5000, "k"), (0x6000, "v")]
    assert bindings == [threading.get_ident()]


def test_each_thread_binds_a_context_before_it_encodes(monkeypatch, bindings):
    bound_before = []
    monkeypatch.setattr(
        nvidia,
        "make_tensordesc_arg",
        lambda descriptor, metadata: [bound_before.append(threading.get_ident() in bindings)],
    )
    compiled = compiled_of(triton_launcher(noting))
    make_encoder(compiled)(0, describe())
    thread = threading.Thread(target=make_encoder(compiled), args=(0, describe()))
    thread.start()
    thread.join()
    make_encoder(compiled)(0, describe())
    assert bound_before == [True] * 3
    assert len(bindings) == len(set(bindings)) == 2


def test_a_triton_whose_encoder_takes_more_gets_none_for_the_rest(monkeypatch, bindings):
    def make_tensordesc_arg(descriptor, metadata, base):
        return [descriptor.shape[2], metadata, base]

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", make_tensordesc_arg)
    compiled = compiled_of(triton_launcher(noting), tensordesc_meta=["q"])
    assert make_encoder(compiled)(0, describe()) == [500, "q", None]


def test_without_copy_engine_a_descriptor_becomes_pointer_shape_and_strides(bindings):
    # Triton itself does this, when the binary has no metadata of descriptors.
    compiled = compiled_of(triton_launcher(noting))
    descriptor = describe(0x7000)
    flat = make_encoder(compiled)(0, descriptor)
    assert flat[0] is descriptor.base
    assert [x for x in flat[1:] if not isinstance(x, bool)][:8] == [
        *descriptor.shape, *descriptor.strides,
    ]  # fmt: skip
