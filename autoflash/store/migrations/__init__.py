"""The schema's history, run by ``autoflash.store.upgrade`` (there is no alembic.ini).

A new revision is a file in ``versions``, written by hand, with ``down_revision`` set to the last
one; its name is appended to ``schema.SCHEMA_VERSIONS``. A test compares the result with the models.
"""
