"""Lock files: the same text for the same entries; a stranger's is good as a whole or not at all."""

import dataclasses
import json
import os
import random

import pytest

from autoflash.errors import InvalidInputError, LockError
from autoflash.kernels import KERNELS
from autoflash.kernels.access import ACCESSES, access_name
from autoflash.kernels.kernel import ALIGNED, Access
from autoflash.store import lock
from autoflash.store.digest import canonical, sha256
from autoflash.store.plain import lock_entry_to_plain
from autoflash.store.record import LockEntry
from autoflash.store.untrusted import write_text
from autoflash.target import named_target
from tests.store import hostile
from tests.store.support import H200, PROBLEM, config_of, problem_of

VERSIONS = {"autoflash": "0.1.0", "triton": "3.6.0", "torch": "2.10.0", "cuda": "", "driver": "580"}


def entry_of(*access, problem=PROBLEM, target=H200, kernel="flash_fwd", **changes):
    fields = {
        "config": config_of(LOAD="pointer"), "how": "tuned", "source_hash": "0123456789abcdef",
    }  # fmt: skip
    return LockEntry(
        problem=problem, target=target, kernel=kernel, access=access or ("aligned", "any"),
        **{**fields, **changes},
    )  # fmt: skip


BACKWARD = KERNELS["flash_bwd"]
GOOD = [
    entry_of(target=named_target("h100"), how="default"),
    entry_of(),
    entry_of("tma", config=config_of(LOAD="tma"), how="neighbour"),
    entry_of(
        *sorted(ACCESSES["bwd"]),
        problem=problem_of(op="bwd"),
        kernel="flash_bwd",
        config=BACKWARD.adapt(BACKWARD.default(problem_of(op="bwd"), H200), ACCESSES["bwd"]["any"]),
    ),
]
TEXT = lock.dump(GOOD, VERSIONS)
LINES = TEXT.splitlines()[1:]


def sealed(lines, **header):
    return hostile.sealed(lines, **{"format": "autoflash-lock", "versions": VERSIONS, **header})


def same(found, expected=GOOD):
    return sorted(map(repr, found)) == sorted(map(repr, expected))


def test_round_trip_in_any_order():
    found = lock.parse(TEXT.encode())
    assert same(found.entries)
    assert found.versions == VERSIONS
    assert found.digest == sha256("".join(line + "\n" for line in LINES))
    assert sealed(LINES) == TEXT.encode()
    shuffled = GOOD.copy()
    random.Random(3).shuffle(shuffled)
    assert lock.dump(shuffled, VERSIONS) == TEXT
    assert lock.parse(lock.dump([], VERSIONS).encode()).entries == ()


def test_the_text_is_what_it_is():
    """The format is a promise: what a deployment has in git must be read by the next release."""
    header, line = lock.dump([entry_of()], VERSIONS).splitlines()
    config = json.dumps(dict(entry_of().config), separators=(",", ":"), sort_keys=True)
    assert line == (
        f'{{"access":["aligned","any"],"config":{config},"how":"tuned","kernel":"flash_fwd",'
        '"problem":{"batch":2,"causal":true,"dtype":"bfloat16","head_dim":128,"head_dim_v":64,'
        '"heads":16,"kv_heads":4,"op":"fwd","seqlen_k":4096,"seqlen_q":2000},'
        '"source_hash":"0123456789abcdef","target":{"arch":"sm_90","memory_gib":140,'
        '"name":"NVIDIA H200","sm_count":132,"vendor":"nvidia"}}'
    )
    assert header == (
        f'{{"count":1,"digest":"{sha256(line + chr(10))}","format":"autoflash-lock","version":1,'
        '"versions":{"autoflash":"0.1.0","cuda":"","driver":"580","torch":"2.10.0",'
        '"triton":"3.6.0"}}'
    )


def test_an_entry_is_found_by_bucket_target_and_what_the_tensors_are_like():
    found = lock.parse(TEXT.encode())
    unaligned, expanded = Access(aligned=False, tma=False), Access(aligned=True, tma=False)
    assert found.find(PROBLEM, H200, unaligned) == found.find(PROBLEM, H200, expanded) == GOOD[1]
    assert found.find(PROBLEM, H200, ALIGNED) == GOOD[2]
    assert found.find(problem_of(batch=1, heads=32, kv_heads=8), H200, ALIGNED) == GOOD[2]
    assert found.find(problem_of(seqlen_k=4097), H200, ALIGNED) is None
    assert found.find(PROBLEM, named_target("h100"), ALIGNED) is None
    repeatable = dataclasses.replace(ALIGNED, repeatable=True)
    assert found.find(problem_of(op="bwd"), H200, repeatable) == GOOD[3]
    fewer = dataclasses.replace(H200, sm_count=66)
    assert found.find(PROBLEM, fewer, ALIGNED) is None
    # What isn't the identity may differ on the live GPU.
    assert found.find(PROBLEM, dataclasses.replace(H200, shared_memory=1), ALIGNED) == GOOD[2]


def test_each_access_has_one_name():
    places = [(True, True), (True, False), (False, False)]
    assert [access_name(a, "fwd") for a in ACCESSES["fwd"].values()] == ["tma", "aligned", "any"]
    every = {
        access_name(Access(aligned=a, tma=t, whole=w, repeatable=r), "bwd")
        for a, t in places for w in (False, True) for r in (False, True)
    }  # fmt: skip
    assert every == set(ACCESSES["bwd"])
    assert len(every) == 12
    # A forward has no parts, and repeats always.
    assert access_name(Access(aligned=True, tma=True, whole=False, repeatable=True), "fwd") == "tma"
    with pytest.raises(ValueError, match="no tensors are like"):
        access_name(Access(aligned=False, tma=True), "fwd")


def test_a_change_of_one_config_is_one_line_of_a_diff():
    other = dataclasses.replace(GOOD[1], config=config_of(LOAD="pointer", num_stages=3))
    before, after = TEXT.splitlines(), lock.dump([*GOOD[:1], other, *GOOD[2:]], VERSIONS)
    changed = [a for a, b in zip(before, after.splitlines(), strict=True) if a != b]
    assert changed == [before[0], canonical(lock_entry_to_plain(GOOD[1]))]


def test_two_answers_to_one_call_are_refused():
    twice = [entry_of("any"), entry_of("any", problem=problem_of(seqlen_q=1900), how="default")]
    with pytest.raises(InvalidInputError, match="two entries for any tensors of fwd bfloat16 bh32"):
        lock.dump(twice, VERSIONS)
    lines = [canonical(lock_entry_to_plain(entry)) for entry in twice]
    for double in (lines, lines[:1] * 2):
        with pytest.raises(LockError, match="two entries for any tensors"):
            lock.parse(sealed(double))


def test_entries_that_differ_in_access_alone_are_one():
    parts = [entry_of("any"), entry_of("tma", how="default"), entry_of("aligned")]
    assert lock.merged(parts) == [entry_of("aligned", "any"), entry_of("tma", how="default")]


# --- what a stranger may send

PLAIN = lock_entry_to_plain(GOOD[1])
PLACE = LINES.index(canonical(PLAIN))
WHOLE = dict([
    *hostile.truncations(TEXT.encode()), *hostile.flips(TEXT.encode()),
    *hostile.noise(TEXT.encode()),
])  # fmt: skip
BAD = {name: canonical(bad) for name, bad in hostile.bad_fields(PLAIN)}
BAD |= {name: line for name, line in hostile.bad_lines(LINES[PLACE]) if line != LINES[PLACE]}
BAD |= {
    name: canonical(hostile.changed(PLAIN, outer, None, value))
    for name, outer, value in (
        ("no access", "access", []),
        ("an access twice", "access", ["any", "any"]),
        ("access not sorted", "access", ["any", "aligned"]),
        ("an unknown access", "access", ["../any"]),
        ("an access of another op", "access", ["any repeatable"]),
        ("an access that is a number", "access", [1]),
        ("ten thousand", "access", ["any"] * 10_000),
        ("a kernel of another op", "kernel", "flash_bwd"),
        ("a kernel of another config", "kernel", "flash_fwd_ws"),
        ("a path", "kernel", "../flash_fwd"),
        ("a hash that is short", "source_hash", "0123"),
        ("a hash of capitals", "source_hash", "0123456789ABCDEF"),
        ("a hash with a line end", "source_hash", "0123456789abcde\n"),
        ("locked", "how", "locked"),
    )
}
BAD["a config for tensors that it can't read"] = canonical(
    lock_entry_to_plain(GOOD[2]) | {"access": ["any"]}
)


def test_a_whole_file_is_as_it_was_or_refused():
    reasons = []
    for name, data in WHOLE.items():
        try:
            found = lock.parse(data)
        except LockError as error:
            reasons.append(str(error))
            continue
        # A bit of the versions was flipped.
        assert same(found.entries), name
        assert data.partition(b"\n")[2] == TEXT.encode().partition(b"\n")[2], name
    assert len(reasons) > len(WHOLE) - 20 > 120
    assert all(0 < len(reason) < 500 for reason in reasons)


@pytest.mark.parametrize("name", BAD)
def test_one_bad_line_is_named_and_nothing_is_locked(name):
    with pytest.raises(LockError) as caught:
        lock.parse(sealed([*LINES[:PLACE], BAD[name], *LINES[PLACE + 1 :]]))
    assert str(caught.value).startswith(f"line {PLACE + 2}: ")
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "header",
    [
        {"version": 2}, {"version": "1"}, {"version": True}, {"count": 3}, {"count": -1},
        {"count": "4"}, {"digest": "0" * 64}, {"digest": None}, {"format": "autoflash-exchange"},
        {"path": "/etc/passwd"}, {"signature": {}},
        *({"versions": odd} for odd in (None, [], {}, "3.6.0", VERSIONS | {"numpy": "2"})),
        *({"versions": VERSIONS | {"triton": odd}} for odd in (None, 3.6, "\x1b[0m", "3" * 201)),
    ],
    ids=str,
)  # fmt: skip
def test_bad_headers(header):
    with pytest.raises(LockError):
        lock.parse(sealed(LINES, **header))


def test_a_newer_version_says_so():
    with pytest.raises(LockError, match="autoflash-lock version 2: this autoflash reads version 1"):
        lock.parse(sealed(LINES, version=2))


def test_each_change_of_a_byte_below_the_header_shows():
    data = TEXT.encode()
    for place in range(data.index(b"\n") + 1, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        with pytest.raises(LockError):
            lock.parse(bytes(changed))


# --- where it lies


def test_load_names_the_file(tmp_path):
    path = tmp_path / "a.lock"
    with pytest.raises(LockError, match=r"a\.lock: can't be read: "):
        lock.load(path)
    write_text(path, TEXT)
    assert same(lock.load(path).entries)
    path.write_text(TEXT.replace('"how":"tuned"', '"how":"default"'))
    with pytest.raises(LockError, match=r"a\.lock: it was cut or changed since it was written"):
        lock.load(path)
    (tmp_path / "out").mkdir()
    link = tmp_path / "out" / "b.lock"
    link.symlink_to(path)
    with pytest.raises(LockError, match="a link that leads out of its folder"):
        lock.load(link)
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", tmp_path):
        with pytest.raises(LockError, match=f"{odd.name}: "):
            lock.load(odd)


def test_a_file_over_the_limit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "MAX_BYTES", 100)
    write_text(tmp_path / "a.lock", TEXT)
    with pytest.raises(LockError, match="is larger than 100 bytes"):
        lock.load(tmp_path / "a.lock")
