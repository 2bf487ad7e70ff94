"""Trials of a study as a text file, for replaying them with no GPU (see RecordedRunner).

JSON: the problem, the target and the provenance stand once, then a line for each trial. Reading
goes through the store's own checks, so a file may come from a stranger.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from autoflash.errors import AutoFlashError, InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.store.plain import trial_from_plain, trial_to_plain
from autoflash.store.record import Measurement, Trial

FORMAT = "autoflash-trials"
VERSION = 1
# What differs from trial to trial, beside the kernel and its config's values.
_OWN = ("status", "reason", "predicted_ms", "shared_bytes", "registers", "spills", "came_from")
_COMMON = ("problem", "target", "provenance")
_MEASUREMENT = tuple(field.name for field in dataclasses.fields(Measurement))


def dump_trials(trials: Sequence[Trial]) -> str:
    """The document of one study's trials, in their order.

    Provenance is that of the first trial, but for the hash of each one's source. Raises
    InvalidInputError for trials of different problems or targets, or for none.
    """
    plains = [trial_to_plain(trial) for trial in trials]
    if not plains:
        raise InvalidInputError("there are no trials to write")
    first = plains[0]
    if any(plain[name] != first[name] for plain in plains for name in ("problem", "target")):
        raise InvalidInputError("trials of different problems or targets don't go into one file")
    params = {kernel: [p.name for p in KERNELS[kernel].space.params] for kernel in _kernels(plains)}
    head = {
        "format": FORMAT,
        "version": VERSION,
        **{name: first[name] for name in _COMMON},
        "params": params,
    }
    lines = ",\n".join(json.dumps(_row(plain, params), allow_nan=False) for plain in plains)
    body = json.dumps(head, sort_keys=True, indent=1, allow_nan=False).rstrip("}\n ")
    return f'{body},\n "trials": [\n{lines}\n ]\n}}\n'


def load_trials(text: str) -> list[Trial]:
    """The trials of a document. Raises InvalidInputError or ConfigError for what is none."""
    try:
        document = json.loads(text)
        head = {name: document[name] for name in _COMMON}
        params, rows = document["params"], document["trials"]
        known = document["format"] == FORMAT and document["version"] == VERSION
        plains = [_plain(row, head, params) for row in rows]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        if isinstance(error, AutoFlashError):
            raise
        raise InvalidInputError(f"not an {FORMAT} document: {str(error)[:200]}") from error
    if not known:
        raise InvalidInputError(f"not an {FORMAT} document of version {VERSION}")
    return [trial_from_plain(plain) for plain in plains]


def _kernels(plains: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({plain["kernel"] for plain in plains})


def _row(plain: dict[str, Any], params: dict[str, list[str]]) -> list[Any]:
    kernel, measurement = plain["kernel"], plain["measurement"]
    return [
        kernel,
        [plain["config"][name] for name in params[kernel]],
        plain["provenance"]["source_hash"],
        None if measurement is None else [measurement[name] for name in _MEASUREMENT],
        [plain[name] for name in _OWN],
    ]


def _plain(row: Any, head: dict[str, Any], params: dict[str, list[str]]) -> dict[str, Any]:
    kernel, values, source_hash, measurement, own = row
    return {
        **head,
        "provenance": {**head["provenance"], "source_hash": source_hash},
        "kernel": kernel,
        "config": dict(zip(params[kernel], values, strict=True)),
        "measurement": None
        if measurement is None
        else dict(zip(_MEASUREMENT, measurement, strict=True)),
        **dict(zip(_OWN, own, strict=True)),
    }
