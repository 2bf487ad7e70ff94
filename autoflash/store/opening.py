"""Opening the store that is meant, be it a file or a server."""

import hashlib
import urllib.parse
from pathlib import Path

from autoflash.settings import DatabaseUrl, settings
from autoflash.store.base import AnyStore


def open_store(where: Path | str | DatabaseUrl, *, read_only: bool = False) -> AnyStore:
    """The store at ``where``: a path, or a URL as AUTOFLASH_DB takes it.

    What can't be written to a server later on waits in a file of this host, see SpooledStore.
    Raises StoreError, or InvalidInputError for a URL of something else.
    """
    if isinstance(where, str) and "://" in where:
        where = DatabaseUrl.parse(where)
    if not isinstance(where, DatabaseUrl):
        from autoflash.store.store import Store

        return Store(where, read_only=read_only)
    if read_only:
        from autoflash.store.postgres import PostgresStore

        return PostgresStore(where, read_only=True)
    from autoflash.store.spool import SpooledStore

    return SpooledStore(where, spool_path(where))


def spool_path(url: DatabaseUrl) -> Path:
    """Where what ``url`` could not take waits: a file for each database, whatever the password."""
    parts = urllib.parse.urlsplit(url.with_password)
    options = urllib.parse.parse_qsl(parts.query)
    where = [str(url), *sorted(f"{k}={v}" for k, v in options if "password" not in k)]
    digest = hashlib.sha256("\n".join(where).encode()).hexdigest()[:12]
    return settings().db_path.with_name(f"spool-{digest}.sqlite")
