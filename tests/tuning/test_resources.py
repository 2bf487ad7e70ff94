"""What a binary needs, read from cubins and AMD assembly; how many of it an SM holds."""

import dataclasses
import subprocess
from types import SimpleNamespace

import pytest

from autoflash.errors import CompileError
from autoflash.target import named_target
from autoflash.tuning.ptxas import why_serialized
from autoflash.tuning.resources import Resources, resources_of

A100, H100, MI300X = map(named_target, ("a100", "h100", "mi300x"))


def need(shared=0, registers=32, spills=0):
    return Resources(shared_bytes=shared, registers=registers, spills=spills)


def test_shared_memory_up_to_the_limit():
    assert need(shared=232448).why_not(H100) is None
    assert need(shared=232449).why_not(H100) == (
        "needs 232449 bytes of shared memory, NVIDIA H100 80GB HBM3 has 232448"
    )
    assert need(shared=232448).why_not(A100) == (
        "needs 232448 bytes of shared memory, NVIDIA A100-SXM4-80GB has 166912"
    )


def test_spills_alone_do_not_stop_a_binary():
    assert need(spills=4096, registers=255).why_not(H100) is None


@pytest.mark.parametrize(
    ("shared", "registers", "threads", "expected"),
    [
        # 65536 registers / (128 threads x 128) = 4; 168 makes 3; 255 is handed out as 256: 2.
        (0, 128, 128, 4),
        (0, 168, 128, 3),
        (0, 255, 128, 2),
        (0, 255, 256, 1),
        # Handed out in eights: 121 counts as 128, 120 as 120.
        (0, 121, 256, 2),
        (0, 120, 128, 4),
        # 228 KiB an SM, and 1 KiB more a block: 3 of 75 KiB, 2 of 75 KiB and a byte.
        (75 * 1024, 32, 128, 3),
        (75 * 1024 + 1, 32, 128, 2),
        (227 * 1024, 32, 128, 1),
        # 2048 threads an SM.
        (0, 24, 128, 16),
        (0, 24, 256, 8),
        (0, 1, 1024, 2),
        # What doesn't fit is reported elsewhere; here at least one runs.
        (10**6, 255, 1024, 1),
    ],
)
def test_blocks_per_sm_of_an_h100(shared, registers, threads, expected):
    assert need(shared, registers).blocks_per_sm(threads, H100) == expected


def test_blocks_per_sm_of_an_a100():
    # 164 KiB an SM.
    assert need(shared=81 * 1024).blocks_per_sm(128, A100) == 2
    assert need(shared=82 * 1024).blocks_per_sm(128, A100) == 1


@pytest.mark.parametrize(
    ("registers", "threads", "expected"),
    [
        # 512 registers a lane on each of 4 SIMDs: 4 waves of 128, so 16 waves, 4 blocks of 4 waves.
        (128, 256, 4),
        (256, 256, 2),
        (512, 256, 1),
        (64, 512, 4),
    ],
)
def test_blocks_per_cu_of_an_mi300x(registers, threads, expected):
    assert need(registers=registers).blocks_per_sm(threads, MI300X) == expected


AMDGCN = """
amdhsa.kernels:
  - .agpr_count:     0
    .name:           flash_fwd
    .sgpr_count:     40
    .sgpr_spill_count: {sgpr}
    .vgpr_count:     {vgprs}
    .vgpr_spill_count: {vgpr}
    .wavefront_size: 64
"""


@pytest.mark.parametrize(
    ("vgprs", "vgpr", "sgpr", "expected"),
    [
        (108, 0, 0, need(8192, 108, 0)),
        (512, 12, 0, need(8192, 512, 48)),
        (512, 12, 3, need(8192, 512, 60)),
    ],
)
def test_amd_assembly(vgprs, vgpr, sgpr, expected):
    text = AMDGCN.format(vgprs=vgprs, vgpr=vgpr, sgpr=sgpr)
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=8192), asm={"amdgcn": text})
    assert resources_of(compiled) == expected


def test_a_cubin_that_is_none():
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=0), asm={"cubin": b"\x7fELF" * 99})
    with pytest.raises(CompileError, match=r"^cuobjdump "):
        resources_of(compiled)


@pytest.mark.parametrize(
    ("stdout", "expected"),
    [
        (
            "Resource usage:\n Common:\n  GLOBAL:0\n Function flash_fwd:\n"
            "  REG:168 STACK:40 SHARED:0 LOCAL:0 CONSTANT[0]:660 TEXTURE:0 SURFACE:0 SAMPLER:0\n",
            need(5, 168, 40),
        ),
        ("Resource usage:\n Function f:\n  REG:24 STACK:0 SHARED:0\n", need(5, 24, 0)),
    ],
)
def test_what_cuobjdump_says(monkeypatch, stdout, expected):
    seen = []

    def run(command, **options):
        seen.append((command, options["timeout"]))
        return SimpleNamespace(stdout=stdout)

    monkeypatch.setattr("autoflash.tuning.ptxas.subprocess.run", run)
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=5), asm={"cubin": b"x"})
    assert resources_of(compiled) == expected
    ((command, limit),) = seen
    assert command[0].endswith("/cuobjdump")
    assert command[1] == "-res-usage"
    assert limit <= 60


def test_cuobjdump_that_says_nothing(monkeypatch):
    monkeypatch.setattr(
        "autoflash.tuning.ptxas.subprocess.run", lambda *a, **k: SimpleNamespace(stdout="?")
    )
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=5), asm={"cubin": b"x"})
    with pytest.raises(CompileError, match=r"^cuobjdump said nothing of registers: \?$"):
        resources_of(compiled)


def test_cuobjdump_that_is_missing(monkeypatch):
    def run(*args, **options):
        raise FileNotFoundError("cuobjdump")

    monkeypatch.setattr("autoflash.tuning.ptxas.subprocess.run", run)
    compiled = SimpleNamespace(metadata=SimpleNamespace(shared=5), asm={"cubin": b"x"})
    with pytest.raises(CompileError, match=r"^cuobjdump could not read the binary: cuobjdump$"):
        resources_of(compiled)


def test_resources_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        need().spills = 1


# --- what ptxas has against asynchronous products


PTXAS = SimpleNamespace(path="bin/ptxas", version="13.0")


@pytest.fixture
def ptxas(monkeypatch):
    """Finding it starts it, which these tests do in its place."""
    monkeypatch.setattr("autoflash.tuning.ptxas._ptxas", lambda: PTXAS)


def assembled(monkeypatch, log, seen=None):
    def run(command, **options):
        if seen is not None:
            with open(command[3], encoding="utf-8") as file:  # noqa: PTH123
                seen.append((command, options["timeout"], file.read()))
        return SimpleNamespace(stdout="", stderr=log)

    monkeypatch.setattr("autoflash.tuning.ptxas.subprocess.run", run)
    return why_serialized(binary(f".version 8.7 {log}"))


def binary(ptx, name="f"):
    return SimpleNamespace(asm={"ptx": ptx}, metadata=SimpleNamespace(name=name))


WGMMA = "wgmma.mma_async instructions are serialized due to"


@pytest.mark.parametrize("code", ["C7510", "C7512", "C7513", "C7514", "C7515", "C7518"])
@pytest.mark.usefixtures("ptxas")
def test_serialized_products_are_named(monkeypatch, code):
    seen = []
    log = (
        "ptxas info    : 0 bytes gmem\n"
        f"ptxas info    : ({code}) Potential Performance Loss: {WGMMA} something in 'f'\n"
        "ptxas info    : Used 168 registers\n"
    )
    reason = assembled(monkeypatch, log, seen)
    assert reason.startswith(f"ptxas serializes the products: ({code}) Potential Performance Loss")
    assert "\n" not in reason
    ((command, limit, text),) = seen
    assert command[0] == "bin/ptxas"
    assert "--gpu-name=sm_90a" in command
    assert limit <= 30
    assert text == f".version 8.7 {log}"


@pytest.mark.parametrize(
    "log", ["ptxas info    : Used 168 registers\n", "ptxas info    : (C7508) something else\n", ""]
)
@pytest.mark.usefixtures("ptxas")
def test_products_that_are_not_serialized(monkeypatch, log):
    assert assembled(monkeypatch, log) is None


COMPILING = "ptxas info    : Compiling entry function 'f' for 'sm_90a'\n"
LOSS = "ptxas info    : (C7510) Potential Performance Loss: {} in function '{}'\n"


@pytest.mark.parametrize(
    ("log", "serialized"),
    [(COMPILING, False), (LOSS.format(WGMMA, "f") + COMPILING, True),
     (LOSS.format(WGMMA, "g") + COMPILING + COMPILING.replace("'f'", "'g'"), False)],
)  # fmt: skip
@pytest.mark.usefixtures("ptxas")
def test_the_log_of_compiling_is_believed_and_kept(monkeypatch, log, serialized):
    def run(*args, **options):
        raise AssertionError("assembled once more")

    monkeypatch.setattr("autoflash.tuning.ptxas.subprocess.run", run)
    reason = why_serialized(binary(log), log)
    assert (reason is not None) == serialized
    assert not serialized or "(C7510)" in reason
    # Another process finds the binary in Triton's cache, and has no log.
    assert why_serialized(binary(log)) == reason


@pytest.mark.usefixtures("ptxas")
def test_a_log_of_others_says_nothing(monkeypatch):
    seen = []
    log = LOSS.format(WGMMA, "g") + COMPILING.replace("'f'", "'g'")
    assert assembled(monkeypatch, "of others", seen) is None
    assert len(seen) == 1
    assert why_serialized(binary("not seen yet"), log) is None
    assert len(seen) == 2


@pytest.mark.parametrize(
    "error",
    [FileNotFoundError("ptxas"), subprocess.TimeoutExpired("ptxas", 20),
     subprocess.CalledProcessError(255, "ptxas")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.usefixtures("ptxas")
def test_a_ptxas_that_fails_is_a_compile_error(monkeypatch, error):
    def run(*args, **options):
        raise error

    monkeypatch.setattr("autoflash.tuning.ptxas.subprocess.run", run)
    with pytest.raises(CompileError, match=r"^ptxas could not assemble once more: "):
        why_serialized(binary(repr(error)))


def test_spills_up_to_what_is_tolerable():
    assert need(spills=0).why_spilled(0) is None
    assert need(spills=64).why_spilled(64) is None
    assert need(spills=72).why_spilled(64) == "spills 72 bytes of registers per thread"
    assert need(spills=1).why_spilled(0) == "spills 1 bytes of registers per thread"
