"""Records and trials have digests; the index of records answers where there are some."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_KEY = [
    *["op", "dtype", "head_dim", "head_dim_v", "causal"],
    *["target_arch", "target_vendor", "target_name", "target_sm_count", "target_memory_gib"],
    *["group_size", "batch_heads", "bucket_seqlen_q", "bucket_seqlen_k"],
]
# What decides which of an origin's records stands.
_EVIDENCE = ["kind", "kernel", "origin", "noisy", "created_at", "median_ms"]


def upgrade() -> None:
    """Add the columns, empty in what is there: an exchange fills them in."""
    text = sa.String().with_variant(sa.String(collation="C"), "postgresql")
    for table in ("records", "trials"):
        op.add_column(table, sa.Column("digest", text, nullable=False, server_default=""))
        op.create_index(f"ix_{table}_digest", table, ["digest"])
    op.drop_index("ix_records_key", "records")
    op.create_index("ix_records_key", "records", [*_KEY, *_EVIDENCE])


def downgrade() -> None:
    """Drop the columns."""
    op.drop_index("ix_records_key", "records")
    op.create_index("ix_records_key", "records", _KEY)
    for table in ("records", "trials"):
        op.drop_index(f"ix_{table}_digest", table)
        op.drop_column(table, "digest")
