"""The versions that stand in a record's provenance."""

from autoflash.settings import settings
from autoflash.store.record import Provenance, time_stamp
from autoflash.version import VERSION


def versions() -> dict[str, str]:
    """autoflash, triton, torch, cuda and driver of this process; '' where unknown."""
    import torch
    import triton

    cuda = torch.version.cuda or torch.version.hip or ""
    return {
        "autoflash": VERSION,
        "triton": triton.__version__,
        "torch": str(torch.__version__),
        "cuda": cuda,
        "driver": _driver(),
    }


def provenance(found: dict[str, str], source_hash: str) -> Provenance:
    """``found`` versions with the rendered kernel's hash, now, on this host."""
    origin = settings().origin
    return Provenance(**found, source_hash=source_hash, created_at=time_stamp(), origin=origin)


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        text = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 - pynvml's NVMLError has no public base but Exception
        return ""
    return text.decode() if isinstance(text, bytes) else str(text)
