"""The order that serving looks records up in, and that nothing there can stop a model."""

import dataclasses
import subprocess
import sys

import pytest

from autoflash.errors import InvalidInputError
from autoflash.settings import settings
from autoflash.store.exchange import dump_records
from autoflash.store.layers import Layers
from autoflash.store.store import Store
from autoflash.target import named_target

H100 = named_target("h100")


@pytest.fixture
def shipped(tmp_path):
    folder = tmp_path / "tuning_db"
    folder.mkdir()
    return folder


@pytest.fixture
def ship(shipped):
    def write(*records):
        for slug in {record.target.slug for record in records}:
            mine = [record for record in records if record.target.slug == slug]
            (shipped / f"{slug}.json").write_text(dump_records(mine), encoding="utf-8")

    return write


@pytest.fixture
def layers(path, shipped):
    """Builds Layers on ``path`` and on what ``ship`` wrote."""

    def build(**changes):
        snapshot = dataclasses.replace(settings(), db_path=path, **changes)
        return Layers(snapshot, shipped=shipped)

    return build


def told(found):
    return found and (found.layer, found.how, found.distance, found.record.measurement.median_ms)


def test_nothing_known(layers, make):
    assert layers().lookup(make.bucket, make.h200) is None


def ladder(make):
    """(layer, record, what is told once it is there), each better than the one before."""
    near, nearer = make.problem(seqlen_k=16000), make.problem(seqlen_k=8000)
    record = make.record
    return [
        ("shipped", record(kind="predicted", ms=1), ("shipped", "predicted", 0.0, 1.0)),
        ("user", record(kind="predicted", ms=2), ("user", "predicted", 0.0, 2.0)),
        ("shipped", record(target=H100, noisy=True, ms=3), ("shipped", "neighbour", 0.0, 3.0)),
        ("user", record(target=H100, noisy=True, ms=4), ("user", "neighbour", 0.0, 4.0)),
        ("shipped", record(target=H100, ms=5), ("shipped", "neighbour", 0.0, 5.0)),
        ("user", record(target=H100, ms=6), ("user", "neighbour", 0.0, 6.0)),
        ("shipped", record(problem=near, ms=7), ("shipped", "neighbour", 2.0, 7.0)),
        ("user", record(problem=near, ms=8), ("user", "neighbour", 2.0, 8.0)),
        ("shipped", record(problem=nearer, ms=9), ("shipped", "neighbour", 1.0, 9.0)),
        ("shipped", record(noisy=True, ms=10), ("shipped", "exact", 0.0, 10.0)),
        ("user", record(noisy=True, ms=11), ("user", "exact", 0.0, 11.0)),
        ("shipped", record(ms=12), ("shipped", "exact", 0.0, 12.0)),
        ("shipped", record(ms=13, day=2), ("shipped", "exact", 0.0, 13.0)),
        ("user", record(ms=14), ("user", "exact", 0.0, 14.0)),
        ("user", record(ms=15, day=2), ("user", "exact", 0.0, 15.0)),
    ]


def test_a_sites_records_come_between(layers, store, ship, make, tmp_path, caplog):
    site = tmp_path / "site.sqlite"
    ship(make.record(ms=3.0))
    looking = layers(site_db=site)
    assert told(looking.lookup(make.bucket, make.h200)) == ("shipped", "exact", 0.0, 3.0)
    assert f"going on without the site records: {site}: is not there" in caplog.text
    Store(site).add_record(make.record(ms=4.0))
    assert told(looking.lookup(make.bucket, make.h200)) == ("site", "exact", 0.0, 4.0)
    store.add_record(make.record(ms=5.0))
    assert told(looking.lookup(make.bucket, make.h200)) == ("user", "exact", 0.0, 5.0)
    # Better evidence of a later layer still goes first.
    near = make.record(problem=make.problem(seqlen_k=8000), ms=1.0)
    assert told(looking.lookup(near.bucket, make.h200)) == ("user", "neighbour", 1.0, 5.0)
    Store(site).add_record(near)
    assert told(looking.lookup(near.bucket, make.h200)) == ("site", "exact", 0.0, 1.0)


def test_a_store_that_anybody_may_change_is_warned_of_once(layers, store, make, path, caplog):
    store.add_record(make.record(ms=4.0))
    path.parent.chmod(0o777)
    looking = layers()
    for _ in range(2):
        assert told(looking.lookup(make.bucket, make.h200)) == ("user", "exact", 0.0, 4.0)
    (warning,) = [text for text in caplog.messages if "world-writable" in text]
    assert str(path) in warning


def test_losses_are_told_by_the_trials_of_every_layer(layers, store, make, tmp_path):
    site = Store(tmp_path / "site.sqlite")
    slow = make.record(ms=2.0)
    for where, seqlen, ms in ((store, 8000, 1.5), (site, 16000, 1.0)):
        problem = make.problem(seqlen_k=seqlen)
        for config, taken in ((slow.config, 2.0), (make.record(BLOCK_N=32).config, ms)):
            measured = make.record(ms=taken).measurement
            trial = make.trial(problem=problem, config=config, measurement=measured)
            where.add_trial(trial)
    losses = layers(site_db=site.path).losses(slow)
    assert losses == pytest.approx([2.0 / 1.5 - 1, 1.0])


@pytest.mark.parametrize("reverse", [False, True])
def test_better_evidence_comes_first(layers, store, ship, make, reverse):
    in_files = []
    steps = ladder(make)
    for step in range(len(steps)):
        if reverse and step < len(steps) - 1:
            continue
        added = steps[step::-1] if reverse else [steps[step]]
        for layer, record, _ in added:
            if layer == "user":
                store.add_record(record)
            else:
                in_files.append(record)
        ship(*in_files)
        assert told(layers().lookup(make.bucket, make.h200)) == steps[step][2], step


def test_neighbours_end_at_six_octaves(layers, store, make):
    store.add_record(make.record(problem=make.problem(seqlen_q=2**14, seqlen_k=2**15, batch=2)))
    assert told(layers().lookup(make.bucket, make.h200)) == ("user", "neighbour", 6.0, 1.25)
    too_far = dataclasses.replace(make.bucket, batch_heads=64)
    assert layers().lookup(too_far, make.h200) is None


def test_siblings_only_help_with_the_same_bucket(layers, store, ship, make):
    store.add_record(make.record(target=H100, problem=make.problem(batch=4)))
    ship(make.record(target=H100, problem=make.problem(batch=4)))
    assert layers().lookup(make.bucket, make.h200) is None


def test_a_shipped_file_is_for_its_records_target_not_its_names(layers, shipped, make):
    other = make.record(target=dataclasses.replace(make.h200, sm_count=66, memory_gib=72))
    (shipped / "nvidia_h200.json").write_text(dump_records([other]), encoding="utf-8")
    found = layers().lookup(make.bucket, make.h200)
    assert told(found) == ("shipped", "neighbour", 0.0, 1.25)
    assert found.record.target.identity == other.target.identity


def test_shipped_records_can_be_switched_off(layers, ship, make):
    ship(make.record())
    assert layers(use_shipped_records=False).lookup(make.bucket, make.h200) is None
    assert told(layers().lookup(make.bucket, make.h200)) == ("shipped", "exact", 0.0, 1.25)


def test_the_users_file_may_appear_later(layers, path, make):
    looking = layers()
    assert looking.lookup(make.bucket, make.h200) is None
    assert not path.parent.exists()
    Store(path).add_record(make.record())
    assert told(looking.lookup(make.bucket, make.h200)) == ("user", "exact", 0.0, 1.25)
    path.unlink()
    assert looking.lookup(make.bucket, make.h200) is None


@pytest.mark.parametrize("content", [b"", b"\0" * 5000, b"{}", b"SQLite format 3\0" + b"x" * 4080])
def test_a_broken_user_store_costs_one_warning(layers, path, make, caplog, content):
    (path.parent.parent / "tuning_db" / "nvidia_h200.json").write_text(
        dump_records([make.record()]), encoding="utf-8"
    )
    path.parent.mkdir()
    path.write_bytes(content)
    looking = layers()
    for _ in range(3):
        assert told(looking.lookup(make.bucket, make.h200)) == ("shipped", "exact", 0.0, 1.25)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].name.startswith("autoflash.")
    assert str(path) in caplog.text
    assert path.read_bytes() == content


def test_a_user_store_that_breaks_later_costs_one_warning(layers, store, path, make, caplog):
    store.add_record(make.record())
    looking = layers()
    assert looking.lookup(make.bucket, make.h200) is not None
    path.write_bytes(b"junk" * 5000)
    for _ in range(3):
        assert looking.lookup(make.bucket, make.h200) is None
    assert len(caplog.records) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"[" * 100_000])
@pytest.mark.parametrize("name", ["nvidia_h200.json", "nvidia_l40s.json"])
def test_a_broken_shipped_file_costs_one_warning(shipped, make, caplog, content, name):
    (shipped / name).write_bytes(content)
    (shipped / "zzz.json").write_text(dump_records([make.record(target=H100)]), encoding="utf-8")
    no_user_store = dataclasses.replace(settings(), db_path=shipped / "none.sqlite")
    looking = Layers(no_user_store, shipped=shipped)
    for _ in range(3):
        assert told(looking.lookup(make.bucket, make.h200)) == ("shipped", "neighbour", 0.0, 1.25)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert name in caplog.text


def test_a_bad_shipped_record_costs_one_warning(layers, shipped, make, caplog):
    records = [make.record(ms=5.0), make.record(ms=7.0, day=2)]
    text = dump_records(records).replace('"median_ms": 7.0', '"median_ms": -7.0')
    (shipped / "nvidia_h200.json").write_text(text, encoding="utf-8")
    looking = layers()
    for _ in range(3):
        assert told(looking.lookup(make.bucket, make.h200)) == ("shipped", "exact", 0.0, 5.0)
    assert len(caplog.records) == 1
    assert "refused 1 records, such as record 1: median_ms=-7.0" in caplog.text


def test_a_folder_in_place_of_a_file(layers, path, shipped, make, caplog):
    path.mkdir(parents=True)
    (shipped / "nvidia_h200.json").mkdir()
    assert layers().lookup(make.bucket, make.h200) is None
    assert len(caplog.records) == 2


def test_the_settings_are_the_default(path, make, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_DB", str(path))
    Store(path).add_record(make.record())
    assert told(Layers().lookup(make.bucket, make.h200)) == ("user", "exact", 0.0, 1.25)
    monkeypatch.setenv("AUTOFLASH_MODE", "guess")
    with pytest.raises(InvalidInputError, match="AUTOFLASH_MODE"):
        Layers()


def test_a_lookup_never_loads_alembic(store, path, make):
    store.add_record(make.record())
    code = (
        "import os, sys\n"
        "from autoflash.problem import Bucket, Problem\n"
        "from autoflash.store.layers import Layers\n"
        "from autoflash.target import named_target\n"
        f"bucket = Bucket(**{dataclasses.asdict(make.bucket)})\n"
        "os.environ['AUTOFLASH_DB'] = '/nowhere/at.all'\n"
        "Layers().lookup(bucket, named_target('h200'))\n"
        "assert 'sqlalchemy' not in sys.modules\n"
        "os.environ['AUTOFLASH_DB'] = sys.argv[1]\n"
        "found = Layers().lookup(bucket, named_target('h200'))\n"
        "assert found.layer == 'user' and 'alembic' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code, path], check=True)


def test_losses_are_those_of_the_users_trials(layers, store, ship, make):
    near, other = make.problem(seqlen_k=8192), make.record(num_stages=3)
    record = make.record(num_stages=2)
    ship(record)
    for one, ms in ((record, 3.0), (other, 2.0)):
        measurement = dataclasses.replace(one.measurement, median_ms=ms)
        store.add_trial(make.trial(problem=near, config=one.config, measurement=measurement))
    assert layers().losses(record) == [0.5]


def test_no_losses_without_a_store_or_with_a_broken_one(layers, path, make, caplog):
    assert layers().losses(make.record()) == []
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"no database")
    assert layers().losses(make.record()) == []
    assert "going on without the user records" in caplog.text
