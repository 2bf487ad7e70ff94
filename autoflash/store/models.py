"""The two tables: a real column for every field, so that anyone with ``sqlite3`` can query them.

A change here needs a revision in ``migrations/versions`` and its name in
``schema.SCHEMA_VERSIONS``; a test holds the two schemas together.
"""

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

from sqlalchemy import BigInteger, ColumnElement, Double, Index, Integer, String, literal_column
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from autoflash.store.schema import ADDED

# What must be equal for a config to carry over, the target, then the sizes: one index serves the
# exact lookup (all of it) and those of neighbours and of siblings (parts from the left).
KEY_COLUMNS = (
    *("op", "dtype", "head_dim", "head_dim_v", "causal", "kv_dtype", "v_layout"),
    *("target_arch", "target_vendor", "target_name", "target_sm_count", "target_memory_gib"),
    *("out_dtype", "scales", "group_size", "batch_heads", "bucket_seqlen_q", "bucket_seqlen_k"),
)
# What decides which of an origin's records of a place stands: the index alone says it. (No more
# than that: a server's index takes 2700 bytes of a row.)
EVIDENCE_COLUMNS = ("kind", "kernel", "origin", "noisy", "created_at", "median_ms")


# A server sorts and compares text by its own collation, unless a column says that bytes decide.
Text = String().with_variant(String(collation="C"), "postgresql")
# Only an INTEGER counts up by itself in SQLite (and has 64 bits there).
Key = BigInteger().with_variant(Integer(), "sqlite")


class Base(DeclarativeBase):
    """The declarative base; its metadata is the schema."""

    # float is said, since SQLAlchemy 2.0 and 2.1 differ: a time must come back to the last bit.
    type_annotation_map: ClassVar[dict[Any, Any]] = {float: Double(), str: Text}


class KeyColumns:
    """Which problem, bucket and target, and what ran. ``config`` is canonical JSON."""

    id: Mapped[int] = mapped_column(Key, primary_key=True)

    op: Mapped[str]
    dtype: Mapped[str]
    head_dim: Mapped[int]
    head_dim_v: Mapped[int]
    causal: Mapped[bool]
    # Of fp8; elsewhere what rows have from before these columns.
    kv_dtype: Mapped[str] = mapped_column(server_default="")
    out_dtype: Mapped[str] = mapped_column(server_default="")
    scales: Mapped[str] = mapped_column(server_default="")
    v_layout: Mapped[str] = mapped_column(server_default="rows")

    batch: Mapped[int]
    heads: Mapped[int]
    kv_heads: Mapped[int]
    seqlen_q: Mapped[int]
    seqlen_k: Mapped[int]

    # Powers of two: the next one above an int of 32 bits needs more.
    group_size: Mapped[int]
    batch_heads: Mapped[int] = mapped_column(BigInteger)
    bucket_seqlen_q: Mapped[int] = mapped_column(BigInteger)
    bucket_seqlen_k: Mapped[int] = mapped_column(BigInteger)

    target_vendor: Mapped[str]
    target_name: Mapped[str]
    target_arch: Mapped[str]
    target_sm_count: Mapped[int]
    target_memory_gib: Mapped[int]

    kernel: Mapped[str]
    config: Mapped[str]


class MeasurementColumns:
    """A Measurement. Null only in a trial that wasn't timed; a record without is refused."""

    median_ms: Mapped[float | None]
    p20_ms: Mapped[float | None]
    p80_ms: Mapped[float | None]
    repeats: Mapped[int | None]
    method: Mapped[str | None]
    noisy: Mapped[bool | None]
    sm_clock_mhz: Mapped[int | None]
    throttle: Mapped[str | None]


class ProvenanceColumns:
    """A Provenance: the versions, the rendered kernel's hash, when and where."""

    autoflash: Mapped[str]
    triton: Mapped[str]
    torch: Mapped[str]
    cuda: Mapped[str]
    driver: Mapped[str]
    source_hash: Mapped[str]
    created_at: Mapped[str]
    origin: Mapped[str]


class DigestColumn:
    """The SHA-256 of the noun's canonical text, by which an exchange knows it; "" for a row that
    was written before the column was. A revision that changes the text of nouns that are there must
    empty it."""

    digest: Mapped[str] = mapped_column(server_default="")


class RecordRow(KeyColumns, MeasurementColumns, ProvenanceColumns, DigestColumn, Base):
    """A TuningRecord."""

    __tablename__ = "records"
    __table_args__ = (
        Index("ix_records_key", *KEY_COLUMNS, *EVIDENCE_COLUMNS),
        Index("ix_records_digest", "digest"),
    )

    kind: Mapped[str]


class TrialRow(KeyColumns, MeasurementColumns, ProvenanceColumns, DigestColumn, Base):
    """A Trial."""

    __tablename__ = "trials"
    __table_args__ = (
        Index("ix_trials_key", *KEY_COLUMNS),
        Index("ix_trials_digest", "digest"),
    )

    status: Mapped[str]
    reason: Mapped[str]
    predicted_ms: Mapped[float | None]
    shared_bytes: Mapped[int | None]
    registers: Mapped[int | None]
    spills: Mapped[int | None]
    came_from: Mapped[str] = mapped_column(server_default="")


@functools.cache
def columns_of(table: type[RecordRow | TrialRow], version: str) -> Mapping[str, ColumnElement[Any]]:
    """The columns of ``table`` by name, as a database of that schema ``version`` can be asked for
    them: in place of one that it lacks, what it would hold."""
    found: dict[str, ColumnElement[Any]] = {}
    added = ADDED[table.__tablename__]
    for column in table.__table__.columns:
        since, held = added.get(column.name, ("", ""))
        lacks = literal_column(f"'{held}'", Text).label(column.name)
        found[column.name] = column if since <= version else lacks
    return found
