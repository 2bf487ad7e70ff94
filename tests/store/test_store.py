"""What is stored comes back, and the better evidence comes first."""

import dataclasses
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing

import pytest

from autoflash.errors import ConfigError, InvalidInputError, StoreError
from autoflash.problem import Bucket
from autoflash.space import Config
from autoflash.store.record import TrialStatus
from autoflash.store.store import Store
from autoflash.target import named_target


def test_a_record_comes_back_as_it_was(store, path, make):
    record = make.record(ms=0.1 + 0.2)
    store.add_record(record)
    assert store.best(make.bucket, make.h200) == record
    assert Store(path).records() == [record]
    assert Store(path, read_only=True).records(make.h200) == [record]
    assert store.records(named_target("h100")) == []


def test_trials_come_back_in_order(store, make):
    trials = [
        make.trial(status, reason=f"because {status}", shared_bytes=1 << 17, registers=255)
        for status in TrialStatus
    ]
    trials.append(make.trial(measurement=make.record().measurement, spills=0))
    trials.append(make.trial(TrialStatus.predicted, predicted_ms=0.7))
    other = make.trial(problem=make.problem(head_dim=64))
    store.add_trial(trials[0])
    store.add_trials([*trials[1:], other])
    assert store.trials(make.bucket, make.h200) == trials
    assert store.trials(make.bucket, make.h200, kernel="flash_fwd") == trials
    assert store.trials(make.bucket, make.h200, kernel="flash_bwd") == []
    assert store.trials(other.bucket, make.h200) == [other]
    assert store.trials(make.bucket, named_target("h100")) == []


def test_a_reason_is_cut_and_made_storable(store, make):
    store.add_trial(make.trial(TrialStatus.crashed, reason="\ud800\0" + "x" * 5000))
    assert store.trials(make.bucket, make.h200)[0].reason == "?" + "x" * 1999


def test_trials_are_added_all_or_none(store, make):
    stray = make.trial(config=Config(BLOCK_M=7))
    with pytest.raises(ConfigError):
        store.add_trials([make.trial(), stray])
    assert store.trials(make.bucket, make.h200) == []


def test_what_a_read_would_refuse_is_not_written(store, make):
    record = make.record()
    with pytest.raises(ConfigError, match="BLOCK_M"):
        store.add_record(dataclasses.replace(record, config=Config(BLOCK_M=7)))
    with pytest.raises(InvalidInputError, match="unknown kernel 'flash_fwd_9'"):
        store.add_record(dataclasses.replace(record, kernel="flash_fwd_9"))
    assert store.records() == []


def test_best_takes_the_newest_clean_measured(store, make):
    """In the order added, each beats or doesn't beat what was best before."""
    steps = [
        (make.record(kind="predicted", ms=0.1, day=28), True),
        (make.record(kind="predicted", ms=0.2, day=27), False),
        (make.record(noisy=True, ms=3.0, day=1), True),
        (make.record(noisy=True, ms=4.0, day=2), True),
        (make.record(ms=9.0, day=1), True),
        (make.record(ms=1.0, day=1, noisy=True), False),
        (make.record(ms=0.5, day=28, noisy=True), False),
        (make.record(ms=9.5, day=3), True),
        (make.record(ms=1.0, day=2), False),
        (make.record(ms=8.0, day=3), True),
    ]
    best = None
    for record, wins in steps:
        store.add_record(record)
        best = record if wins else best
        assert store.best(make.bucket, make.h200) == best
    assert len(store.records()) == len(steps)
    assert store.records()[0] == best


def test_best_is_of_exactly_the_bucket_and_target(store, make):
    store.add_record(make.record())
    for change in (
        {"dtype": "float16"},
        {"head_dim": 64},
        {"head_dim_v": 128},
        {"causal": False},
        {"kv_heads": 16},
        {"batch": 4},
        {"seqlen_q": 1024},
        {"seqlen_k": 4097},
    ):
        assert store.best(Bucket.of(make.problem(**change)), make.h200) is None, change
    for name, value in {"vendor": "amd", "name": "X", "arch": "sm_100"}.items():
        assert store.best(make.bucket, dataclasses.replace(make.h200, **{name: value})) is None
    for name in ("sm_count", "memory_gib"):
        assert store.best(make.bucket, dataclasses.replace(make.h200, **{name: 100})) is None
    # The same bucket holds problems of other sizes; rates are no part of the identity.
    assert store.best(Bucket.of(make.problem(seqlen_q=1025)), make.h200) is not None
    assert store.best(make.bucket, dataclasses.replace(make.h200, tflops=1.0)) is not None


def test_lookups_use_the_index(store, path, make):
    store.add_record(make.record())
    seen = []
    plan = "EXPLAIN QUERY PLAN "
    with closing(sqlite3.connect(path)) as raw:

        def explain(query):
            return raw.execute(plan + query).fetchall()[0][3]

        configure = store._configure

        def traced(connection, entry):
            configure(connection, entry)
            connection.set_trace_callback(seen.append)

        from sqlalchemy import event

        event.listen(store._engine, "connect", traced)
        for lookup in (store.best, store.neighbours, store.siblings, store.trials):
            lookup(make.bucket, make.h200)
        plans = [explain(query) for query in seen if query.startswith("SELECT")]
    assert [p.split(" (")[0] for p in plans] == [
        *["SEARCH records USING INDEX ix_records_key"] * 3,
        "SEARCH trials USING INDEX ix_trials_key",
    ]
    assert plans[0].count("=?") == 14


def test_neighbours_are_the_best_of_each_other_bucket_nearest_first(store, make):
    near = make.problem(batch=4)  # half an octave
    far = make.problem(seqlen_q=16000, seqlen_k=16384)  # five octaves
    group = make.problem(kv_heads=16, seqlen_k=8192)  # one and a half
    twin = make.problem(dtype="float16", batch=4)  # a quarter more than near
    expected = [make.record(problem=p, ms=2.0, day=5) for p in (near, twin, group, far)]
    for record in (
        make.record(),
        *reversed(expected),
        make.record(problem=near, ms=1.0, day=4),
        make.record(problem=near, ms=1.0, day=9, noisy=True),
        make.record(problem=make.problem(batch=8), kind="predicted"),
        make.record(problem=make.problem(causal=False)),
        make.record(problem=near, target=named_target("h100"), day=9),
    ):
        store.add_record(record)
    assert store.neighbours(make.bucket, make.h200) == expected
    assert [make.bucket.distance(r.bucket) for r in expected] == [0.5, 0.75, 1.5, 5.0]


def test_siblings_are_other_targets_of_the_arch(store, make):
    h100 = named_target("h100")
    slice_ = dataclasses.replace(
        make.h200, name="NVIDIA H200 MIG 1g.18gb", sm_count=16, memory_gib=16
    )
    exact = make.record(target=h100, ms=3.0)
    on_slice = make.record(target=slice_, problem=make.problem(batch=1), ms=9.0)
    for record in (
        make.record(),
        on_slice,
        exact,
        make.record(target=h100, noisy=True, day=9),
        make.record(target=h100, problem=make.problem(batch=4), kind="predicted"),
        make.record(target=named_target("a100")),
    ):
        store.add_record(record)
    found = store.siblings(make.bucket, make.h200)
    assert [(r.target.identity, r.measurement.median_ms) for r in found] == [
        (h100.identity, 3.0),
        (slice_.identity, 9.0),
    ]
    assert store.siblings(make.bucket, named_target("b200")) == []


def test_records_are_sorted_by_target_then_bucket_then_best_first(store, make):
    h100 = named_target("h100")
    small = make.problem(head_dim=64)
    ordered = [
        make.record(target=h100),
        make.record(problem=small, ms=2.0),
        make.record(problem=small, ms=3.0, noisy=True),
        make.record(),
    ]
    for index in (3, 1, 0, 2):
        store.add_record(ordered[index])
    assert store.records() == ordered
    assert store.records(make.h200) == ordered[1:]


def test_read_only_writes_nothing(store, path, make):
    store.add_record(make.record())
    before = path.read_bytes()
    reader = Store(path, read_only=True)
    with pytest.raises(StoreError, match="read_only=True"):
        reader.add_record(make.record())
    with pytest.raises(StoreError, match="read_only=True"):
        reader.add_trial(make.trial())
    # Not only the method says no: the connection itself can't write.
    reader.read_only = False
    with pytest.raises(StoreError, match="readonly database"):
        reader.add_record(make.record())
    assert path.read_bytes() == before
    assert len(store.records()) == 1


def test_pragmas(store, path):
    def pragmas(opened):
        with opened._session("look") as session:
            connection = session.connection()
            names = ("journal_mode", "busy_timeout", "synchronous", "foreign_keys")
            return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    assert pragmas(store) == ["wal", 5000, 1, 1]
    timeout = pragmas(Store(path, read_only=True))[1]
    assert timeout == 100


def test_a_busy_database_is_a_store_error(store, path, make, monkeypatch):
    monkeypatch.setattr("autoflash.store.schema.WRITE_TIMEOUT_S", 0.05)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match=r"could not store records: .*locked; .*try again"):
            store.add_record(make.record())
        # Readers don't wait for a writer.
        assert Store(path, read_only=True).records() == []
    store.add_record(make.record())


def test_a_file_that_goes_away_is_an_error_and_not_made_anew(store, path, make):
    path.unlink()
    with pytest.raises(StoreError, match="unable to open"):
        store.add_record(make.record())
    with pytest.raises(StoreError, match="unable to open"):
        store.records()
    assert not path.exists()


def test_threads_may_share_a_store(store, make):
    def work():
        for _ in range(5):
            store.add_trial(make.trial())
            store.trials(make.bucket, make.h200)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.trials(make.bucket, make.h200)) == 20


def test_importing_the_package_loads_no_database():
    code = (
        "import sys, autoflash.store, autoflash.store.record, autoflash.store.layers\n"
        "assert not {'sqlalchemy', 'alembic', 'sqlite3'} & set(sys.modules)\n"
        "import autoflash.store.store\n"
        "assert 'alembic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_a_config_lost_elsewhere(store, make):
    """Four problems where the record's config (two stages) was tried beside others."""
    record = make.record(num_stages=2)
    fast, slow = (make.record(num_stages=n).config for n in (2, 3))

    def add(seqlen_k, config, ms, status=TrialStatus.ok, **changes):
        problem = make.problem(seqlen_k=seqlen_k)
        measurement = dataclasses.replace(record.measurement, median_ms=ms)
        fields = {"problem": problem, "config": config, "status": status, **changes}
        store.add_trial(make.trial(**{"measurement": measurement, **fields}))

    assert store.losses(record) == []
    add(4096, fast, 9.0)  # the record's own problem says nothing
    add(4096, slow, 1.0)
    add(8192, fast, 2.2)
    add(8192, fast, 2.1)  # timed again
    add(8192, slow, 2.0)
    add(8192, slow, 0.5, status=TrialStatus.noisy)
    add(16384, fast, 3.0)
    add(16384, slow, 4.0)
    add(1024, slow, 1.0)  # never tried here
    other = dataclasses.replace(make.h200, name="NVIDIA H100 80GB HBM3")
    add(2048, fast, 8.0, target=other)
    add(2048, slow, 1.0, target=other)
    assert store.losses(record) == [0.0, pytest.approx(0.05)]
