"""How fp8 kernels are given descales: the arguments, by name, and what a call puts there."""

from autoflash.kernels.kernel import Argument, Call, Pointer

DESCALES = ("q_descale", "k_descale", "v_descale")
POINTERS = tuple(f"{t}_scale_ptr" for t in "qkv")
# By batch, head of k (and the query head in its group) and block of 128 rows. There is no group in
# the heads of k and v.
STRIDES = tuple(
    f"stride_{s}" for s in ("qsb", "qsh", "qsg", "qsm", "ksb", "ksh", "ksn", "vsb", "vsh", "vsn")
)
SCALED = ("q_scaled", "k_scaled", "v_scaled")
# What an aligned call promises of them, which are given as they are: nothing.
DIVISIBLE = dict.fromkeys((*POINTERS, *STRIDES), 1)


def pointers() -> list[Argument]:
    """What POINTERS are."""
    return [Pointer(tensor=name) for name in DESCALES]


def strides(call: Call) -> list[Argument]:
    """What STRIDES are; zeros for a descale that isn't given."""
    q, k, v = (call.strides.get(name, (0, 0, 0, 0)) for name in DESCALES)
    return [*q, k[0], k[1], k[3], v[0], v[1], v[3]]


def scaled(call: Call) -> list[Argument]:
    """What SCALED are: whether each descale is given."""
    return [int(name in call.given) for name in DESCALES]
