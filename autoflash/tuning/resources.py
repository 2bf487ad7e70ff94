"""What a compiled binary needs (shared memory, registers, spills), read without a GPU."""

import re
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoflash.errors import CompileError
from autoflash.store.record import Trial
from autoflash.target import Target

_REGISTER_FILE = 65536
# NVIDIA keeps 1 KiB of shared memory for each resident block.
_RESERVED_SHARED = 1024


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Bytes of shared memory per program, registers per thread, bytes of spilled registers per
    thread."""

    shared_bytes: int
    registers: int
    spills: int

    @classmethod
    def most(cls, each: "Iterable[Resources]") -> "Resources":
        """What a chain of functions takes: of each resource the most that any of them does."""
        rows = [(r.shared_bytes, r.registers, r.spills) for r in each]
        shared, registers, spills = map(max, zip(*rows, strict=True))
        return cls(shared_bytes=shared, registers=registers, spills=spills)

    @classmethod
    def of(cls, trial: Trial) -> "Resources | None":
        """What the compiler had said of a stored trial; None if it never did."""
        if trial.shared_bytes is None or trial.registers is None or trial.spills is None:
            return None
        return cls(shared_bytes=trial.shared_bytes, registers=trial.registers, spills=trial.spills)

    def why_not(self, target: Target) -> str | None:
        """Why the binary can't be loaded on ``target``, or None."""
        if self.shared_bytes > target.shared_memory:
            return (
                f"needs {self.shared_bytes} bytes of shared memory, "
                f"{target.name} has {target.shared_memory}"
            )
        return None

    def why_spilled(self, tolerable: int) -> str | None:
        """Why the binary isn't worth timing, if more than ``tolerable`` bytes are spilled."""
        if self.spills > tolerable:
            return f"spills {self.spills} bytes of registers per thread"
        return None

    def blocks_per_sm(self, threads: int, target: Target) -> int:
        """Programs of ``threads`` threads that are resident on one SM."""
        # Registers are handed out to a warp in units of 256.
        per_thread = -(-max(self.registers, 24) // 8) * 8
        by_registers = _REGISTER_FILE // (per_thread * threads)
        if target.vendor == "amd":
            by_registers = 512 // max(1, per_thread) * 4 * target.warp_size // threads
        reserved = _RESERVED_SHARED if target.vendor == "nvidia" else 0
        by_shared = (target.shared_memory + reserved) // max(1, self.shared_bytes + reserved)
        return max(1, min(by_registers, by_shared, target.threads_per_sm // threads))


def resources_of(compiled: Any) -> Resources:
    """The Resources of a triton CompiledKernel. Raises CompileError if its tools can't say."""
    shared = int(compiled.metadata.shared)
    if "cubin" in compiled.asm:
        registers, spills = _from_cubin(compiled.asm["cubin"])
    else:
        registers, spills = _from_amdgcn(compiled.asm["amdgcn"])
    return Resources(shared_bytes=shared, registers=registers, spills=spills)


def _from_cubin(cubin: bytes) -> tuple[int, int]:
    import triton

    tool = str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        try:
            result = subprocess.run(
                [tool, "-res-usage", file.name], capture_output=True, text=True, check=True,
                timeout=30,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise CompileError(f"cuobjdump could not read the binary: {error}") from error
    registers = re.search(r"\bREG:(\d+)", result.stdout)
    stack = re.search(r"\bSTACK:(\d+)", result.stdout)
    if registers is None or stack is None:
        raise CompileError(f"cuobjdump said nothing of registers: {result.stdout[:200]}")
    # Our kernels have no local arrays: what is on the stack was spilled.
    return int(registers[1]), int(stack[1])


def _from_amdgcn(assembly: str) -> tuple[int, int]:
    def field(name: str) -> int:
        match = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(match[1]) if match else 0

    spills = field("vgpr_spill_count") + field("sgpr_spill_count")
    return field("vgpr_count"), 4 * spills
