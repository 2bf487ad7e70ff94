"""Emitted files: written once, atomically, never trusted, imported once."""

import dataclasses
import errno
import importlib.util
import multiprocessing
import os
import py_compile
import stat
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from autoflash.codegen import source_cache
from autoflash.codegen.render import Source, render
from autoflash.codegen.source_cache import emit, load, load_device
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.target import NAMED_TARGETS

PROCESSES = 8
ROUNDS = 20


def source_of(text: str = "VALUE = 1\n", name: str | None = None) -> Source:
    """A small Source. Its name is new, since a module is loaded once per process."""
    name = name or f"probe_{uuid.uuid4().hex[:12]}"
    return Source(kernel="probe", name=name, text=text, kernel_hash="0" * 16)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", str(tmp_path / "deep" / "kernels"))
    return tmp_path / "deep" / "kernels"


@pytest.fixture
def not_a_folder(tmp_path, monkeypatch):
    """A cache folder that can't be made, whoever asks (permission bits don't bind root)."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("AUTOFLASH_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    monkeypatch.setattr(source_cache, "_private", [])
    # The private folder goes where pytest cleans up.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / "file"


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_emit_writes_the_text_under_the_name(folder):
    source = source_of("# ü × ᵀ\nVALUE = 1\n")
    path = emit(source)
    assert path == folder / f"{source.name}.py"
    assert path.read_bytes() == source.text.encode("utf-8")
    assert files_below(folder) == [f"{source.name}.py"]


def test_a_second_emit_touches_nothing(folder):
    source = source_of()
    path = emit(source)
    os.utime(path, ns=(1, 1))
    os.utime(folder, ns=(1, 1))
    before = path.stat()
    assert emit(source) == path
    after = path.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, 1)
    assert folder.stat().st_mtime_ns == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"VALUE = 2\n", b"VALUE = 1\nimport os\n", b"VALUE = 1", b"VALUE = 1\n\xff\xfe", b"\x00"],
    ids=["empty", "other", "longer", "shorter", "not utf-8", "zero"],
)
def test_a_file_that_was_tampered_with_is_written_anew(folder, content):
    source = source_of()
    path = emit(source)
    path.write_bytes(content)
    assert emit(source) == path
    assert path.read_text() == source.text
    assert load(source).VALUE == 1


def test_a_link_is_replaced_and_its_target_left_alone(folder, tmp_path):
    source = source_of()
    folder.mkdir(parents=True)
    target = tmp_path / "precious"
    target.write_text("keep")
    (folder / f"{source.name}.py").symlink_to(target)
    path = emit(source)
    assert not path.is_symlink()
    assert path.read_text() == source.text
    assert target.read_text() == "keep"


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "disk full"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_no_half_file(folder, monkeypatch, error):
    source = source_of()

    def fail(self, target):
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(type(error)):
        source_cache._write(folder, source)
    assert files_below(folder) == []


def test_a_folder_that_cannot_be_written_is_not_an_error(not_a_folder, tmp_path):
    source = source_of()
    path = emit(source)
    assert path.read_text() == source.text
    assert path.parent.parent == tmp_path
    assert path.parent.name.startswith("autoflash-kernels-")
    # Only this user may write what this user imports.
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not_a_folder.read_text() == "in the way"
    assert load(source).VALUE == 1


def test_the_private_folder_is_one_per_process(not_a_folder):
    one, other = source_of(), source_of()
    path = emit(one)
    assert emit(other).parent == path.parent
    before = path.stat()
    assert emit(one) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert path.stat().st_ino == before.st_ino


def test_a_directory_in_the_place_of_the_file_is_not_an_error(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(source_cache, "_private", [])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = source_of()
    (folder / f"{source.name}.py" / "sub").mkdir(parents=True)
    path = emit(source)
    assert path.parent != folder
    assert path.read_text() == source.text
    assert files_below(folder) == []


def emit_at_once(folder, sources, barrier):
    # The fork server may be older than this test's environment.
    os.environ["AUTOFLASH_CACHE_DIR"] = str(folder)
    for source in sources:
        barrier.wait(timeout=60)
        path = emit(source)
        # Whoever wrote it: a reader never sees a part.
        assert path.read_text(encoding="utf-8") == source.text


def test_processes_that_emit_one_source_at_once_leave_one_good_file(folder):
    # Fresh processes that share nothing with this one, but import autoflash only once.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["autoflash.codegen.source_cache", "pytest"])
    sources = [source_of("VALUE = 1\n" * 2000) for _ in range(ROUNDS)]
    barrier = context.Barrier(PROCESSES)
    workers = [
        context.Process(target=emit_at_once, args=(folder, sources, barrier))
        for _ in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=90)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
    assert files_below(folder) == sorted(f"{source.name}.py" for source in sources)
    for source in sources:
        assert (folder / f"{source.name}.py").read_text() == source.text


def test_load_imports_once(folder):
    source = source_of("import sys\nsys.probe_runs = getattr(sys, 'probe_runs', 0) + 1\n")
    try:
        module = load(source)
        assert load(source) is module
        assert sys.probe_runs == 1
    finally:
        del sys.probe_runs
    assert module.__name__ == f"autoflash_generated.{source.name}"
    assert sys.modules[module.__name__] is module
    assert module.__file__ == str(folder / f"{source.name}.py")


def test_device_code_is_loaded_once_for_all_that_have_it(folder):
    first, second = source_of("VALUE = 1\n"), source_of("VALUE = 1\nFOOTER = 2\n")
    shared = uuid.uuid4().hex[:16]
    sources = [dataclasses.replace(s, kernel_hash=shared) for s in (first, second)]
    one, two = map(load_device, sources)
    assert one is two
    assert one.__name__ == f"autoflash_generated.probe_{shared}"
    # Each is there to be opened, and as a whole it is a module of its own.
    assert files_below(folder) == sorted(f"{s.name}.py" for s in sources)
    assert load(sources[1]).FOOTER == 2
    assert load_device(dataclasses.replace(second, kernel_hash="other")).FOOTER == 2


def test_threads_that_load_at_once_get_one_whole_module(folder):
    source = source_of(
        "import sys, time\nsys.probe_runs = getattr(sys, 'probe_runs', 0) + 1\n"
        "time.sleep(0.1)\nVALUE = 1\n"
    )
    barrier = threading.Barrier(PROCESSES)
    found = []

    def work():
        barrier.wait(timeout=30)
        module = load(source)
        found.append((id(module), module.VALUE))

    threads = [threading.Thread(target=work) for _ in range(PROCESSES)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
        assert sys.probe_runs == 1
    finally:
        del sys.probe_runs
    assert found == [(id(sys.modules[f"autoflash_generated.{source.name}"]), 1)] * PROCESSES


def test_a_source_that_fails_to_import_is_not_kept(folder):
    source = source_of("import sys\nVALUE = 1 // sys.probe_divisor\n")
    name = f"autoflash_generated.{source.name}"
    sys.probe_divisor = 0
    try:
        with pytest.raises(ZeroDivisionError):
            load(source)
        assert name not in sys.modules
        sys.probe_divisor = 1
        assert load(source).VALUE == 1
    finally:
        del sys.probe_divisor


KERNEL_IN_ANOTHER_PROCESS = """
import sys
from autoflash.codegen.render import render
from autoflash.codegen.source_cache import load_device
from autoflash.kernels import KERNELS
from autoflash.problem import Problem
from autoflash.target import NAMED_TARGETS
kernel = KERNELS["flash_fwd"]
problem = Problem.parse(dict(pair.split("=") for pair in sys.argv[1:]))
module = load_device(render(kernel, problem, kernel.default(problem, NAMED_TARGETS["h200"])))
print(module.__name__, module.flash_fwd.cache_key)
"""


def test_the_module_name_and_triton_key_are_those_of_any_process(folder, tmp_path):
    # Triton's disk cache answers other processes only if its key is the same in each.
    fields = {"batch": 1, "heads": 4, "seqlen": 100, "head_dim": 64}
    done = subprocess.run(
        [sys.executable, "-c", KERNEL_IN_ANOTHER_PROCESS, *(f"{k}={v}" for k, v in fields.items())],
        env={**os.environ, "AUTOFLASH_CACHE_DIR": str(tmp_path / "other"), "PYTHONHASHSEED": "7"},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    kernel, problem = KERNELS["flash_fwd"], Problem.parse(fields)
    source = render(kernel, problem, kernel.default(problem, NAMED_TARGETS["h200"]))
    module = load_device(source)
    assert module.__name__ == f"autoflash_generated.flash_fwd_{source.kernel_hash}"
    assert done.stdout.split() == [module.__name__, module.flash_fwd.cache_key]


def test_compiled_code_beside_the_file_is_not_run(folder):
    """Whoever can write the folder can plant a .pyc; the text that was rendered is run instead."""
    source = source_of("VALUE = 'rendered'\n")
    path = emit(source)
    evil = folder / "evil.py"
    evil.write_text("VALUE = 'planted'\n")
    py_compile.compile(
        str(evil),
        cfile=importlib.util.cache_from_source(str(path)),
        dfile=str(path),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    assert load(source).VALUE == "rendered"
