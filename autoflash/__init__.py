"""AutoFlash: exact attention by kernels that are generated, tuned for your GPU and remembered.

Importing this touches no GPU, no file and no database, and loads no optuna, jinja2 or sqlalchemy.
"""

from typing import TYPE_CHECKING, Any

from autoflash.api import Explanation, attention, explain
from autoflash.errors import (
    AutoFlashError,
    CompileError,
    ConfigError,
    InvalidInputError,
    LockError,
    MissingRecordError,
    StoreError,
    UnsupportedError,
)
from autoflash.fp8 import Fp8KV
from autoflash.problem import Problem
from autoflash.quantize import QuantizedQKV, quantize_fp8, quantize_kv_fp8
from autoflash.target import Target
from autoflash.version import VERSION

if TYPE_CHECKING:
    from autoflash.store.store import Store
    from autoflash.tuning.tune import tune

__version__ = VERSION

__all__ = [
    "AutoFlashError",
    "CompileError",
    "ConfigError",
    "Explanation",
    "Fp8KV",
    "InvalidInputError",
    "LockError",
    "MissingRecordError",
    "Problem",
    "QuantizedQKV",
    "Store",
    "StoreError",
    "Target",
    "UnsupportedError",
    "__version__",
    "attention",
    "explain",
    "quantize_fp8",
    "quantize_kv_fp8",
    "tune",
]

_LAZY = {"Store": "autoflash.store.store", "tune": "autoflash.tuning.tune"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'autoflash' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
