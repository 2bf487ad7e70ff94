"""Problems of fp8 in databases, exchange files and locks; what is of no fp8 stays as it was."""

import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest
import sqlalchemy

from autoflash.dtypes import FP8
from autoflash.errors import InvalidInputError
from autoflash.kernels import KERNELS
from autoflash.problem import FP8_FIELDS, Bucket
from autoflash.settings import DatabaseUrl
from autoflash.store import exchange, jsonl, lock, plain
from autoflash.store.digest import record_digest, record_text
from autoflash.store.record import LockEntry, MissedCalls, TrialStatus
from tests.store.support import H200, PROBLEM, TO_THE_THIRD_SCHEMA, problem_of, record_of, trial_of

PROBLEMS = [
    problem_of(dtype=FP8, scales="head"),
    problem_of(dtype=FP8, scales="block", v_layout="columns"),
    problem_of(dtype=FP8, scales="head", out_dtype="float16"),
    problem_of(kv_dtype=FP8, scales="tensor", v_layout="permuted"),
]
KERNEL = KERNELS["flash_fwd_fp8"]
CONFIG = KERNEL.default(PROBLEMS[0], H200)


def fp8_record(problem, **config):
    own = {"kernel": KERNEL.name, "config": KERNEL.space.parse({**CONFIG, **config})}
    return replace(record_of(problem=problem), **own)


def fp8_trial(problem, **changes):
    return trial_of(problem=problem, kernel=KERNEL.name, **{"config": CONFIG, **changes})


RECORDS = [record_of(), *map(fp8_record, PROBLEMS)]


def undo_the_revision(where):
    if isinstance(where, DatabaseUrl):
        with sqlalchemy.create_engine(where.with_password).begin() as connection:
            for statement in TO_THE_THIRD_SCHEMA:
                connection.exec_driver_sql(statement)
        return
    with closing(sqlite3.connect(where)) as raw, raw:
        for statement in TO_THE_THIRD_SCHEMA:
            raw.execute(statement)


def test_records_and_trials_come_back(home):
    store = home.open()
    store.add_records(RECORDS)
    for problem in PROBLEMS:
        trial = fp8_trial(problem)
        store.add_trial(trial)
        assert store.trials(Bucket.of(problem), H200) == [trial]
        assert store.best(Bucket.of(problem), H200) == fp8_record(problem)
    assert {record_digest(r) for r in home.open(read_only=True).records()} == {
        record_digest(r) for r in RECORDS
    }


def test_neighbours_differ_in_scales_and_out_alone(home):
    store = home.open()
    store.add_records(RECORDS)
    others = [problem_of(dtype=FP8, scales="tensor"), problem_of(dtype=FP8, scales="block")]
    store.add_records([fp8_record(p) for p in others])
    own = Bucket.of(PROBLEMS[0])
    found = store.neighbours(own, H200)
    assert {record.problem for record in found} == {PROBLEMS[2], *others}
    assert store.neighbours(Bucket.of(PROBLEM), H200) == []
    assert store.neighbours(Bucket.of(PROBLEMS[3]), H200) == []


def test_losses_tell_granularities_apart(home, make):
    store = home.open()
    ok = TrialStatus.ok
    fast, slow = {"BLOCK_N": 64}, {"BLOCK_N": 128}

    def timed(problem, ms, config):
        record = fp8_record(problem, **config)
        measurement = record_of(ms=ms).measurement
        return fp8_trial(problem, status=ok, config=record.config, measurement=measurement)

    one, other = PROBLEMS[0], problem_of(dtype=FP8, scales="tensor")
    store.add_trials(
        [timed(one, 1.0, fast), timed(one, 2.0, slow), timed(other, 1.0, fast),
         timed(other, 1.5, slow)]
    )  # fmt: skip
    assert store.losses(fp8_record(one, **slow)) == [0.5]


def test_a_database_of_before_is_read_and_upgraded(home):
    store = home.open()
    kin = record_of(problem=problem_of(seqlen_q=500))
    store.add_records([RECORDS[0], kin])
    trial = trial_of(came_from="tpe")
    store.add_trial(trial)
    undo_the_revision(home.where)
    reader = home.open(read_only=True)
    assert reader.schema_version == "0003"
    bucket = Bucket.of(PROBLEM)
    assert reader.best(bucket, H200) == RECORDS[0]
    assert reader.neighbours(bucket, H200) == [kin]
    assert reader.trials(bucket, H200) == [trial]
    assert reader.losses(RECORDS[0]) == []
    for problem in PROBLEMS:
        assert reader.best(Bucket.of(problem), H200) is None
        assert reader.neighbours(Bucket.of(problem), H200) == []
        assert reader.trials(Bucket.of(problem), H200) == []
    assert {record_digest(r) for r in reader.records()} == {
        record_digest(r) for r in (RECORDS[0], kin)
    }
    upgraded = home.open()
    assert upgraded.schema_version == "0004"
    upgraded.add_records(RECORDS[1:])
    assert upgraded.best(bucket, H200) == RECORDS[0]
    assert upgraded.best(Bucket.of(PROBLEMS[1]), H200) == RECORDS[2]
    # What is there is known by the digest that it had.
    with upgraded._session("look") as session:
        found = session.execute(sqlalchemy.text("SELECT digest FROM records ORDER BY id")).all()
    assert [row[0] for row in found] == [record_digest(r) for r in (RECORDS[0], kin, *RECORDS[1:])]


def test_exchange_files():
    assert jsonl.parse(jsonl.dump(RECORDS).encode()).records == sorted(
        RECORDS, key=exchange.place_of
    )
    records, refusals = exchange.load_records(exchange.dump_records(RECORDS))
    assert refusals == []
    assert set(map(record_digest, records)) == set(map(record_digest, RECORDS))


def test_what_is_of_no_fp8_names_none_of_its_fields():
    text = record_text(RECORDS[0])
    assert not [name for name in FP8_FIELDS if name in text]
    assert '"scales":"head"' in record_text(RECORDS[1])
    told = plain.missed_to_plain(
        MissedCalls(problem=PROBLEM, target=H200, calls=1, noted_at="2025-01-31T23:59:59+00:00")
    )
    assert not set(told["problem"]) & set(FP8_FIELDS)


@pytest.mark.parametrize("record", RECORDS[1:], ids=lambda r: r.problem.label())
def test_a_reader_from_before_refuses_them_by_name(record, monkeypatch):
    text = jsonl.dump([RECORDS[0], record]).encode()
    monkeypatch.setattr(plain, "FP8_FIELDS", {})
    monkeypatch.setattr(plain, "PROBLEM_FIELDS", tuple(
        name for name in plain.PROBLEM_FIELDS if name not in FP8_FIELDS
    ))  # fmt: skip
    monkeypatch.setattr(plain, "_PROBLEM_NAMES", frozenset(plain.PROBLEM_FIELDS))
    monkeypatch.setattr(plain, "problem_of", lambda *values: PROBLEM)
    found = jsonl.parse(text)
    assert found.records == [RECORDS[0]]
    (refusal,) = found.refusals
    named = min(set(record.problem.as_dict()) & set(FP8_FIELDS))
    assert refusal.reason == f"problem: field '{named}' is unknown"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": 1}, "scales: must be str, not int"),
        ({"kv_dtype": None}, "kv_dtype: must be str, not NoneType"),
        ({"scales": "head"}, "scales='head': only k and v in float8_e4m3fn have that"),
        ({"granularity": "head"}, "problem: field 'granularity' is unknown"),
    ],
)
def test_a_stranger_says_them_rightly_or_not_at_all(changes, message):
    told = plain.record_to_plain(RECORDS[0])
    told["problem"] = told["problem"] | changes
    with pytest.raises(InvalidInputError) as caught:
        plain.record_from_plain(told)
    assert str(caught.value).startswith(message)


def test_locks():
    entries = [
        LockEntry(
            problem=record.problem, target=H200, kernel=record.kernel, config=record.config,
            access=("tma",), how="tuned", source_hash="0123456789abcdef",
        )
        for record in RECORDS
    ]  # fmt: skip
    versions = dict.fromkeys(lock.VERSIONS, "")
    found = lock.parse(lock.dump(entries, versions).encode())
    assert set(found.entries) == set(entries)


def test_a_kernel_takes_fp8_or_takes_none():
    wrong = plain.record_to_plain(RECORDS[1]) | {"kernel": "flash_fwd"}
    with pytest.raises(InvalidInputError, match="kernel flash_fwd takes no fp8: fwd float8_e4m3fn"):
        plain.record_from_plain(wrong)
    wrong = plain.record_to_plain(RECORDS[0]) | {"kernel": "flash_fwd_fp8"}
    with pytest.raises(InvalidInputError, match="kernel flash_fwd_fp8 takes only k and v in fp8"):
        plain.record_from_plain(wrong)
