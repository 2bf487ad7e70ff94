"""What tensors may be like, by name: each Access that a call of an op can have."""

from autoflash.kernels.kernel import Access

# The copy engine reads them; they are aligned to 16 bytes; neither.
_PLACES = {"tma": (True, True), "aligned": (True, False), "any": (False, False)}


def _of_backward(place: str, aligned: bool, tma: bool) -> dict[str, Access]:
    return {
        place + (" repeatable" if repeatable else "") + ("" if whole else " part"): Access(
            aligned=aligned, tma=tma, whole=whole, repeatable=repeatable
        )
        for repeatable in (False, True)
        for whole in (True, False)
    }


# A forward has one result beside the LSE, and it always repeats.
ACCESSES: dict[str, dict[str, Access]] = {
    "fwd": {name: Access(aligned=a, tma=t) for name, (a, t) in _PLACES.items()},
    "bwd": {k: v for name, (a, t) in _PLACES.items() for k, v in _of_backward(name, a, t).items()},
}


def access_name(access: Access, op: str) -> str:
    """The name of ``access`` in a call of ``op``: 'tma', 'any repeatable', 'tma part', ..."""
    for name, known in ACCESSES[op].items():
        if op == "fwd" and (known.aligned, known.tma) == (access.aligned, access.tma):
            return name
        if known == access:
            return name
    raise ValueError(f"no tensors are like {access}")
