"""Rows to and from the nouns, and the WHERE clauses that find them."""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import ColumnElement

from autoflash.errors import InvalidInputError
from autoflash.problem import Bucket, Problem, kindred_dtypes
from autoflash.store.models import RecordRow, TrialRow
from autoflash.store.plain import (
    TARGET_FIELDS,
    record_from_plain,
    record_to_plain,
    trial_from_plain,
    trial_to_plain,
)
from autoflash.store.record import Measurement, Provenance, Trial, TuningRecord
from autoflash.target import Target

MAX_REASON = 2000
_MAX_CONFIG = 4000
# The Bucket fields that decide the code, and the column of each of the others.
CODE_FIELDS = ("op", "dtype", "head_dim", "head_dim_v", "causal")
_SIZE_COLUMNS = {
    "group": "group_size",
    "batch_heads": "batch_heads",
    "seqlen_q": "bucket_seqlen_q",
    "seqlen_k": "bucket_seqlen_k",
}
_BUCKET_COLUMNS = {name: name for name in CODE_FIELDS} | _SIZE_COLUMNS
PROBLEM_FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
_MEASUREMENT_FIELDS = tuple(field.name for field in dataclasses.fields(Measurement))
_PROVENANCE_FIELDS = tuple(field.name for field in dataclasses.fields(Provenance))
_TRIAL_FIELDS = (
    *("status", "reason", "predicted_ms", "shared_bytes", "registers", "spills"),
    "came_from",
)


def record_to_row(record: TuningRecord) -> RecordRow:
    """Raises InvalidInputError or ConfigError for what a read would refuse."""
    plain = record_to_plain(record)
    record_from_plain(plain)
    return RecordRow(**_common_columns(plain, record.bucket), kind=record.kind)


def trial_to_row(trial: Trial) -> TrialRow:
    """Raises InvalidInputError or ConfigError for what a read would refuse.

    A reason is a compiler's or a driver's words: cut and made storable, not refused.
    """
    reason = trial.reason.encode("utf-8", "replace").decode("utf-8").replace("\0", "")
    trial = dataclasses.replace(trial, reason=reason[:MAX_REASON])
    plain = trial_to_plain(trial)
    trial_from_plain(plain)
    own = {name: plain[name] for name in _TRIAL_FIELDS}
    return TrialRow(**_common_columns(plain, trial.bucket), **own)


def record_from_row(row: Mapping[str, Any]) -> TuningRecord:
    """Raises InvalidInputError or ConfigError for a row that can't be trusted."""
    record = record_from_plain({**_common_plain(row), "kind": row["kind"]})
    _check_bucket(row, record.bucket)
    return record


def trial_from_row(row: Mapping[str, Any]) -> Trial:
    """Raises InvalidInputError or ConfigError for a row that can't be trusted."""
    own = {name: row[name] for name in _TRIAL_FIELDS if name in row}
    # A file of before the column is read all the same.
    own.setdefault("came_from", "")
    trial = trial_from_plain({**_common_plain(row), **own})
    _check_bucket(row, trial.bucket)
    return trial


def same_code(table: type[RecordRow | TrialRow], bucket: Bucket) -> list[ColumnElement[bool]]:
    """Rows whose config could carry over to ``bucket``."""
    equal = ((name, getattr(bucket, name)) for name in CODE_FIELDS if name != "dtype")
    return [*_equal(table, equal), table.dtype.in_(kindred_dtypes(bucket.dtype))]


def same_bucket(table: type[RecordRow | TrialRow], bucket: Bucket) -> list[ColumnElement[bool]]:
    """Rows of exactly ``bucket``."""
    columns = _BUCKET_COLUMNS.items()
    return _equal(table, ((column, getattr(bucket, name)) for name, column in columns))


def same_target(table: type[RecordRow | TrialRow], target: Target) -> list[ColumnElement[bool]]:
    """Rows of exactly ``target``'s identity."""
    return _equal(table, ((f"target_{name}", getattr(target, name)) for name in TARGET_FIELDS))


def _equal(
    table: type[RecordRow | TrialRow], pairs: Iterable[tuple[str, Any]]
) -> list[ColumnElement[bool]]:
    return [getattr(table, column) == value for column, value in pairs]


def _common_columns(plain: dict[str, Any], bucket: Bucket) -> dict[str, Any]:
    measurement = plain["measurement"] or dict.fromkeys(_MEASUREMENT_FIELDS)
    return {
        **plain["problem"],
        **{column: getattr(bucket, name) for name, column in _SIZE_COLUMNS.items()},
        **{f"target_{name}": value for name, value in plain["target"].items()},
        "kernel": plain["kernel"],
        "config": json.dumps(plain["config"], sort_keys=True, separators=(",", ":")),
        **measurement,
        **plain["provenance"],
    }


def _common_plain(row: Mapping[str, Any]) -> dict[str, Any]:
    measurement = {name: row[name] for name in _MEASUREMENT_FIELDS}
    untimed = all(value is None for value in measurement.values())
    return {
        "problem": {name: row[name] for name in PROBLEM_FIELDS},
        "target": {name: row[f"target_{name}"] for name in TARGET_FIELDS},
        "kernel": row["kernel"],
        "config": _config(row["config"]),
        "measurement": None if untimed else measurement,
        "provenance": {name: row[name] for name in _PROVENANCE_FIELDS},
    }


def _config(text: object) -> object:
    if not isinstance(text, str) or len(text) > _MAX_CONFIG:
        raise InvalidInputError(f"config: must be JSON text, at most {_MAX_CONFIG} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"config: not JSON: {str(error)[:80]}") from error


def _check_bucket(row: Mapping[str, Any], bucket: Bucket) -> None:
    """A row found under a bucket that its problem doesn't fall into would mislead lookups."""
    for name, column in _SIZE_COLUMNS.items():
        given, wanted = row[column], getattr(bucket, name)
        if given != wanted:
            raise InvalidInputError(f"{column}={str(given)[:80]}: its problem gives {wanted}")
