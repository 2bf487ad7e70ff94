"""What is stored comes back, and the better evidence comes first, in whichever database it lies."""

import dataclasses
import threading

import pytest

from autoflash.errors import ConfigError, InvalidInputError, StoreError
from autoflash.problem import Bucket
from autoflash.space import Config
from autoflash.store.record import TrialStatus
from autoflash.target import named_target


class TestEveryStore:
    """Runs over SQLite and PostgreSQL."""

    @pytest.fixture
    def store(self, home):
        return home.open()

    def test_a_record_comes_back_as_it_was(self, home, store, make):
        record = make.record(ms=0.1 + 0.2)
        store.add_record(record)
        assert store.best(make.bucket, make.h200) == record
        assert home.open().records() == [record]
        assert home.open(read_only=True).records(make.h200) == [record]
        assert store.records(named_target("h100")) == []

    def test_trials_come_back_in_order(self, store, make):
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

    def test_a_reason_is_cut_and_made_storable(self, store, make):
        store.add_trial(make.trial(TrialStatus.crashed, reason="\ud800\0" + "x" * 5000))
        assert store.trials(make.bucket, make.h200)[0].reason == "?" + "x" * 1999

    def test_trials_are_added_all_or_none(self, store, make):
        stray = make.trial(config=Config(BLOCK_M=7))
        with pytest.raises(ConfigError):
            store.add_trials([make.trial(), stray])
        assert store.trials(make.bucket, make.h200) == []

    def test_what_a_read_would_refuse_is_not_written(self, store, make):
        record = make.record()
        with pytest.raises(ConfigError, match="BLOCK_M"):
            store.add_record(dataclasses.replace(record, config=Config(BLOCK_M=7)))
        with pytest.raises(InvalidInputError, match="unknown kernel 'flash_fwd_9'"):
            store.add_record(dataclasses.replace(record, kernel="flash_fwd_9"))
        assert store.records() == []

    def test_best_takes_the_newest_clean_measured(self, store, make):
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

    def test_best_is_of_exactly_the_bucket_and_target(self, store, make):
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

    def test_neighbours_are_the_best_of_each_other_bucket_nearest_first(self, store, make):
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

    def test_siblings_are_other_targets_of_the_arch(self, store, make):
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

    def test_records_are_sorted_by_target_then_bucket_then_best_first(self, store, make):
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

    def test_threads_may_share_a_store(self, store, make):
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

    def test_what_a_config_lost_elsewhere(self, store, make):
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

    def test_a_reader_can_not_write(self, home, store, make):
        reader = home.open(read_only=True)
        for add in (reader.add_record, reader.add_trial):
            with pytest.raises(StoreError, match="read_only=True"):
                add(make.record() if add == reader.add_record else make.trial())
        # Not only the method says no: the connection itself can't write.
        reader.read_only = False
        with pytest.raises(StoreError, match=r"readonly database|read-only transaction"):
            reader.add_record(make.record())
        assert store.records() == []

    @pytest.mark.parametrize("ms", [0.1 + 0.2, 5e-324, 1 / 3, 2**-40, 1e9 / 7])
    def test_times_come_back_to_the_last_bit(self, store, make, ms):
        times = {"median_ms": ms, "p20_ms": ms, "p80_ms": ms}
        record = make.record()
        measurement = dataclasses.replace(record.measurement, **times)
        store.add_record(dataclasses.replace(record, measurement=measurement))
        assert store.best(make.bucket, make.h200).measurement.median_ms.hex() == ms.hex()

    def test_the_largest_sizes_come_back(self, store, make):
        most = 2**31 - 1
        problem = make.problem(batch=most, heads=most, kv_heads=1, seqlen_q=most, seqlen_k=most)
        record = make.record(problem=problem)
        store.add_record(record)
        store.add_trial(make.trial(problem=problem, shared_bytes=most, registers=most, spills=most))
        assert store.best(record.bucket, make.h200) == record
        assert store.trials(record.bucket, make.h200)[0].registers == most
        assert record.bucket.batch_heads > 2**61

    def test_text_is_compared_by_its_bytes(self, store, make):
        """Not as a server's language would have it: there 'a' < 'B', and case may not count."""
        targets = [dataclasses.replace(make.h200, name=name) for name in ("B", "a", "b", "ä", "Z")]
        for target in targets:
            store.add_record(make.record(target=target))
        for target in targets:
            assert store.best(make.bucket, target).target.name == target.name
        assert store.best(make.bucket, dataclasses.replace(make.h200, name="A")) is None
        assert [r.target.name for r in store.records()] == ["B", "Z", "a", "b", "ä"]
