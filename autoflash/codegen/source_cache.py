"""Emitted files: written atomically, checked against the rendered text, imported."""

import linecache
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import ModuleType

from autoflash.codegen.render import Source
from autoflash.settings import settings

_lock = threading.Lock()


def emit(source: Source) -> Path:
    """Write ``source`` into the cache folder unless it stands there unchanged. Returns its path.

    Falls back to a folder of this process when the cache folder can't be written.
    """
    try:
        return _write(settings().cache_dir, source)
    except OSError:
        return _write(_private_dir(), source)


def load(source: Source) -> ModuleType:
    """Import the emitted file as a module (once per process)."""
    return _load(f"autoflash_generated.{source.name}", source)


def load_device(source: Source) -> ModuleType:
    """The same for its device code alone: sources that differ in header and footer share a module.

    Triton's cache key holds the module's name: this one is the same in every process, and for all
    that compile to the same binary.
    """
    return _load(f"autoflash_generated.{source.kernel}_{source.kernel_hash}", source)


def _load(name: str, source: Source) -> ModuleType:
    path = str(emit(source))
    with _lock:
        module = sys.modules.get(name)
        if module is None:
            module = sys.modules[name] = _execute(name, path, source)
    return module


def _execute(name: str, path: str, source: Source) -> ModuleType:
    """A module of the text that was rendered, at the path where it was written.

    The text is run, not the file: neither the file nor a .pyc beside it is trusted. Triton asks
    linecache for the lines of each kernel, and gets them from there.
    """
    module = ModuleType(name)
    module.__file__ = path
    lines = source.text.splitlines(keepends=True)
    linecache.cache[path] = (len(source.text), None, lines, path)
    sys.modules[name] = module
    try:
        exec(compile(source.text, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _write(folder: Path, source: Source) -> Path:
    path = folder / f"{source.name}.py"
    # The file is compared, not trusted: whoever can write the folder could otherwise plant code
    # under a name that we import.
    try:
        if path.read_text(encoding="utf-8") == source.text:
            return path
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    write_whole(path, source.text)
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file, and its folder, so that nobody ever reads a part of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


_private: list[Path] = []


def _private_dir() -> Path:
    if not _private:
        _private.append(Path(tempfile.mkdtemp(prefix="autoflash-kernels-")))
    return _private[0]
