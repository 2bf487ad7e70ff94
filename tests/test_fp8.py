"""Scales of rows and layouts of v, against loops that are written otherwise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoflash.fp8 import (
    SCALE_BLOCK,
    dequantize,
    key_order,
    padded_keys,
    scale_of_rows,
    scale_shape,
    values_by_row,
)


def all_bytes(*shape: int) -> torch.Tensor:
    """An e4m3fn tensor that holds every byte, if it is large enough."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 256).to(torch.uint8).reshape(shape).view(torch.float8_e4m3fn)


def test_a_scale_serves_its_rows():
    heads, kv_heads, rows = 6, 2, 300
    per_head = torch.rand(2, kv_heads)
    per_block = torch.rand(2, heads, 3)
    whole = torch.tensor(0.5)
    x = torch.ones(2, heads, rows, 1).to(torch.float8_e4m3fn)
    for b, h, row in ((0, 0, 0), (1, 3, 127), (0, 5, 128), (1, 2, 299)):
        at = (b, h, row, 0)
        assert dequantize(x, per_head)[at] == per_head[b, h // 3].double()
        assert dequantize(x, per_block)[at] == per_block[b, h, row // 128].double()
        assert dequantize(x, whole)[at] == dequantize(x, whole.reshape(1))[at] == 0.5
        assert dequantize(x, None)[at] == 1
        assert dequantize(x, per_block[..., 1])[at] == per_block[b, h, 1].double()


@given(rows=st.integers(0, 3 * SCALE_BLOCK), blocks_of=st.sampled_from((1, 2)))
def test_rows_of_a_block_are_counted_from_the_heads_first(rows, blocks_of):
    blocks = -(-rows // SCALE_BLOCK)
    scale = torch.arange(blocks * blocks_of).reshape(1, blocks_of, blocks).float()
    found = scale_of_rows(scale, 2, rows)
    assert found.shape == (1, 2, rows)
    for head in range(2):
        own = head if blocks_of == 2 else 0
        assert found[0, head].tolist() == [own * blocks + r // SCALE_BLOCK for r in range(rows)]


def test_where_keys_lie_in_a_permuted_v():
    order = key_order(32).tolist()
    for a in range(2):
        for q in range(4):
            for g in range(2):
                for e in range(2):
                    assert order[16 * a + 4 * q + 2 * g + e] == 16 * a + 8 * g + 2 * q + e
    assert sorted(order) == list(range(32))


@pytest.mark.parametrize("keys", [0, 1, 15, 16, 17, 40])
@pytest.mark.parametrize("layout", ["columns", "permuted"])
def test_a_transposed_v_is_read_by_rows(keys, layout):
    v = all_bytes(2, 3, keys, 5)
    columns = torch.zeros(2, 3, 5, padded_keys(keys), dtype=torch.uint8)
    order = key_order(padded_keys(keys)).tolist()
    for position in range(padded_keys(keys)):
        key = order[position] if layout == "permuted" else position
        if key < keys:
            columns[..., position] = v[:, :, key].view(torch.uint8)
    found = values_by_row(columns.view(v.dtype), layout, keys)
    assert torch.equal(found.view(torch.uint8), v.view(torch.uint8))


def test_a_v_by_rows_is_itself():
    v = all_bytes(1, 1, 4, 8)
    assert values_by_row(v, "rows", 4) is v


def test_shapes_of_scales():
    assert scale_shape("tensor", 2, 6, 300) == (1,)
    assert scale_shape("head", 2, 6, 300, group=3) == (2, 2)
    assert scale_shape("block", 2, 6, 300, group=3) == (2, 6, 3)
    assert scale_shape("block", 2, 6, 0) == (2, 6, 0)
