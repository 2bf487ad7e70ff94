"""Records as text: the same for the same records; of a stranger's, the bad ones are refused."""

import copy
import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoflash.errors import StoreError
from autoflash.store.exchange import dump_records, load_records
from autoflash.target import named_target


@pytest.fixture
def records(make):
    return [
        make.record(target=named_target("h100"), ms=0.1 + 0.2),
        make.record(problem=make.problem(head_dim=64), kind="predicted"),
        make.record(),
        make.record(noisy=True, day=2, BLOCK_M=64, num_warps=4),
    ]


def test_round_trip(records):
    text = dump_records(records)
    assert load_records(text) == (records, [])
    assert load_records(dump_records([])) == ([], [])
    shuffled = records * 1
    random.Random(3).shuffle(shuffled)
    assert dump_records(shuffled) == text


def test_the_text_reads_well(make):
    record = make.record()
    config = json.dumps(dict(record.config), sort_keys=True)
    expected = f"""\
{{
 "format": "autoflash-records",
 "records": [
  {{
   "config": {config},
   "kernel": "flash_fwd",
   "kind": "measured",
   "measurement": {{"median_ms": 1.25, "method": "cuda_graph", "noisy": false, "p20_ms": 1.125, \
"p80_ms": 1.375, "repeats": 40, "sm_clock_mhz": 1755, "throttle": ""}},
   "problem": {{"batch": 2, "causal": true, "dtype": "bfloat16", "head_dim": 128, \
"head_dim_v": 64, "heads": 16, "kv_heads": 4, "op": "fwd", "seqlen_k": 4096, "seqlen_q": 2000}},
   "provenance": {{"autoflash": "0.1.0", "created_at": "2025-03-01T12:30:00+00:00", \
"cuda": "13.0", "driver": "580.65", "origin": "host-a", "source_hash": "deadbeef", \
"torch": "2.10.0", "triton": "3.6.0"}},
   "target": {{"arch": "sm_90", "memory_gib": 140, "name": "NVIDIA H200", "sm_count": 132, \
"vendor": "nvidia"}}
  }}
 ],
 "version": 1
}}
"""
    assert dump_records([record]) == expected


def test_a_new_record_is_a_diff_of_its_own_lines(records):
    before = dump_records(records[:-1]).splitlines()
    after = dump_records(records).splitlines()
    added = [line for line in after if line not in before]
    assert [line for line in before if line not in after] == []
    assert len(added) == 3  # config, measurement and provenance of the re-tune


def test_whole_milliseconds_are_written_as_any_other(make):
    assert '"median_ms": 2.0' in dump_records([make.record(ms=2)])


REFUSED = {
    "record: must be an object, not list": ("", [1, 2]),
    "problem: field 'batch' is missing": ("problem.batch", ...),
    "problem: field 'window' is unknown": ("problem.window", 1),
    "batch: must be int, not str": ("problem.batch", "2"),
    "batch: must be int, not bool": ("problem.batch", True),
    "seqlen_q: must be int, not float": ("problem.seqlen_q", 4096.0),
    "seqlen_k=-1": ("problem.seqlen_k", -1),
    "head_dim=512": ("problem.head_dim", 512),
    "heads=15 is not a multiple": ("problem.heads", 15),
    "dtype='bf16'": ("problem.dtype", "bf16"),
    "causal: must be bool, not int": ("problem.causal", 1),
    "op='steal'": ("problem.op", "steal"),
    "target: must be an object, not str": ("target", "h200"),
    "target: field 'tflops' is unknown": ("target.tflops", 1e9),
    "arch='../../sm_90'": ("target.arch", "../../sm_90"),
    "vendor='me'": ("target.vendor", "me"),
    "sm_count=0": ("target.sm_count", 0),
    "name='xxx": ("target.name", "x" * 201),
    "unknown kernel 'os.system'": ("kernel", "os.system"),
    "kernel: must be str, not NoneType": ("kernel", None),
    "BLOCK_M='129'": ("config.BLOCK_M", 129),
    "BLOCK_M='128.0'": ("config.BLOCK_M", 128.0),
    "DIAGONAL_FIRST='0'": ("config.DIAGONAL_FIRST", 0),
    "LOAD=": ("config.LOAD", "__import__('os')"),
    "off: ['EXTRA']": ("config.EXTRA", 1),
    "off: ['maxnreg']": ("config.maxnreg", ...),
    "median_ms=0": ("measurement.median_ms", 0),
    "p20_ms=-1.0": ("measurement.p20_ms", -1.0),
    "p80_ms=nan": ("measurement.p80_ms", float("nan")),
    "p80_ms=inf": ("measurement.p80_ms", float("inf")),
    "median_ms: must be float, not str": ("measurement.median_ms", "1"),
    "median_ms=1000": ("measurement.median_ms", 10**400),
    "repeats=0": ("measurement.repeats", 0),
    "method='guess'": ("measurement.method", "guess"),
    "noisy: must be bool, not NoneType": ("measurement.noisy", None),
    "sm_clock_mhz: must be int or NoneType": ("measurement.sm_clock_mhz", "1755"),
    "throttle='ttt": ("measurement.throttle", "t" * 201),
    "measurement: must be an object, not NoneType": ("measurement", None),
    "created_at='today'": ("provenance.created_at", "today"),
    "torch=": ("provenance.torch", "2" * 10_000_000),
    "origin='\\ud800'": ("provenance.origin", "\ud800"),
    "origin='\\x1b": ("provenance.origin", "\x1b]0;owned\x07"),
    "provenance: field 'path' is unknown": ("provenance.path", "/etc/passwd"),
    "kind='predicted' with method='cuda_graph'": ("kind", "predicted"),
    "kind: must be str, not list": ("kind", ["measured"]),
    "record: field 'yyy": ("y" * 1000, 1),
    "record: field 'config' is missing": ("config", ...),
}


def mutated(document, place, value):
    document = copy.deepcopy(document)
    record = document["records"][2]
    *above, last = place.split(".")
    if not place:
        document["records"][2] = value
        return document
    for name in above:
        record = record[name]
    if value is ...:
        del record[last]
    else:
        record[last] = value
    return document


@pytest.mark.parametrize("reason", REFUSED)
def test_a_bad_record_is_refused_alone(records, reason):
    document = mutated(json.loads(dump_records(records)), *REFUSED[reason])
    found, refusals = load_records(json.dumps(document))
    assert found == [*records[:2], records[3]]
    assert len(refusals) == 1
    assert refusals[0].startswith("record 2: ")
    assert reason in refusals[0]
    assert len(refusals[0]) < 350


@pytest.mark.parametrize(
    "text",
    [
        "",
        "records",
        "[]",
        "null",
        "{}",
        '{"format": "autoflash-records"}',
        '{"format": "autoflash-records", "version": 1}',
        '{"format": "autoflash-records", "version": 1, "records": {}}',
        '{"format": "autoflash-records", "version": 1, "records": [], "more": 1}',
        '{"format": "autoflash-records", "version": 2, "records": []}',
        '{"format": "autoflash-records", "version": true, "records": []}',
        '{"format": "other", "version": 1, "records": []}',
        "[" * 100_000,
        '{"format": "autoflash-records", "version": 1' + "0" * 5000 + "}",
        '{"format": "autoflash-records", "version": 1, "records": [',
    ],
)
def test_what_is_no_document_is_a_store_error(text):
    with pytest.raises(StoreError, match="autoflash-records"):
        load_records(text)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), junk=JUNK)
def test_junk_anywhere_is_refused_or_says_nothing_new(records, data, junk):
    document = json.loads(dump_records(records))
    record = document["records"][2]
    part = data.draw(st.sampled_from(sorted(record)))
    inside = isinstance(record[part], dict) and data.draw(st.booleans())
    place = f"{part}.{data.draw(st.sampled_from(sorted(record[part])))}" if inside else part
    found, refusals = load_records(json.dumps(mutated(document, place, junk)))
    assert len(found) + len(refusals) == len(records)
    assert load_records(dump_records(found))[1] == []
