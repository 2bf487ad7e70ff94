"""What the backward's dispatch allocates, copies and launches; CPU tensors stand in for a GPU's."""

from types import SimpleNamespace

import pytest
import torch

from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import TENSORS
from autoflash.runtime import dispatch, dispatch_bwd
from autoflash.runtime.dispatch_bwd import attention_bwd
from tests.runtime.stand_in import Unloaded, gpu_in, note_empty

NAMES = (*TENSORS["bwd"], "statistics")


@pytest.fixture
def gpu(monkeypatch):
    """Plans that were asked for, and the calls and addresses of each launch."""
    seen = SimpleNamespace(asked=[], calls=[], launches=[])

    def bind(call):
        seen.calls.append(call)
        return lambda stream, addresses: seen.launches.append(
            (stream, dict(zip(NAMES, addresses, strict=True)))
        )

    def launcher_for(problem, target, access, device):
        seen.asked.append((problem, access))
        choice = SimpleNamespace(tunable=False, passing=False)
        return Unloaded(KERNELS["flash_bwd"], bind), choice

    with gpu_in([dispatch_bwd], launcher_for, monkeypatch):
        yield seen


def inputs_of(rows=10, keys=12, dim_v=16):
    q, out, dout = (torch.zeros(2, 4, rows, d, dtype=torch.half) for d in (32, dim_v, dim_v))
    k, v = (torch.zeros(2, 2, keys, d, dtype=torch.half) for d in (32, dim_v))
    return {
        "dout": dout, "dlse": None, "q": q, "k": k, "v": v, "out": out,
        "lse": torch.zeros(2, 4, rows),
    }  # fmt: skip


def run(inputs, need_dq=True, need_dkv=True):
    return attention_bwd(*inputs.values(), 0.5, True, False, False, need_dq, need_dkv)


def test_addresses_go_by_name(gpu, monkeypatch):
    inputs = inputs_of()
    inputs["dlse"] = torch.zeros(2, 4, 10)
    made = note_empty(monkeypatch)
    grads = run(inputs)
    ((stream, addresses),) = gpu.launches
    assert stream == 7
    (statistics,) = made
    assert (statistics.shape, statistics.dtype) == ((2, 4, 10, 4), torch.float32)
    expected = {**inputs, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    expected["statistics"] = statistics
    assert addresses == {n: x.data_ptr() for n, x in expected.items()}
    ((problem, access),) = gpu.asked
    assert (problem.op, problem.seqlen_q, problem.seqlen_k, problem.causal) == ("bwd", 10, 12, True)
    assert access.aligned
    assert gpu.calls[0].given == set(TENSORS["bwd"])
    assert gpu.calls[0].scale == 0.5


@pytest.mark.parametrize(("need_dq", "need_dkv"), [(True, False), (False, True)])
def test_what_is_not_needed_is_not_allocated(gpu, need_dq, need_dkv):
    dq, dk, dv = run(inputs_of(), need_dq, need_dkv)
    assert [x is not None for x in (dq, dk, dv)] == [need_dq, need_dkv, need_dkv]
    wanted = ({"dq"} if need_dq else set()) | ({"dk", "dv"} if need_dkv else set())
    assert gpu.calls[0].given & {"dq", "dk", "dv"} == wanted
    for name in ("dq", "dk", "dv"):
        assert bool(gpu.launches[0][1][name]) == (name in wanted)
    assert gpu.launches[0][1]["dlse"] == 0


def test_a_plan_is_made_once(gpu):
    inputs = inputs_of()
    for _ in range(3):
        run(inputs)
    assert (len(gpu.asked), len(gpu.launches)) == (1, 3)
    run(inputs, need_dq=False)
    assert len(gpu.asked) == 2
    dispatch.forget()
    run(inputs)
    assert len(gpu.asked) == 3


def test_rows_that_are_not_contiguous_are_copied(gpu):
    inputs = inputs_of()
    inputs["dout"] = torch.ones(1, dtype=torch.half).expand(2, 4, 10, 16)
    inputs["dlse"] = torch.ones(1).expand(2, 4, 10)
    inputs["k"] = torch.zeros(2, 2, 32, 12, dtype=torch.half).mT
    run(inputs)
    addresses = gpu.launches[0][1]
    for name in ("dout", "dlse", "k"):
        assert addresses[name] not in (0, inputs[name].data_ptr())
    assert addresses["q"] == inputs["q"].data_ptr()
    assert gpu.calls[0].strides["dout"] == (4 * 10 * 16, 10 * 16, 16)


def test_rows_of_stride_zero_are_not_copied(gpu):
    inputs = inputs_of()
    inputs["dout"] = torch.ones(16, dtype=torch.half).expand(2, 4, 10, 16)
    run(inputs)
    assert gpu.launches[0][1]["dout"] == inputs["dout"].data_ptr()
    assert gpu.calls[0].strides["dout"] == (0, 0, 0)


def test_an_address_that_is_not_aligned_promises_nothing(gpu):
    inputs = inputs_of()
    inputs["lse"] = torch.zeros(2 * 4 * 10 + 1)[1:].view(2, 4, 10)
    run(inputs)
    assert not gpu.asked[0][1].aligned


def test_gradients_lie_as_their_tensors_do(gpu):
    inputs = inputs_of()
    inputs["q"] = torch.zeros(2, 10, 4, 32, dtype=torch.half).transpose(1, 2)
    dq, dk, _ = run(inputs)
    assert dq.stride() == inputs["q"].stride()
    assert dk.is_contiguous()
    assert gpu.calls[0].strides["dq"] == (10 * 4 * 32, 32, 4 * 32)


@pytest.mark.parametrize("lengths", [{"rows": 0}, {"keys": 0}])
def test_nothing_to_compute_gives_zeros(gpu, lengths):
    inputs = inputs_of(**lengths)
    for grad, name in zip(run(inputs), "qkv", strict=True):
        assert grad.shape == inputs[name].shape
        assert not grad.any()
    assert gpu.launches == []


@pytest.mark.parametrize(
    ("name", "bad", "message"),
    [
        ("dout", torch.zeros(2, 4, 10, 32, dtype=torch.half), r"dout is \(2, 4, 10, 32\)"),
        ("dout", torch.zeros(2, 4, 10, 16), "dout is .* torch.float32"),
        ("out", torch.zeros(2, 4, 9, 16, dtype=torch.half), r"out is \(2, 4, 9, 16\)"),
        ("lse", torch.zeros(2, 10, 4), r"lse is \(2, 10, 4\)"),
        ("dlse", torch.zeros(2, 4, 11), r"dlse is \(2, 4, 11\)"),
    ],
)
def test_what_does_not_go_together_is_refused(gpu, name, bad, message):
    with pytest.raises(InvalidInputError, match=message):
        run({**inputs_of(), name: bad})
    assert gpu.launches == []
