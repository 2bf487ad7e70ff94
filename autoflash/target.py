"""The GPU that a kernel is for. A Target can describe a GPU that isn't there.

Rates are vendor figures (dense fp16 with fp32 accumulation, device memory), used only to rank
candidates that haven't been timed; no claim rests on them.
"""

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoflash.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    import torch

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Target:
    """A GPU model: who it is (vendor, name, arch, sm_count, memory_gib) and what it can do.

    ``arch`` is 'sm_90' style for NVIDIA and 'gfx942' style for AMD. shared_memory is the most one
    block may ask for, in bytes; l2_bytes the last-level cache; tflops and bandwidth_tbs the rates.
    """

    vendor: str
    name: str
    arch: str
    sm_count: int
    memory_gib: int
    shared_memory: int
    l2_bytes: int
    warp_size: int
    tflops: float
    bandwidth_tbs: float
    clock_ghz: float

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 for a vendor other than NVIDIA."""
        return int(self.arch.removeprefix("sm_")) if self.vendor == "nvidia" else 0

    @property
    def has_tma(self) -> bool:
        """Whether Triton's tensor descriptors become bulk tensor copies (sm_90 and newer)."""
        return self.capability >= 90

    @property
    def threads_per_sm(self) -> int:
        """Threads that can be resident on one SM."""
        return 1536 if self.capability in (86, 87, 89, 120) else 2048

    @property
    def slug(self) -> str:
        """The name for files and tables: 'nvidia_h200'."""
        words = self.name.lower().replace("-", " ").split()
        text = "_".join("".join(c for c in word if c.isalnum() or c == ".") for word in words)
        return text if text.startswith(self.vendor) else f"{self.vendor}_{text}"

    @property
    def identity(self) -> tuple[str, str, str, int, int]:
        """What makes two GPUs the same target for a record."""
        return (self.vendor, self.name, self.arch, self.sm_count, self.memory_gib)


def _nvidia(name: str, arch: str, sms: int, gib: int, shared_kib: int, l2_mib: int,
            tflops: float, tbs: float, ghz: float) -> Target:  # fmt: skip
    return Target(vendor="nvidia", name=name, arch=arch, sm_count=sms, memory_gib=gib,
                  shared_memory=shared_kib * 1024, l2_bytes=l2_mib << 20, warp_size=32,
                  tflops=tflops, bandwidth_tbs=tbs, clock_ghz=ghz)  # fmt: skip


# name, arch, SMs, GiB as the driver reports them, KiB of shared memory per block, MiB of L2, rates
NAMED_TARGETS: dict[str, Target] = {
    "a100": _nvidia("NVIDIA A100-SXM4-80GB", "sm_80", 108, 80, 163, 40, 312, 2.04, 1.41),
    "l40s": _nvidia("NVIDIA L40S", "sm_89", 142, 44, 99, 96, 362, 0.864, 2.52),
    "h100": _nvidia("NVIDIA H100 80GB HBM3", "sm_90", 132, 80, 227, 50, 989, 3.35, 1.755),
    "h200": _nvidia("NVIDIA H200", "sm_90", 132, 140, 227, 60, 989, 4.8, 1.755),
    "b200": _nvidia("NVIDIA B200", "sm_100", 148, 180, 227, 126, 2250, 8.0, 1.85),
    "rtx5090": _nvidia("NVIDIA GeForce RTX 5090", "sm_120", 170, 32, 99, 96, 210, 1.79, 2.41),
    "mi300x": Target(vendor="amd", name="AMD Instinct MI300X", arch="gfx942", sm_count=304,
                     memory_gib=192, shared_memory=64 * 1024, l2_bytes=256 << 20, warp_size=64,
                     tflops=1307, bandwidth_tbs=5.3, clock_ghz=2.1),
}  # fmt: skip


def named_target(name: str) -> Target:
    """The Target called ``name`` ('h100'). Raises InvalidInputError and lists the known ones."""
    try:
        return NAMED_TARGETS[name.lower()]
    except KeyError:
        known = ", ".join(sorted(NAMED_TARGETS))
        raise InvalidInputError(f"unknown target {name!r}: known are {known}") from None


def gpu_is_present() -> bool:
    """Whether torch sees a GPU."""
    import torch

    return torch.cuda.is_available()


def current_target(device: "torch.device | int | None" = None) -> Target:
    """The Target of a GPU of this machine (default: the current one).

    Raises UnsupportedError if there is no GPU.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("no GPU is visible to torch: name a target, such as --target h100")
    index = device if isinstance(device, int) else torch.device(device or "cuda").index
    return _describe(torch.cuda.current_device() if index is None else index)


@functools.lru_cache(maxsize=64)
def _describe(index: int) -> Target:
    import torch

    props = torch.cuda.get_device_properties(index)
    amd = torch.version.hip is not None
    arch = props.gcnArchName.split(":")[0] if amd else f"sm_{props.major}{props.minor}"
    kin = _nearest_named(arch, props.name)
    share = props.multi_processor_count / kin.sm_count
    return Target(
        vendor="amd" if amd else "nvidia",
        name=props.name,
        arch=arch,
        sm_count=props.multi_processor_count,
        memory_gib=round_memory(props.total_memory),
        shared_memory=getattr(props, "shared_memory_per_block_optin", kin.shared_memory),
        l2_bytes=getattr(props, "L2_cache_size", 0) or kin.l2_bytes,
        warp_size=getattr(props, "warp_size", kin.warp_size),
        tflops=round(kin.tflops * share, 1),
        bandwidth_tbs=kin.bandwidth_tbs if share == 1 else round(kin.bandwidth_tbs * share, 3),
        clock_ghz=kin.clock_ghz,
    )


def round_memory(total_bytes: int) -> int:
    """GiB to the nearest 4: drivers report the same card's memory a little differently."""
    return max(1, round(total_bytes / _GIB / 4) * 4)


def _nearest_named(arch: str, name: str) -> Target:
    """The named target whose rates stand in for a GPU that isn't in the table."""
    for target in NAMED_TARGETS.values():
        if target.name == name:
            return target
    for target in NAMED_TARGETS.values():
        if target.arch == arch:
            return target
    if arch.startswith("gfx"):
        return NAMED_TARGETS["mi300x"]
    newer = [t for t in NAMED_TARGETS.values() if 0 < t.capability <= int(arch[3:])]
    return max(newer, key=lambda t: t.capability, default=NAMED_TARGETS["a100"])
