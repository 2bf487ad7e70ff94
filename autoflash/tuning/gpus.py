"""Which GPUs of this host a tune uses, by the names that CUDA_VISIBLE_DEVICES takes."""

from collections.abc import Sequence

from autoflash.errors import InvalidInputError
from autoflash.settings import settings


def gpu_names(wanted: str | Sequence[int] | None) -> list[str | None]:
    """Of each wanted GPU the name that makes a worker see it alone; [None]: the first, as it is.

    ``wanted`` is None, 'all', '0,1' or [0, 1]: places among the GPUs that this process sees, which
    are counted without a CUDA context. Raises InvalidInputError.
    """
    if wanted is None:
        return [None]
    import torch

    count = torch.cuda.device_count()
    places = list(range(count)) if wanted == "all" else _places(wanted)
    if not places:
        raise InvalidInputError(f"gpus={wanted!r}: no GPU is visible to torch")
    if len(set(places)) < len(places):
        raise InvalidInputError(f"gpus={wanted!r}: names a GPU twice")
    for place in places:
        if not 0 <= place < count:
            raise InvalidInputError(f"gpus={wanted!r}: {place} is none of the {count} GPUs here")
    visible = settings().visible_gpus
    return [visible[place] if len(visible) >= count else str(place) for place in places]


def _places(wanted: str | Sequence[int]) -> list[int]:
    texts = wanted.split(",") if isinstance(wanted, str) else [str(place) for place in wanted]
    for text in texts:
        if not (text.strip().isascii() and text.strip().isdigit()):
            raise InvalidInputError(f"gpus={wanted!r}: give 'all', or numbers such as 0,1")
    return [int(text) for text in texts]
