"""Quantisation on the GPU gives the bits that torch gives on the CPU."""

import itertools

import pytest
import torch
from torch import Tensor

import autoflash

NAMES = ("q", "k", "v", "q_descale", "k_descale", "v_descale")


def inputs(dtype: torch.dtype, rows: int, keys: int, dim: int, dim_v: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((6, rows, dim), (2, keys, dim), (2, keys, dim_v))
    tensors = [torch.randn(2, *shape, generator=generator) for shape in shapes]
    for x in tensors:
        x[torch.rand(x.shape, generator=generator) < 0.001] *= 50
        x[:, 0, :128] = 0
    return [x.to(dtype) for x in tensors]


def same(found: autoflash.QuantizedQKV, want: autoflash.QuantizedQKV) -> None:
    """Bit for bit."""
    for name in NAMES:
        got, expected = getattr(found, name).cpu(), getattr(want, name)
        assert got.stride() == expected.stride()
        if expected.dtype == torch.float8_e4m3fn:
            got, expected = got.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(got, expected), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_bits(dtype: torch.dtype, granularity: str, hadamard: bool) -> None:
    sizes = ((1000, 777, 128, 128), (130, 4097, 64, 96), (1, 300, 256, 256), (77, 15, 80, 63))
    for size, transpose_v, permute_keys in itertools.product(sizes, (False, True), (False, True)):
        if permute_keys and not transpose_v:
            continue
        given = inputs(dtype, *size)
        options = {
            "granularity": granularity, "hadamard": hadamard, "seed": 3,
            "transpose_v": transpose_v, "permute_keys": permute_keys,
        }  # fmt: skip
        want = autoflash.quantize_fp8(*given, **options)
        same(autoflash.quantize_fp8(*(x.cuda() for x in given), **options), want)


@pytest.mark.parametrize("granularity", ["tensor", "head", "block"])
def test_what_is_not_finite(granularity: str) -> None:
    given = inputs(torch.bfloat16, 300, 300, 128, 128)
    for x in given:
        for i, value in enumerate((torch.nan, -torch.nan, torch.inf, -torch.inf)):
            x[0, 1, 17 * i, 5 + i] = value
        x[1, 0] = torch.nan
    for hadamard in (False, True):
        options = {"granularity": granularity, "hadamard": hadamard, "transpose_v": True}
        want = autoflash.quantize_fp8(*given, **options)
        found = autoflash.quantize_fp8(*(x.cuda() for x in given), **options)
        same(found, want)


def test_strides_layouts_and_a_graph() -> None:
    given = [x.transpose(1, 2).contiguous() for x in inputs(torch.bfloat16, 500, 260, 128, 64)]
    want = autoflash.quantize_fp8(*given, layout="bshd", transpose_v=True)
    same(autoflash.quantize_fp8(*(x.cuda() for x in given), layout="bshd", transpose_v=True), want)
    columns = [x.cuda().mT.contiguous().mT for x in given]
    static = [x.clone() for x in columns]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = autoflash.quantize_fp8(*static, layout="bshd", transpose_v=True)
    for x, y in zip(static, columns, strict=True):
        x.copy_(2 * y)
    graph.replay()
    same(found, autoflash.quantize_fp8(*(2 * x for x in given), layout="bshd", transpose_v=True))


def test_long_tensors_take_64_bit_offsets() -> None:
    """A head that starts behind 2^31 elements."""
    x = torch.empty(1, 3, 1 << 23, 128, dtype=torch.bfloat16, device="cuda")
    x.normal_()
    values = x[:, :, :1].expand(-1, -1, 1 << 23, -1)
    found = autoflash.quantize_fp8(x[:, :, :16], x, values, granularity="block")
    last = x[:, 2:, -128:].cpu()
    want = autoflash.quantize_fp8(last, last, last, granularity="block")
    assert torch.equal(found.k[:, 2:, -128:].cpu().view(torch.uint8), want.k.view(torch.uint8))
    assert torch.equal(found.k_descale[:, 2:, -1:].cpu(), want.k_descale)
