"""Exchange files: the same text for the same records; a stranger's are read line by line."""

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from autoflash.errors import InvalidInputError, StoreError
from autoflash.space import Param
from autoflash.store import jsonl, untrusted
from autoflash.store.digest import record_digest, sha256
from autoflash.store.plain import record_to_plain
from autoflash.target import named_target
from tests.store import hostile
from tests.store.support import KERNEL, problem_of, record_of

GOOD = [
    record_of(target=named_target("h100"), ms=0.1 + 0.2),
    record_of(problem=problem_of(head_dim=64), kind="predicted"),
    record_of(),
    record_of(noisy=True, day=2, BLOCK_M=64, num_warps=4),
]
TEXT = jsonl.dump(GOOD)
LINES = TEXT.splitlines()[1:]


def read(text):
    return jsonl.parse(text if isinstance(text, bytes) else text.encode())


def test_round_trip_in_any_order():
    contents = read(TEXT)
    assert (contents.records, contents.clean, contents.warnings) == (GOOD, True, [])
    assert contents.digest == sha256("".join(line + "\n" for line in LINES))
    shuffled = GOOD * 2
    random.Random(3).shuffle(shuffled)
    assert jsonl.dump(shuffled) == TEXT
    assert read(jsonl.dump([])).records == []


def test_a_param_that_came_later_changes_no_digest(monkeypatch):
    space = KERNEL.space
    later = Param(name="NEW", choices=("as ever", "new"), doc="", before="as ever")
    known = replace(space, params=(*space.params, later), constraints=())
    monkeypatch.setattr(KERNEL, "space", known)
    # What an earlier release wrote, and what this one writes of the same choices.
    contents = read(TEXT)
    assert contents.clean
    assert [record.config["NEW"] for record in contents.records] == ["as ever"] * 4
    assert jsonl.dump(contents.records) == TEXT
    other = replace(GOOD[2], config=known.parse({**GOOD[2].config, "NEW": "new"}))
    again = read(jsonl.dump([other]))
    assert again.records == [other]
    assert '"NEW":"new"' in jsonl.dump([other])
    assert record_digest(other) != record_digest(GOOD[2])


def test_the_text_is_what_it_is():
    """The format is a promise: files of an earlier release must keep their digests."""
    header, line = jsonl.dump([record_of(BLOCK_M=64)]).splitlines()
    config = json.dumps(dict(record_of(BLOCK_M=64).config), separators=(",", ":"), sort_keys=True)
    body = (
        f'"config":{config},"kernel":"flash_fwd","kind":"measured","measurement":{{"median_ms":1.25'
        ',"method":"cuda_graph","noisy":false,"p20_ms":1.125,"p80_ms":1.375,"repeats":40,'
        '"sm_clock_mhz":1755,"throttle":""},"problem":{"batch":2,"causal":true,"dtype":"bfloat16",'
        '"head_dim":128,"head_dim_v":64,"heads":16,"kv_heads":4,"op":"fwd","seqlen_k":4096,'
        '"seqlen_q":2000},"provenance":{"autoflash":"0.1.0",'
        '"created_at":"2025-03-01T12:30:00+00:00","cuda":"13.0","driver":"580.65",'
        '"origin":"host-a","source_hash":"deadbeef","torch":"2.10.0","triton":"3.6.0"},'
        '"target":{"arch":"sm_90","memory_gib":140,"name":"NVIDIA H200","sm_count":132,'
        '"vendor":"nvidia"}}'
    )
    digest = sha256("{" + body)
    assert line == f'{{"digest":"{digest}",{body}'
    whole = sha256(line + "\n")
    assert header == f'{{"count":1,"digest":"{whole}","format":"autoflash-exchange","version":1}}'
    assert record_digest(record_of(BLOCK_M=64)) == digest


def test_a_new_record_is_one_line_of_a_diff():
    before, after = jsonl.dump(GOOD[:-1]).splitlines(), TEXT.splitlines()
    assert [line for line in before[1:] if line not in after] == []
    (added,) = [line for line in after[1:] if line not in before]
    # A re-tune stands just below what it replaces.
    assert after.index(added) == after.index(LINES[2]) + 1


def test_the_longest_record_that_can_be_stored_can_be_read():
    wide = "\U0001f600" * 200
    base = record_of()
    texts = ("autoflash", "triton", "torch", "cuda", "driver", "source_hash", "origin")
    record = replace(
        base,
        provenance=replace(base.provenance, **dict.fromkeys(texts, wide)),
        measurement=replace(base.measurement, throttle=wide),
    )
    assert read(jsonl.dump([record])).records == [record]


def test_joined_files_keep_every_record_and_say_that_they_were_joined():
    other = jsonl.dump([record_of(), record_of(ms=7.0)]).splitlines(keepends=True)[1:]
    contents = read(TEXT + "".join(other))
    assert contents.records == [*GOOD, record_of(ms=7.0)]
    assert not contents.refused
    assert len(contents.faults) == 2


def test_a_date_ahead_of_the_clock_is_refused():
    record = record_of()
    future = replace(
        record, provenance=replace(record.provenance, created_at="9999-01-01T00:00:00+00:00")
    )
    contents = read(jsonl.dump([*GOOD, future]))
    assert contents.records == GOOD
    assert "more than a day ahead" in contents.refusals[0].reason


# --- the corpus

WHOLE = dict([
    *hostile.truncations(TEXT.encode()), *hostile.flips(TEXT.encode()),
    *hostile.noise(TEXT.encode()), *hostile.headers(LINES),
])  # fmt: skip
PLAIN = record_to_plain(GOOD[2])
BAD = dict([*hostile.bad_values(PLAIN), *hostile.bad_lines(LINES[2])])


def test_the_corpus_is_large():
    assert len(WHOLE) >= 200
    assert len(BAD) >= 150


def test_no_whole_file_does_more_than_be_refused():
    """A good record is kept whatever happened to the others; no other record appears."""
    reasons = {}
    for name, data in WHOLE.items():
        try:
            contents = jsonl.parse(data)
        except (StoreError, InvalidInputError) as error:
            reasons[name] = str(error)
            continue
        whole_lines = set(data.decode("utf-8", "replace").splitlines())
        kept = [GOOD[i] for i, line in enumerate(LINES) if line in whole_lines]
        assert contents.records == kept, name
        if data[data.find(b"\n") :] != TEXT.encode()[TEXT.find("\n") :]:
            assert not contents.clean, name
    assert 60 < len(reasons) < len(WHOLE) - 60
    assert all(0 < len(reason) < 500 for reason in reasons.values())


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_refused_alone_and_named(name):
    contents = read(hostile.sealed([LINES[0], BAD[name], *LINES[1:]]))
    assert contents.records == GOOD
    assert [refusal.line for refusal in contents.refusals] == [3]
    assert 0 < len(contents.refusals[0].reason) <= 300
    assert contents.refusals[0].reason.isprintable()
    assert contents.faults == []


@pytest.mark.parametrize("text", hostile.INERT)
def test_what_a_label_says_is_kept_as_text(text):
    lines = []
    for outer, inner in hostile.LABELS:
        lines.append(hostile.resealed(hostile.changed(PLAIN, outer, inner, text)))
    contents = read(hostile.sealed(lines))
    assert (len(contents.records), contents.refusals) == (len(lines), [])
    said = [record_to_plain(record) for record in contents.records]
    assert [p[o][i] for p, (o, i) in zip(said, hostile.LABELS, strict=True)] == [text] * len(lines)
    assert jsonl.parse(jsonl.dump(contents.records).encode()).clean


def test_each_change_of_a_byte_shows():
    """Tampering with any byte of the lines changes a digest or refuses the line."""
    data = TEXT.encode()
    start = data.index(b"\n") + 1
    for place in range(start, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= 1
        assert any("digest" in fault for fault in jsonl.parse(bytes(changed)).faults)


def test_a_changed_value_with_a_new_file_digest_is_still_seen():
    slower = LINES[2].replace('"median_ms":1.25', '"median_ms":0.25')
    contents = read(hostile.sealed([LINES[0], slower]))
    assert contents.records == GOOD[:1]
    assert contents.refusals[0].reason.startswith("its digest isn't that of the record")


def test_of_many_bad_lines_the_first_thousand_are_named():
    contents = read(hostile.sealed(["{}"] * 5000))
    assert (contents.refused, len(contents.refusals)) == (5000, jsonl.MAX_REFUSALS)


# --- where the file lies


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "records.jsonl"
    untrusted.write_text(path, TEXT)
    return path


def test_load(path):
    contents = jsonl.load(path)
    assert (contents.records, contents.warnings) == (GOOD, [])
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_over_the_limit_is_refused(path, monkeypatch):
    with pytest.raises(StoreError, match="is larger than 100 bytes"):
        untrusted.read_bytes(path, limit=100)
    sparse = path.with_name("sparse")
    with sparse.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(StoreError, match="sparse: is larger than"):
        jsonl.load(sparse)


def test_links(path, tmp_path):
    beside, elsewhere, nowhere = (tmp_path / name for name in ("latest", "elsewhere", "nowhere"))
    beside.symlink_to(path.name)
    assert jsonl.load(beside).records == GOOD
    elsewhere.symlink_to("/etc/passwd")
    with pytest.raises(StoreError, match="elsewhere: is a link that leads out of its folder"):
        jsonl.load(elsewhere)
    nowhere.symlink_to("gone")
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for broken in (nowhere, loop, tmp_path / "none", Path("a\0b")):
        with pytest.raises(StoreError, match="can't be read"):
            jsonl.load(broken)


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StoreError, match="pipe: is not a file"):
        jsonl.load(tmp_path / "pipe")
    with pytest.raises(StoreError, match="is not a file"):
        jsonl.load(tmp_path)
    with pytest.raises(StoreError, match="is not a file"):
        jsonl.load(Path("/dev/zero"))


def test_a_world_writable_place_is_told(path, tmp_path):
    path.chmod(0o666)
    (warning,) = jsonl.load(path).warnings
    assert "the file is world-writable" in warning
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    (warning,) = jsonl.load(path).warnings
    assert f"its folder {tmp_path} is world-writable" in warning
    tmp_path.chmod(0o1777)
    assert jsonl.load(path).warnings == []


def test_a_link_is_replaced_not_written_through(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    untrusted.write_text(link, "new")
    assert (path.read_text(), link.read_text(), link.is_symlink()) == (TEXT, "new", False)
    with pytest.raises(StoreError, match="can't be written"):
        untrusted.write_text(tmp_path / "none" / "file", "new")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "records.jsonl"]
