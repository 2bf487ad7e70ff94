"""What only ptxas's log tells of a binary: whether it runs the matrix instructions one by one."""

import contextlib
import hashlib
import io
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoflash.codegen.source_cache import write_whole
from autoflash.errors import CompileError
from autoflash.settings import settings

# Its names for "wgmma.mma_async instructions are serialized", each with its own cause.
_SERIALIZED = re.compile(r"\((C75(?:1[02-5]|18))\)[^\n]*")
_LIMIT_S = 20.0


@contextlib.contextmanager
def log_of_compiling() -> Iterator[io.StringIO]:
    """What ptxas says while something is compiled; nothing of what comes from Triton's cache."""
    from triton import knobs

    with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
        knobs.nvidia.dump_ptxas_log = True
        yield log


def why_serialized(compiled: Any, log: str = "") -> str | None:
    """What ptxas has against running sm_90's matrix instructions asynchronously, or None.

    Such a binary is right, but waits for each product. ``log`` is that of its compiling. For one
    that comes from Triton's cache the PTX is assembled once more, by the first process that asks:
    the others read its verdict from the cache folder. Raises CompileError if that fails.
    """
    name, ptx = compiled.metadata.name, compiled.asm["ptx"]
    digest = hashlib.sha256(f"{_ptxas_version()}\n{ptx}".encode()).hexdigest()
    path = settings().cache_dir / "ptxas" / f"{digest[:32]}.txt"
    if f"entry function '{name}'" in log:
        own = [line for line in log.splitlines() if f"'{name}'" in line or "'" not in line]
        return _keep(path, _verdict("\n".join(own)))
    try:
        return path.read_text(encoding="utf-8") or None
    except (OSError, UnicodeDecodeError):
        return _keep(path, _verdict(_assemble(ptx)))


def _verdict(log: str) -> str:
    found = _SERIALIZED.search(log)
    return "" if found is None else f"ptxas serializes the products: {found[0]}"[:300]


def _keep(path: Path, verdict: str) -> str | None:
    """Saves others the work, where the folder can be written."""
    with contextlib.suppress(OSError):
        write_whole(path, verdict)
    return verdict or None


def _assemble(ptx: str) -> str:
    """What ptxas says of ``ptx``."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [_ptxas().path, "-v", "--gpu-name=sm_90a", file.name, "-o", "/dev/null"]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, check=True, timeout=_LIMIT_S
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CompileError(f"ptxas could not assemble once more: {error}") from error
    return result.stderr + result.stdout


def _ptxas_version() -> str:
    return str(_ptxas().version)


def _ptxas() -> Any:
    """The assembler that Triton uses for sm_90: it may ship several."""
    from triton.backends.nvidia.compiler import get_ptxas

    return get_ptxas(90)
