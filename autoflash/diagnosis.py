"""What ``autoflash doctor`` looks at."""

import shutil
from dataclasses import dataclass

from autoflash.errors import AutoFlashError
from autoflash.settings import DatabaseUrl, Place, settings


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One line: ``state`` is ok, warning or error."""

    state: str
    subject: str
    text: str


def diagnose(db: Place | None = None) -> list[Finding]:
    """GPU, driver, versions, compiler, store, kernel folder; raises nothing."""
    return [*_versions(), *_gpu(), _compiler(), *_store(db), *_lock(), _kernels()]


def _versions() -> list[Finding]:
    from autoflash.tuning.versions import versions

    found = versions()
    text = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    return [Finding(state="ok", subject="versions", text=text)]


def _gpu() -> list[Finding]:
    from autoflash.kernels import KERNELS
    from autoflash.problem import Problem
    from autoflash.target import current_target, gpu_is_present

    if not gpu_is_present():
        text = "none visible to torch: attention runs in torch, tune needs --target"
        return [Finding(state="warning", subject="gpu", text=text)]
    import torch

    findings = []
    probe = Problem(
        batch=1, heads=1, kv_heads=1, seqlen_q=128, seqlen_k=128, head_dim=64, head_dim_v=64,
        dtype="float16",
    )  # fmt: skip
    for index in range(torch.cuda.device_count()):
        target = current_target(index)
        served = [k.name for k in KERNELS.values() if k.serves(probe, target) is None]
        text = (
            f"{target.name}, {target.arch}, {target.sm_count} SMs, {target.memory_gib} GiB, "
            f"{target.shared_memory // 1024} KiB shared memory"
        )
        state = "ok" if served else "error"
        text += f"; kernels: {', '.join(served) or 'none'}"
        findings.append(Finding(state=state, subject=f"gpu {index}", text=text))
    return findings


def _compiler() -> Finding:
    # Triton builds its launcher with the host's C compiler.
    found = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if found is None:
        text = "no C compiler (cc, gcc, clang): Triton needs one to build its launcher"
        return Finding(state="error", subject="compiler", text=text)
    return Finding(state="ok", subject="compiler", text=str(shutil.which(found)))


def _store(db: Place | None) -> list[Finding]:
    from autoflash.store.shipped import all_shipped_records

    findings: list[Finding] = []
    try:
        shipped = len(all_shipped_records())
        findings = [Finding(state="ok", subject="shipped", text=f"{shipped} records")]
        stores = settings().stores()
    except AutoFlashError as error:
        return [*findings, Finding(state="error", subject="store", text=str(error))]
    findings += _records("store", db or stores["user"])
    return findings + (_records("site", stores["site"]) if "site" in stores else [])


def _records(subject: str, where: Place) -> list[Finding]:
    from autoflash.store.layers import is_there
    from autoflash.store.mounts import network_filesystem
    from autoflash.store.opening import open_store
    from autoflash.store.untrusted import exposure

    findings: list[Finding] = []
    kind = None
    try:
        if isinstance(where, DatabaseUrl):
            findings += _spool(where) if subject == "store" else []
        elif not is_there(subject, where):
            text = f"{where} is not there yet: the first tune makes it"
            return [Finding(state="ok", subject=subject, text=text)]
        else:
            kind = network_filesystem(where)
            findings += [
                Finding(state="warning", subject=subject, text=text) for text in exposure(where)
            ]
        count = len(open_store(where, read_only=True).records())
    except AutoFlashError as error:
        return [*findings, Finding(state="error", subject=subject, text=str(error))]
    text = f"{where}, {count} records" + (f", on {kind} (across a network)" if kind else "")
    return [*findings, Finding(state="ok", subject=subject, text=text)]


def _spool(url: DatabaseUrl) -> list[Finding]:
    """Whether results of a tune wait for the server. Raises StoreError."""
    from autoflash.store.opening import spool_path
    from autoflash.store.spool import waiting

    path = spool_path(url)
    if count := waiting(path):
        text = f"{count} rows wait in {path}: the next tune that reaches the server brings them"
        return [Finding(state="warning", subject="spool", text=text)]
    return []


def _lock() -> list[Finding]:
    from autoflash.locking import faults
    from autoflash.store.lock import load

    try:
        path = settings().lock_path
        if path is None:
            return []
        lock = load(path)
    except AutoFlashError as error:
        return [Finding(state="error", subject="lock", text=str(error))]
    if reasons := faults(lock):
        return [Finding(state="error", subject="lock", text=f"{path}: {reasons[0]}")]
    text = f"{path}, {len(lock.entries)} entries, digest {lock.digest[:12]}: nothing else is served"
    return [Finding(state="ok", subject="lock", text=text)]


def _kernels() -> Finding:
    try:
        folder = settings().cache_dir
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".doctor"
        probe.write_text("")
        probe.unlink()
    except (OSError, AutoFlashError) as error:
        text = f"emitted kernels can't be kept: {error}; set AUTOFLASH_CACHE_DIR"
        return Finding(state="warning", subject="kernel files", text=text)
    return Finding(state="ok", subject="kernel files", text=str(folder))
