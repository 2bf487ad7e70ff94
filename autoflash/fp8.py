"""What the numbers of fp8 attention mean: scales, and the ways in which v may lie.

x = descale * x8, with x8 in float8_e4m3fn. A descale is fp32 and comes in three granularities,
told apart by their number of dimensions:

- tensor, [] or [1]: one for all of it.
- head, [B, Hk]: of q too one per key/value head, for the query heads that it serves together
  (FlashAttention-3's convention). Of q [B, Hq] is taken as well.
- block, [B, H, ceil(S / 128)]: one per 128 rows of a head, counted from its first row; of q in
  query heads.

v lies by rows, [B, Hk, Sk, Dv], or in one of two transposed layouts, [B, Hk, Dv, S16], with S16 the
next multiple of 16 and zeros behind the last key: what fp8 matrix instructions read.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

E4M3_MAX = 448.0
SCALE_BLOCK = 128
GRANULARITIES = ("tensor", "head", "block")
# "columns": transposed, keys in their order. "permuted": inside each 16 keys in key_order.
V_LAYOUTS = ("rows", "columns", "permuted")
# Keys in a row of a transposed v are a multiple of this: 16 bytes, as the copy engine needs.
KEY_MULTIPLE = 16


def scale_blocks(rows: int) -> int:
    """Blocks of ``rows`` rows, the last of which may be short."""
    return -(-rows // SCALE_BLOCK)


def padded_keys(keys: int) -> int:
    """Length of a row of a transposed v."""
    return -(-keys // KEY_MULTIPLE) * KEY_MULTIPLE


def scale_shape(
    granularity: str, batch: int, heads: int, rows: int, group: int = 1
) -> tuple[int, ...]:
    """The shape of a descale of [batch, heads, rows, D]; ``group`` heads share one per head."""
    if granularity == "tensor":
        return (1,)
    if granularity == "head":
        return (batch, heads // group)
    return (batch, heads, scale_blocks(rows))


def scale_of_rows(scale: "Tensor | None", heads: int, rows: int) -> "Tensor":
    """The scale of each row, of a shape that broadcasts to [B, heads, rows]; ones for None."""
    import torch

    if scale is None:
        return torch.ones(1, 1, 1)
    if scale.dim() < 2:
        return scale.reshape(1, 1, 1)
    if scale.dim() == 2:
        by_row = scale.unsqueeze(2)
    else:
        by_row = scale.repeat_interleave(SCALE_BLOCK, dim=2)[:, :, :rows]
    return by_row.repeat_interleave(heads // scale.shape[1], dim=1)


def dequantize(x: "Tensor", scale: "Tensor | None", dtype: "torch.dtype | None" = None) -> "Tensor":
    """scale * x, for x [B, H, S, D], in ``dtype`` (fp64, where nothing is rounded)."""
    import torch

    dtype = dtype or torch.float64
    by_row = scale_of_rows(scale, x.shape[1], x.shape[2]).to(x.device, dtype)
    return x.to(dtype) * by_row.unsqueeze(-1)


def key_order(keys: int, device: "torch.device | str | None" = None) -> "Tensor":
    """The key at each position of a permuted v, [keys], ``keys`` a multiple of 16.

    Position 16a + 4q + 2g + e holds key 16a + 8g + 2q + e (g, e < 2; q < 4). The four scores that a
    thread of a matrix instruction gets of each 16 keys (its accumulator) are then the four
    probabilities that it must supply to the next one (its 8-bit operand): none changes threads.
    """
    import torch

    at = torch.arange(keys, device=device).reshape(-1, 2, 4, 2)
    return at.transpose(1, 2).reshape(keys)


def values_by_row(v: "Tensor", layout: str, keys: int) -> "Tensor":
    """v [B, Hk, ``keys``, Dv] of a v in any layout."""
    import torch

    if layout == "rows":
        return v
    columns = v.view(torch.uint8)
    if layout == "permuted":
        columns = columns[..., key_order(v.shape[-1], v.device).argsort()]
    return columns[..., :keys].transpose(2, 3).contiguous().view(v.dtype)


@dataclass(frozen=True, kw_only=True, repr=False)
class Fp8KV:
    """k and v of an attention call in float8_e4m3fn, packed as kernels read them, with scales.

    Made by ``autoflash.quantize_kv_fp8``, or the ``kv`` of what ``quantize_fp8`` gives; to be given
    to ``attention`` in place of k and v. What is in it may change with versions. A rotated one
    (``rotation_seed``) wants a q rotated by the same seed; ``layout`` is "bhsd" or "bshd", that of
    k and of the calls that it is for.
    """

    k: "Tensor"
    v: "Tensor"
    k_descale: "Tensor"
    v_descale: "Tensor"
    v_layout: str
    rotation_seed: int | None
    layout: str

    def __repr__(self) -> str:
        keys, heads = self.k.shape[1:3] if self.layout == "bshd" else self.k.shape[2:0:-1]
        return (
            f"Fp8KV({self.k.shape[0]} x {keys} keys of {heads} heads, v {self.v_layout}, "
            f"{self.nbytes} bytes)"
        )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes."""
        return sum(x.nbytes for x in (self.k, self.v, self.k_descale, self.v_descale))
