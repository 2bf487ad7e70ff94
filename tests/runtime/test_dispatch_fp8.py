"""What an fp8 call hands to its kernel, without a GPU: problem, strides, flags and addresses."""

import dataclasses
import math

import pytest
import torch

import autoflash
from autoflash import ops
from autoflash.dtypes import FP8
from autoflash.errors import InvalidInputError, UnsupportedError
from autoflash.kernels import KERNELS
from autoflash.kernels.kernel import TENSORS, Scratch
from autoflash.problem import Problem
from autoflash.runtime import dispatch_fp8
from autoflash.runtime.choose import Choice
from autoflash.runtime.inputs_fp8 import Operands
from tests.runtime.stand_in import Unloaded, gpu_in, note_empty

KERNEL = KERNELS["flash_fwd_fp8"]


class Launched(list):
    """The calls that were bound, with the access asked for; and the addresses of each launch."""

    def __init__(self):
        self.addresses = []


@pytest.fixture
def launched(monkeypatch):
    found = Launched()

    def bind(call):
        found[-1] = (*found[-1], call)
        return lambda stream, addresses: found.addresses.append(addresses)

    def launcher_for(problem, target, access, device):
        config = KERNEL.default(problem, target)
        found.append((problem, access))
        choice = Choice(kernel=KERNEL, config=config, how="tuned", layer="user", why="")
        return Unloaded(KERNEL, bind), choice

    with gpu_in([dispatch_fp8], launcher_for, monkeypatch):
        yield found


def given(granularity="block", v_layout="columns", bshd=False, **changes):
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 150, 32), (2, 300, 32), (2, 300, 16))
    q, k, v = (torch.randn(2, *shape, generator=generator) for shape in shapes)
    if bshd:
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    x = autoflash.quantize_fp8(
        q, k, v, granularity=granularity, transpose_v=v_layout != "rows",
        permute_keys=v_layout == "permuted", layout="bshd" if bshd else "bhsd",
    )  # fmt: skip
    found = Operands(x.q, x.k, x.v, x.q_descale, x.k_descale, x.v_descale, torch.bfloat16, v_layout)
    return found._replace(**changes)


PROBLEM = Problem(
    batch=2, heads=6, kv_heads=2, seqlen_q=150, seqlen_k=300, head_dim=32, head_dim_v=16,
    dtype=FP8, causal=True, scales="block", v_layout="columns",
)  # fmt: skip


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize("v_layout", ["rows", "columns", "permuted"])
def test_problem_strides_and_addresses(v_layout, bshd, launched):
    operands = given(v_layout=v_layout, bshd=bshd)
    out, lse = dispatch_fp8.attention_fwd_fp8(operands, 0.5, True, bshd, True)
    ((problem, access, call),) = launched
    assert problem == dataclasses.replace(PROBLEM, v_layout=v_layout)
    assert access.aligned
    assert access.tma
    assert (call.problem, call.scale, call.given) == (problem, 0.5, frozenset(TENSORS["fwd"]))
    by_token = {"q": (150 * 6 * 32, 32, 6 * 32), "k": (300 * 2 * 32, 32, 2 * 32)}
    by_head = {"q": (6 * 150 * 32, 150 * 32, 32), "k": (2 * 300 * 32, 300 * 32, 32)}
    for name, strides in (by_token if bshd else by_head).items():
        assert call.strides[name] == strides
    rows = (300 * 2 * 16, 16, 2 * 16) if bshd else (2 * 300 * 16, 300 * 16, 16)
    assert call.strides["v"] == (rows if v_layout == "rows" else (2 * 16 * 304, 16 * 304, 304))
    assert call.strides["q_descale"] == (6 * 2, 3 * 2, 2, 1)
    assert call.strides["k_descale"] == call.strides["v_descale"] == (2 * 3, 3, 0, 1)
    assert out.shape == ((2, 150, 6, 16) if bshd else (2, 6, 150, 16))
    assert (out.dtype, lse.shape) == (torch.bfloat16, (2, 6, 150))
    tensors = (*operands[:3], out, lse, *operands[3:6])
    assert launched.addresses == [tuple(x.data_ptr() for x in tensors)]


@pytest.mark.parametrize(
    ("scale", "strides"),
    [
        (torch.ones(()), (0, 0, 0, 0)),
        (torch.ones(1), (0, 0, 0, 0)),
        (torch.ones(2, 2), (2, 1, 0, 0)),
        (torch.ones(2, 6), (6, 3, 1, 0)),
        (torch.ones(2, 6, 2), (12, 6, 2, 1)),
        (torch.ones(6, 2).T, (1, 6, 2, 0)),
        (torch.ones(1).expand(2, 6, 2), (0, 0, 0, 0)),
    ],
)
def test_strides_of_a_descale_of_q(scale, strides, launched):
    dispatch_fp8.attention_fwd_fp8(given(q_descale=scale), 0.5, True, False, False)
    ((problem, _, call),) = launched
    assert call.strides["q_descale"] == strides
    # k and v have one for each block.
    assert problem.scales == "block"
    assert "lse" not in call.given


def test_a_descale_that_is_left_out_has_no_address(launched):
    operands = given("head", k_descale=None)
    dispatch_fp8.attention_fwd_fp8(operands, 0.5, True, False, False)
    ((problem, _, call),) = launched
    assert problem.scales == "head"
    assert "k_descale" not in call.given
    assert "k_descale" not in call.strides
    ((*_, lse, q_scale, k_scale, v_scale),) = launched.addresses
    assert (lse, k_scale) == (0, 0)
    assert (q_scale, v_scale) == (operands.q_descale.data_ptr(), operands.v_descale.data_ptr())


def test_scratch_lies_behind_the_descales(launched, monkeypatch):
    asked = []

    def scratch(kernel, problem):
        asked.append(problem)
        return (
            Scratch(name="sums", shape=(2, 6, problem.seqlen_q), dtype="float32"),
            Scratch(name="turned", shape=(2, 16, 304), dtype=FP8),
        )

    monkeypatch.setattr(type(KERNEL), "scratch", scratch)
    operands = given()
    made = note_empty(monkeypatch)
    for _ in range(2):
        dispatch_fp8.attention_fwd_fp8(operands, 0.5, True, False, False)
    # A plan remembers them; each call has its own.
    assert asked == [PROBLEM]
    shapes = [((2, 6, 150), torch.float32), ((2, 16, 304), torch.float8_e4m3fn)]
    assert [(x.shape, x.dtype) for x in made] == 2 * shapes
    descales = tuple(x.data_ptr() for x in operands[3:6])
    for (sums, turned), addresses in zip((made[:2], made[2:]), launched.addresses, strict=True):
        assert addresses[5:] == (*descales, sums.data_ptr(), turned.data_ptr())


def test_the_finest_granularity_names_the_problem(launched):
    for scales, expected in (
        ((None, None, None), "tensor"),
        ((torch.ones(1), None, torch.ones(2, 2)), "head"),
        ((torch.ones(2, 6), torch.ones(()), torch.ones(2, 2, 3)), "block"),
    ):
        names = ("q_descale", "k_descale", "v_descale")
        operands = given(**dict(zip(names, scales, strict=True)))
        dispatch_fp8.attention_fwd_fp8(operands, 0.5, True, False, False)
        assert launched[-1][0].scales == expected


def test_a_plan_is_made_once_for_what_a_kernel_may_assume(launched):
    operands = given()
    run = dispatch_fp8.attention_fwd_fp8
    for _ in range(2):
        run(operands, 0.5, True, False, True)
    assert len(launched) == 1
    assert len(launched.addresses) == 2
    others = [
        (operands._replace(out_dtype=torch.float16), 0.5, True, False, True),
        (operands._replace(v_layout="permuted"), 0.5, True, False, True),
        (operands._replace(q_descale=operands.q_descale[..., :1].expand(-1, -1, 2)), 0.5, True,
         False, True),
        (operands._replace(q_descale=None), 0.5, True, False, True),
        (operands, 0.25, True, False, True),
        (operands, 0.5, False, False, True),
        (operands, 0.5, True, False, False),
    ]  # fmt: skip
    for count, arguments in enumerate(others, 2):
        run(*arguments)
        assert len(launched) == count


def test_rows_that_are_not_contiguous_are_copied(launched):
    operands = given(v_layout="rows")
    bits = operands.k.view(torch.uint8)
    strange = bits.mT.contiguous().mT.view(torch.float8_e4m3fn)
    dispatch_fp8.attention_fwd_fp8(operands._replace(k=strange), 0.5, True, False, False)
    ((_, _, call),) = launched
    assert call.strides["k"] == (2 * 300 * 32, 300 * 32, 32)
    ((_, k, *_),) = launched.addresses
    assert k != strange.data_ptr()


def test_rows_of_other_widths_are_not_aligned(launched):
    operands = given(v_layout="rows")
    wide = torch.zeros(2, 6, 150, 40, dtype=torch.uint8).view(torch.float8_e4m3fn)[..., :32]
    dispatch_fp8.attention_fwd_fp8(operands._replace(q=wide), 0.5, True, False, False)
    # 40 bytes from row to row.
    assert not launched[0][1].aligned


@pytest.mark.parametrize(("rows", "keys"), [(0, 300), (150, 0)])
def test_nothing_to_compute_launches_nothing(rows, keys, launched):
    operands = given(v_layout="rows")
    operands = operands._replace(
        q=operands.q[:, :, :rows], k=operands.k[:, :, :keys], v=operands.v[:, :, :keys],
        q_descale=None, k_descale=None, v_descale=None,
    )  # fmt: skip
    out, lse = dispatch_fp8.attention_fwd_fp8(operands, 0.5, True, False, True)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    assert launched == []


def test_what_is_wrong_is_refused_before_a_plan(launched):
    with pytest.raises(InvalidInputError, match="q_descale has shape"):
        dispatch_fp8.attention_fwd_fp8(given(q_descale=torch.ones(3)), 0.5, True, False, True)
    assert launched == []


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_kernels_are_given_a_scale_above_zero(scale, launched, monkeypatch):
    seen = []
    run = ops.attention_fwd_fp8
    monkeypatch.setattr(
        ops, "attention_fwd_fp8", lambda *arguments: seen.append(arguments) or run(*arguments)
    )
    operands = given()
    ops.attention_fwd_fp8_cuda(*operands, scale, True, False, True)
    ((found, size, *_),) = seen
    assert size == (abs(scale) or 1.0)
    q = operands.q.float()
    assert torch.equal(found.q.float(), {0.3: q, -0.3: -q, 0.0: torch.zeros_like(q)}[scale])
    ((*_, call),) = launched
    assert call.scale == size


def test_torch_stands_in_where_no_kernel_serves(launched, monkeypatch, caplog):
    def nobody(*arguments):
        raise UnsupportedError("no kernel serves it")

    monkeypatch.setattr(dispatch_fp8, "launcher_for", nobody)
    operands = given()
    for _ in range(2):
        found = ops.attention_fwd_fp8_cuda(*operands, -0.3, True, False, True)
    expected = torch.ops.autoflash.attention_fwd_fp8(*operands, -0.3, True, False, True)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    (warning,) = caplog.records
    assert "fp8 attention by torch, in fp32 and slowly: no kernel" in warning.getMessage()
