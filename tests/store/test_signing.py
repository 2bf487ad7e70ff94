"""Signed exchange files: taken just as they were signed, by whom they should be, or not at all."""

import sys

import pytest

from autoflash.errors import StoreError
from autoflash.store import jsonl, signing
from tests.store.support import record_of

pytest.importorskip("cryptography")
GOOD = [record_of(), record_of(ms=2.0, day=2)]


@pytest.fixture
def key_file(tmp_path):
    signing.make_keys(tmp_path / "team key")
    return tmp_path / "team key"


@pytest.fixture
def private(key_file):
    return signing.load_private(key_file)


@pytest.fixture
def public(key_file):
    return signing.load_public(signing.public_path(key_file))


def parse(text, key):
    return jsonl.parse(text.encode(), key)


def test_keys_are_made_with_safe_modes_and_never_overwritten(key_file):
    pub = signing.public_path(key_file)
    assert key_file.stat().st_mode & 0o777 == 0o600
    assert pub.stat().st_mode & 0o777 == 0o644
    before = key_file.read_bytes(), pub.read_bytes()
    with pytest.raises(StoreError, match="never overwritten"):
        signing.make_keys(key_file)
    key_file.unlink()
    with pytest.raises(StoreError, match="never overwritten"):
        signing.make_keys(key_file)
    assert (pub.read_bytes(), key_file.exists()) == (before[1], False)
    with pytest.raises(StoreError, match="can't be written"):
        signing.make_keys(key_file.parent / "none" / "key")


def test_a_signed_file_is_taken(private, public):
    text = jsonl.dump(GOOD, private)
    contents = parse(text, public)
    assert (contents.records, contents.clean, contents.verified) == (GOOD, True, True)
    assert contents.signed_by == signing.fingerprint(public)
    # Ed25519 takes no chances: the same file has the same signature.
    assert jsonl.dump(GOOD[::-1], private) == text


def test_without_a_key_to_go_by_a_signature_is_only_a_claim(private):
    contents = parse(jsonl.dump(GOOD, private), None)
    assert contents.clean
    assert (contents.verified, len(contents.signed_by)) == (False, 32)


def test_an_unsigned_file_is_refused(public):
    with pytest.raises(StoreError, match="refused: not signed"):
        parse(jsonl.dump(GOOD), public)


def test_a_file_signed_by_another_is_refused(tmp_path, public):
    signing.make_keys(tmp_path / "other")
    text = jsonl.dump(GOOD, signing.load_private(tmp_path / "other"))
    with pytest.raises(StoreError, match="isn't one by"):
        parse(text, public)


def test_a_tampered_file_is_refused(private, public):
    text = jsonl.dump(GOOD, private)
    lines = text.splitlines(keepends=True)
    header, unsigned = lines[0], jsonl.dump(GOOD[:1]).splitlines(keepends=True)
    digest = parse(text, None).digest
    other = parse("".join(unsigned), None).digest
    tampered = {
        "a line less": "".join(lines[:2]),
        "a line twice": "".join([*lines, lines[1]]),
        "lines in another order": "".join([lines[0], *lines[:0:-1]]),
        "a faster time": text.replace('"median_ms":1.25', '"median_ms":0.25'),
        "a resealed body": header.replace(digest, other).replace('"count":2', '"count":1')
        + unsigned[1],
        "another count": text.replace('"count":2', '"count":3'),
        "another algorithm": text.replace('"ed25519"', '"none"'),
        "no hexadecimal": text.replace('"value":"', '"value":"zz'),
        "an empty value": text.partition('"value":"')[0] + '"value":""},"version":1}\n' + lines[1],
        "spaces": text.replace('"kernel":', '"kernel": '),
    }
    for name, changed in tampered.items():
        assert changed != text, name
        with pytest.raises(StoreError, match="refused: "):
            parse(changed, public)


def test_a_key_that_others_may_read_is_not_used(key_file):
    key_file.chmod(0o640)
    with pytest.raises(StoreError, match="chmod 600"):
        signing.load_private(key_file)


def test_what_is_no_key_is_refused(tmp_path, key_file):
    odd = tmp_path / "odd"
    odd.touch(mode=0o600)
    for text in (
        b"",
        b"\0" * 100,
        b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n",
    ):
        odd.write_bytes(text)
        with pytest.raises(StoreError, match="not an unencrypted private key"):
            signing.load_private(odd)
        with pytest.raises(StoreError, match="not a public key"):
            signing.load_public(odd)
    with pytest.raises(StoreError, match="not a public key"):
        signing.load_public(key_file)
    with pytest.raises(StoreError, match="can't be read"):
        signing.load_public(tmp_path / "none")


def test_a_key_of_another_kind_is_refused(tmp_path):
    from cryptography.hazmat.primitives import serialization as s
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key, path = X25519PrivateKey.generate(), tmp_path / "x"
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
    with pytest.raises(StoreError, match="not an Ed25519 private key"):
        signing.load_private(path)
    public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
    path.write_bytes(public)
    with pytest.raises(StoreError, match="not an Ed25519 public key"):
        signing.load_public(path)


def test_without_the_library_the_error_says_what_to_install(key_file, monkeypatch):
    for name in [n for n in sys.modules if n.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(StoreError, match=r"pip install 'autoflash\[signing\]'"):
        signing.load_private(key_file)
    # Files that nobody must have signed need no library.
    assert parse(jsonl.dump(GOOD), None).records == GOOD
