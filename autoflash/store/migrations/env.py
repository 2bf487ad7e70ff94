"""Alembic's entry: the connection is handed in by ``autoflash.store.upgrade``."""

from alembic import context

from autoflash.store.models import Base
from autoflash.store.schema import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    # SQLite can only add columns; batches rebuild a table for anything else.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
