"""Rows to and from the nouns, and the WHERE clauses that find them."""

import dataclasses
import functools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from sqlalchemy import ColumnElement, Connection, Select

from autoflash.dtypes import kindred_dtypes
from autoflash.errors import InvalidInputError
from autoflash.problem import Bucket
from autoflash.space import Config
from autoflash.store.digest import config_text, record_digest, trial_digest
from autoflash.store.parts import (
    MEASUREMENT_FIELDS,
    PROBLEM_FIELDS,
    PROVENANCE_FIELDS,
    TARGET_FIELDS,
    Same,
    config_of,
    kernel_of,
    noun_of,
    problem_of,
    provenance_of,
    target_of,
)
from autoflash.store.plain import (
    own_of_trial,
    record_from_plain,
    record_to_plain,
    trial_from_plain,
    trial_to_plain,
)
from autoflash.store.record import Measurement, Trial, TuningRecord
from autoflash.target import Target

T = TypeVar("T")
# Of a table, by name, as ``models.columns_of`` gives them.
Columns = Mapping[str, ColumnElement[Any]]

MAX_REASON = 2000
_MAX_CONFIG = 4000
# Rows that are fetched in one call, or asked for by name: well below what SQLite takes as
# parameters of a statement.
AT_ONCE = 500
# The Bucket fields that decide the code, and the column of each of the others.
CODE_FIELDS = ("op", "dtype", "head_dim", "head_dim_v", "causal", "kv_dtype", "v_layout")
# Those beside the dtype in which records of one code may differ.
_KINDRED_FIELDS = ("out_dtype", "scales")
_SIZE_COLUMNS = {
    "group": "group_size",
    "batch_heads": "batch_heads",
    "seqlen_q": "bucket_seqlen_q",
    "seqlen_k": "bucket_seqlen_k",
}
BUCKET_COLUMNS = {name: name for name in (*CODE_FIELDS, *_KINDRED_FIELDS)} | _SIZE_COLUMNS
TARGET_COLUMNS = {name: f"target_{name}" for name in TARGET_FIELDS}
_OF_PROBLEM = operator.itemgetter(*PROBLEM_FIELDS)
_FIELDS = operator.attrgetter(*PROBLEM_FIELDS)
_OF_TARGET = operator.itemgetter(*TARGET_COLUMNS.values())
_OF_MEASUREMENT = operator.itemgetter(*MEASUREMENT_FIELDS)
_OF_PROVENANCE = operator.itemgetter(*PROVENANCE_FIELDS)
_SIZES = operator.attrgetter(*_SIZE_COLUMNS)
_OF_SIZES = operator.itemgetter(*_SIZE_COLUMNS.values())
_TRIAL_FIELDS = (
    *("status", "reason", "predicted_ms", "shared_bytes", "registers", "spills"),
    "came_from",
)


def record_to_row(record: TuningRecord) -> dict[str, Any]:
    """Raises InvalidInputError or ConfigError for what a read would refuse."""
    plain = record_to_plain(record)
    record_from_plain(plain)
    own = {"kind": record.kind, "digest": record_digest(record)}
    return {**_common_columns(plain, record), **own}


def trial_to_row(trial: Trial) -> dict[str, Any]:
    """Raises InvalidInputError or ConfigError for what a read would refuse.

    A reason is a compiler's or a driver's words: cut and made storable, not refused.
    """
    reason = trial.reason.encode("utf-8", "replace").decode("utf-8").replace("\0", "")
    if trial.reason != reason[:MAX_REASON]:
        trial = dataclasses.replace(trial, reason=reason[:MAX_REASON])
    plain = trial_to_plain(trial)
    trial_from_plain(plain)
    own = {name: plain[name] for name in _TRIAL_FIELDS} | {"digest": trial_digest(trial)}
    return {**_common_columns(plain, trial), **own}


def in_chunks(values: Sequence[T]) -> Iterator[Sequence[T]]:
    """As many at a time as a statement may name."""
    for start in range(0, len(values), AT_ONCE):
        yield values[start : start + AT_ONCE]


def rows_of(
    connection: Connection, query: Select[Any], parameters: Mapping[str, Any] | None = None
) -> Iterator[dict[str, Any]]:
    """What ``query`` finds, each row by its columns, as it comes."""
    result = connection.execute(query, parameters)
    names = tuple(result.keys())
    for rows in result.partitions(AT_ONCE):
        for row in rows:
            yield dict(zip(names, row, strict=True))


def record_from_row(row: Mapping[str, Any]) -> TuningRecord:
    """Raises InvalidInputError or ConfigError for a row that can't be trusted."""
    record = TuningRecord(
        **_common_nouns(row),
        measurement=noun_of(Measurement, _OF_MEASUREMENT(row)),
        kind=row["kind"],
    )
    _check_bucket(row, record.bucket)
    return record


def trial_from_row(row: Mapping[str, Any]) -> Trial:
    """Raises InvalidInputError or ConfigError for a row that can't be trusted."""
    own = {name: row[name] for name in _TRIAL_FIELDS}
    timed = _OF_MEASUREMENT(row)
    untimed = set(timed) == {None}
    trial = Trial(
        **_common_nouns(row),
        **own_of_trial(own),
        measurement=None if untimed else noun_of(Measurement, timed),
    )
    _check_bucket(row, trial.bucket)
    return trial


def same_code(columns: Columns, bucket: Bucket) -> list[ColumnElement[bool]]:
    """Rows whose config could carry over to ``bucket``."""
    equal = ((name, getattr(bucket, name)) for name in CODE_FIELDS if name != "dtype")
    return [*_equal(columns, equal), columns["dtype"].in_(kindred_dtypes(bucket.dtype))]


def same_bucket(columns: Columns, bucket: Bucket) -> list[ColumnElement[bool]]:
    """Rows of exactly ``bucket``."""
    names = BUCKET_COLUMNS.items()
    return _equal(columns, ((column, getattr(bucket, name)) for name, column in names))


def same_target(columns: Columns, target: Target) -> list[ColumnElement[bool]]:
    """Rows of exactly ``target``'s identity."""
    names = TARGET_COLUMNS.items()
    return _equal(columns, ((column, getattr(target, name)) for name, column in names))


def _equal(columns: Columns, pairs: Iterable[tuple[str, Any]]) -> list[ColumnElement[bool]]:
    return [columns[column] == value for column, value in pairs]


def _common_columns(plain: dict[str, Any], noun: TuningRecord | Trial) -> dict[str, Any]:
    measurement = plain["measurement"] or dict.fromkeys(MEASUREMENT_FIELDS)
    return {
        **dict(zip(PROBLEM_FIELDS, _FIELDS(noun.problem), strict=True)),
        **dict(zip(_SIZE_COLUMNS.values(), _SIZES(noun.bucket), strict=True)),
        **{f"target_{name}": value for name, value in plain["target"].items()},
        "kernel": plain["kernel"],
        "config": config_text(noun),
        **measurement,
        **plain["provenance"],
    }


def _common_nouns(row: Mapping[str, Any]) -> dict[str, Any]:
    problem = problem_of(*_OF_PROBLEM(row))
    return {
        "problem": problem,
        "target": target_of(*_OF_TARGET(row)),
        "kernel": row["kernel"],
        "config": _config(Same(kernel_of(row["kernel"], problem).space), row["config"]),
        "provenance": provenance_of(*_OF_PROVENANCE(row)),
    }


# Of many rows few configs differ.
@functools.lru_cache(maxsize=4096)
def _config(same: Same, text: object) -> Config:
    if not isinstance(text, str) or len(text) > _MAX_CONFIG:
        raise InvalidInputError(f"config: must be JSON text, at most {_MAX_CONFIG} characters")
    try:
        plain = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"config: not JSON: {str(error)[:80]}") from error
    return config_of(same, plain)


def _check_bucket(row: Mapping[str, Any], bucket: Bucket) -> None:
    """A row found under a bucket that its problem doesn't fall into would mislead lookups."""
    given, wanted = _OF_SIZES(row), _SIZES(bucket)
    if given != wanted:
        for column, a, b in zip(_SIZE_COLUMNS.values(), given, wanted, strict=True):
            if a != b:
                raise InvalidInputError(f"{column}={str(a)[:80]}: its problem gives {b}")
