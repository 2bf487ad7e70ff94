"""Opening the store that is meant, be it a file or a server."""

import hashlib
import urllib.parse
from pathlib import Path

from autoflash.settings import DatabaseUrl, Place, place_of, settings
from autoflash.store.base import AnyStore


def open_store(where: Place | str, *, read_only: bool = False, spooled: bool = True) -> AnyStore:
    """The store at ``where``: a path, or a URL as AUTOFLASH_DB takes it.

    What can't be written to a server later on waits in a file of this host, see SpooledStore;
    unless it is ``spooled``, that raises. Raises StoreError, or InvalidInputError for a URL of
    something else.
    """
    if isinstance(where, str):
        where = place_of(where)
    if not isinstance(where, DatabaseUrl):
        from autoflash.store.store import Store

        return Store(where, read_only=read_only)
    if read_only or not spooled:
        from autoflash.store.postgres import PostgresStore

        return PostgresStore(where, read_only=read_only)
    from autoflash.store.spool import SpooledStore

    return SpooledStore(where, spool_path(where))


def spool_path(url: DatabaseUrl) -> Path:
    """Where what ``url`` could not take waits."""
    return beside(url, "spool.sqlite")


def beside(where: Place, what: str) -> Path:
    """A file of this host beside the store: one of its own for each database of a server, whatever
    the password."""
    if not isinstance(where, DatabaseUrl):
        return where.with_name(f"{where.name}.{what}")
    parts = urllib.parse.urlsplit(where.with_password)
    options = urllib.parse.parse_qsl(parts.query)
    named = [str(where), *sorted(f"{k}={v}" for k, v in options if "password" not in k)]
    digest = hashlib.sha256("\n".join(named).encode()).hexdigest()[:12]
    name = Path(what)
    return settings().db_path.with_name(f"{name.stem}-{digest}{name.suffix}")
