"""Ed25519 signatures of exchange files, by the library `cryptography` (the extra ``signing``)."""

import hashlib
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoflash.errors import StoreError
from autoflash.store.untrusted import read_bytes, write_new

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

ALGORITHM = "ed25519"
_MAX_KEY = 16 << 10
# Signed along, so that no signature for another purpose is taken for one of ours.
_PURPOSE = b"autoflash exchange file, version 1\n"


def make_keys(path: Path) -> str:
    """Write a new private key to ``path``, for its owner alone, and the public one to ``.pub``.

    Returns the fingerprint. Raises StoreError, also where one of the files is there already.
    """
    serialization, ed25519, _ = _library()
    private = ed25519.Ed25519PrivateKey.generate()
    secret = private.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    beside = public_path(path)
    try:
        if beside.exists():
            raise FileExistsError(f"{beside} is there already")
        write_new(path, secret.decode("ascii"), mode=0o600)
        write_new(beside, public.decode("ascii"), mode=0o644)
    except FileExistsError as error:
        raise StoreError(f"{path}: a key is never overwritten: {error}") from error
    except (OSError, ValueError) as error:
        raise StoreError(f"{path}: can't be written: {error}") from error
    return fingerprint(private.public_key())


def public_path(path: Path) -> Path:
    """Where the public half of the key in ``path`` is written."""
    return path.with_name(path.name + ".pub")


def load_private(path: Path) -> "Ed25519PrivateKey":
    """The key in ``path``. Raises StoreError, also for a file that others may read."""
    serialization, ed25519, unsupported = _library()
    data = read_bytes(path, limit=_MAX_KEY)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise StoreError(f"{path}: others may read or change this key: chmod 600 it")
    try:
        key: object = serialization.load_pem_private_key(data, password=None)
    # An encrypted key is a TypeError.
    except (ValueError, TypeError, unsupported) as error:
        raise StoreError(f"{path}: not an unencrypted private key: {error}") from error
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise StoreError(f"{path}: not an Ed25519 private key: `autoflash db keygen` makes one")
    found: Ed25519PrivateKey = key
    return found


def load_public(path: Path) -> "Ed25519PublicKey":
    """The key in ``path``. Raises StoreError."""
    serialization, ed25519, unsupported = _library()
    data = read_bytes(path, limit=_MAX_KEY)
    try:
        key: object = serialization.load_pem_public_key(data)
    except (ValueError, TypeError, unsupported) as error:
        raise StoreError(f"{path}: not a public key: {error}") from error
    if not isinstance(key, ed25519.Ed25519PublicKey):
        raise StoreError(f"{path}: not an Ed25519 public key: `autoflash db keygen` makes one")
    found: Ed25519PublicKey = key
    return found


def sign(text: str, key: "Ed25519PrivateKey") -> str:
    """The signature of ``text``, in hexadecimal digits."""
    return key.sign(_PURPOSE + text.encode("ascii")).hex()


def is_signed(text: str, signature: str, key: "Ed25519PublicKey") -> bool:
    """Whether ``signature`` is one of ``text`` by ``key``."""
    from cryptography.exceptions import InvalidSignature

    try:
        key.verify(bytes.fromhex(signature), _PURPOSE + text.encode("ascii"))
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(key: "Ed25519PublicKey") -> str:
    """A short name for people: the first half of the key's SHA-256."""
    serialization, _, _ = _library()
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return hashlib.sha256(raw).hexdigest()[:32]


def _library() -> tuple[Any, Any, type[Exception]]:
    """Its modules, and what it raises for a key of another kind."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise StoreError(
            "signatures need the library cryptography: pip install 'autoflash[signing]'"
        ) from error
    return serialization, ed25519, UnsupportedAlgorithm
