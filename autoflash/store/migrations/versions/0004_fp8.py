"""Problems of fp8: the dtypes of k, v and out, the granularity of scales, the layout of v."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_CODE = ["op", "dtype", "head_dim", "head_dim_v", "causal"]
_TARGET = ["target_arch", "target_vendor", "target_name", "target_sm_count", "target_memory_gib"]
_SIZES = ["group_size", "batch_heads", "bucket_seqlen_q", "bucket_seqlen_k"]
_EVIDENCE = ["kind", "kernel", "origin", "noisy", "created_at", "median_ms"]
_OF_KEY = {"records": _EVIDENCE, "trials": []}
# What rows hold that are there: nothing of them is fp8. Their digests stay what they are, since a
# noun's text leaves out what is so.
_ADDED = {"kv_dtype": "", "out_dtype": "", "scales": "", "v_layout": "rows"}


def upgrade() -> None:
    """Add the columns, to the keys too."""
    text = sa.String().with_variant(sa.String(collation="C"), "postgresql")
    for table, more in _OF_KEY.items():
        for name, held in _ADDED.items():
            op.add_column(table, sa.Column(name, text, nullable=False, server_default=held))
        op.drop_index(f"ix_{table}_key", table)
        key = [*_CODE, "kv_dtype", "v_layout", *_TARGET, "out_dtype", "scales", *_SIZES]
        op.create_index(f"ix_{table}_key", table, [*key, *more])


def downgrade() -> None:
    """Drop the columns; rows of fp8, which an older version can't tell from others, first."""
    for table, more in _OF_KEY.items():
        op.execute(f"DELETE FROM {table} WHERE scales <> ''")
        op.drop_index(f"ix_{table}_key", table)
        op.create_index(f"ix_{table}_key", table, [*_CODE, *_TARGET, *_SIZES, *more])
        for name in _ADDED:
            op.drop_column(table, name)
