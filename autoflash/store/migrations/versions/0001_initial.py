"""Records and trials."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TEXT = sa.String().with_variant(sa.String(collation="C"), "postgresql")
_COUNTED = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_KEY = [
    *["op", "dtype", "head_dim", "head_dim_v", "causal"],
    *["target_arch", "target_vendor", "target_name", "target_sm_count", "target_memory_gib"],
    *["group_size", "batch_heads", "bucket_seqlen_q", "bucket_seqlen_k"],
]


def upgrade() -> None:
    """Create both tables."""
    op.create_table("records", *_common_columns(), sa.Column("kind", _TEXT, nullable=False))
    op.create_table(
        "trials",
        *_common_columns(),
        sa.Column("status", _TEXT, nullable=False),
        sa.Column("reason", _TEXT, nullable=False),
        sa.Column("predicted_ms", sa.Double()),
        sa.Column("shared_bytes", sa.Integer()),
        sa.Column("registers", sa.Integer()),
        sa.Column("spills", sa.Integer()),
    )
    for table in ("records", "trials"):
        op.create_index(f"ix_{table}_key", table, _KEY)


def downgrade() -> None:
    """Drop both tables."""
    op.drop_table("trials")
    op.drop_table("records")


def _common_columns() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", _COUNTED, primary_key=True),
        *(_text(name) for name in ("op", "dtype")),
        *(_integer(name) for name in ("head_dim", "head_dim_v")),
        sa.Column("causal", sa.Boolean(), nullable=False),
        *(_integer(name) for name in ("batch", "heads", "kv_heads", "seqlen_q", "seqlen_k")),
        _integer("group_size"),
        sa.Column("batch_heads", sa.BigInteger(), nullable=False),
        sa.Column("bucket_seqlen_q", sa.BigInteger(), nullable=False),
        sa.Column("bucket_seqlen_k", sa.BigInteger(), nullable=False),
        *(_text(name) for name in ("target_vendor", "target_name", "target_arch")),
        *(_integer(name) for name in ("target_sm_count", "target_memory_gib")),
        *(_text(name) for name in ("kernel", "config")),
        *(sa.Column(name, sa.Double()) for name in ("median_ms", "p20_ms", "p80_ms")),
        sa.Column("repeats", sa.Integer()),
        sa.Column("method", _TEXT),
        sa.Column("noisy", sa.Boolean()),
        sa.Column("sm_clock_mhz", sa.Integer()),
        sa.Column("throttle", _TEXT),
        *(_text(name) for name in ("autoflash", "triton", "torch", "cuda", "driver")),
        *(_text(name) for name in ("source_hash", "created_at", "origin")),
    ]


def _text(name: str) -> sa.Column[str]:
    return sa.Column(name, _TEXT, nullable=False)


def _integer(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.Integer(), nullable=False)
