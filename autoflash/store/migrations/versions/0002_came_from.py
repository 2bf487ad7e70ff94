"""Trials say where their config came from."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; it is empty in what is there."""
    text = sa.String().with_variant(sa.String(collation="C"), "postgresql")
    op.add_column("trials", sa.Column("came_from", text, nullable=False, server_default=""))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("trials", "came_from")
