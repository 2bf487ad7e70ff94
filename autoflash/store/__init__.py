"""The tuning store: records of what won, trials of what was tried, and how they travel.

Nothing is imported here, so that ``import autoflash`` stays light: SQLAlchemy is loaded by
``store.store``, Alembic only when a schema must be created or upgraded.
"""
