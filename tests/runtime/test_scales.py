"""Which descales are taken, and what is said of the others."""

import pytest
import torch

from autoflash.errors import InvalidInputError
from autoflash.runtime.scales import check_scale_values, check_scales

# batch 2, 6 query and 3 key/value heads, 200 rows and 300 keys
SHAPES = {
    "q_descale": [(), (1,), (2, 3), (2, 6), (2, 6, 2)],
    "k_descale": [(), (1,), (2, 3), (2, 3, 3)],
    "v_descale": [(), (1,), (2, 3), (2, 3, 3)],
}


def tensors(bshd=False, device="cpu"):
    q = torch.empty(2, 6, 200, 16, dtype=torch.float8_e4m3fn, device=device)
    k = torch.empty(2, 3, 300, 16, dtype=torch.float8_e4m3fn, device=device)
    return (q.transpose(1, 2), k.transpose(1, 2)) if bshd else (q, k)


def check(name, scale, bshd=False, device="cpu"):
    given = {**dict.fromkeys(SHAPES), name: scale}
    check_scales(*tensors(bshd, device), **given, bshd=bshd)


@pytest.mark.parametrize("bshd", [False, True])
@pytest.mark.parametrize(("name", "shape"), [(n, s) for n in SHAPES for s in SHAPES[n]])
def test_every_granularity_is_taken(name, shape, bshd):
    assert check(name, torch.ones(shape), bshd) is None
    assert check(name, None, bshd) is None


def test_strides_are_free():
    assert check("k_descale", torch.tensor(0.5).expand(2, 3, 3)) is None
    assert check("k_descale", torch.ones(3, 2).T) is None


@pytest.mark.parametrize(("name", "shape"), [
    ("q_descale", (2, 6, 3)), ("q_descale", (2, 3, 2)), ("q_descale", (2,)), ("q_descale", (0,)),
    ("q_descale", (2, 6, 2, 1)), ("k_descale", (2, 6)), ("k_descale", (2, 3, 2)),
    ("v_descale", (3, 2)), ("v_descale", (1, 3)), ("v_descale", (2, 6, 3)),
])  # fmt: skip
def test_other_shapes_are_refused_by_name(name, shape):
    with pytest.raises(InvalidInputError) as caught:
        check(name, torch.ones(shape))
    text = str(caught.value)
    assert text.startswith(f"{name} has shape {list(shape)}: must be [] or [1] for the whole")
    for allowed in SHAPES[name][2:]:
        assert str(list(allowed)) in text
    assert ("per query head" in text) == (name == "q_descale")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(InvalidInputError, match=r"v_descale is torch\..*: must be torch\.float32"):
        check("v_descale", torch.ones(2, 3, dtype=dtype))


def test_other_devices_are_refused():
    with pytest.raises(InvalidInputError, match="q_descale is on meta, its tensor on cpu"):
        check("q_descale", torch.ones(1, device="meta"))
    assert check("q_descale", torch.ones(2, 6, 2, device="meta"), device="meta") is None


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), float("-inf")])
def test_values_that_scale_nothing_are_refused(value):
    scale = torch.ones(2, 3)
    check_scale_values(q_descale=scale, k_descale=None, v_descale=torch.tensor(1e-30))
    scale[1, 1] = value
    with pytest.raises(InvalidInputError, match=f"k_descale holds {value}: a descale must be"):
        check_scale_values(q_descale=None, k_descale=scale, v_descale=None)


def test_values_elsewhere_are_not_looked_at():
    assert check_scale_values(q_descale=torch.ones(1, device="meta")) is None
