"""What one database lacks of another is brought, between files and servers in both directions."""

import shutil
import threading
from dataclasses import replace

import pytest

from autoflash.errors import StoreError
from autoflash.store.digest import record_digest, trial_digest
from autoflash.store.lacking import add_lacking_records, add_lacking_trials
from autoflash.store.models import RecordRow, TrialRow
from autoflash.store.opening import open_store
from autoflash.store.postgres import PostgresStore
from autoflash.store.record import TrialStatus
from autoflash.store.store import Store
from autoflash.store.transfer import bring
from tests.store.support import TO_THE_FIRST_SCHEMA, problem_of, record_of, trial_of
from tests.test_cli import autoflash

RECORDS = [record_of(ms=1 + day / 10, day=day) for day in range(1, 13)]
TRIALS = [trial_of(status, reason=f"{status} {n}") for n in range(4) for status in TrialStatus]
PAIRS = ("sqlite to postgres", "postgres to sqlite", "sqlite to sqlite", "postgres to postgres")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    for module in ("rows", "lacking", "transfer"):
        monkeypatch.setattr(f"autoflash.store.{module}.AT_ONCE", 5)


@pytest.fixture(params=PAIRS)
def pair(request, tmp_path, empty_store_file):
    """Two empty stores, and what --db takes for each."""
    stores, places, urls = [], [], []
    for number, kind in enumerate(request.param.split(" to ")):
        if kind == "sqlite":
            places.append(str(shutil.copy(empty_store_file, tmp_path / f"{number}.sqlite")))
            stores.append(Store(places[-1]))
        else:
            server = request.getfixturevalue("server")
            urls.append(server.new_database(request.getfixturevalue("empty_database")))
            places.append(urls[-1].with_password)
            stores.append(PostgresStore(urls[-1]))
    yield stores, places
    for url in urls:
        request.getfixturevalue("server").drop(url)


def held(store):
    """Digests of all rows, sorted: a row that is held twice shows."""
    return (
        sorted(record_digest(record) for _, record in store.numbered_records()),
        sorted(trial_digest(trial) for trial in all_trials(store)),
    )


def all_trials(store):
    from autoflash.store.rows import trial_from_row

    return store._read(store._whole(TrialRow).order_by(TrialRow.id), trial_from_row, "list")


def spoil(store, statement):
    with store._session("spoil") as session:
        session.connection().exec_driver_sql(statement)


def counts(found):
    return {name: (rows.added, rows.known, rows.refused) for name, rows in found.items()}


def test_what_is_lacking_is_brought_once(pair):
    (giving, taking), _ = pair
    giving.add_records(RECORDS)
    giving.add_trials(TRIALS)
    own = [record_of(origin="host-b")]
    taking.add_records([*own, *RECORDS[3:7]])
    taking.add_trials(TRIALS[:11])
    assert counts(bring(giving, taking)) == {
        "records": (8, 4, 0), "trials": (len(TRIALS) - 11, 11, 0),
    }  # fmt: skip
    expected = (
        sorted(map(record_digest, [*RECORDS, *own])), sorted(map(trial_digest, TRIALS)),
    )  # fmt: skip
    assert held(taking) == expected
    assert counts(bring(giving, taking)) == {"records": (0, 12, 0), "trials": (0, len(TRIALS), 0)}
    assert held(taking) == expected
    assert counts(bring(taking, giving))["records"] == (1, 12, 0)
    assert held(giving) == held(taking)
    # Only what is new since is read.
    giving.add_trial(trial_of(reason="new"))
    read = []
    giving.add_record(record_of(day=28))
    with pytest.MonkeyPatch.context() as patch:
        fetch = type(giving)._fetch
        patch.setattr(
            type(giving), "_fetch", lambda s, q, action: read.append(action) or fetch(s, q, action)
        )
        assert counts(bring(giving, taking))["trials"] == (1, len(TRIALS), 0)
    assert (read.count("read trials"), read.count("read records")) == (1, 1)
    assert held(giving) == held(taking)


def test_rows_come_in_the_order_they_were_added_in(pair, make):
    (giving, taking), _ = pair
    giving.add_trials(TRIALS)
    bring(giving, taking)
    assert taking.trials(make.bucket, make.h200) == TRIALS


def test_the_commands(pair):
    (giving, taking), (here, there) = pair
    giving.add_records(RECORDS)
    giving.add_trials(TRIALS)
    done = autoflash("db", "push", there, "--db", here, "--json")
    assert done.code == 0
    assert (done.json["from"], done.json["to"]) == (giving.name, taking.name)
    assert done.json["trials"] == {
        "added": len(TRIALS), "known": 0, "refused": 0, "refusals": [],
    }  # fmt: skip
    assert held(taking) == held(giving)
    taking.add_record(record_of(day=20))
    done = autoflash("db", "pull", there, "--db", here)
    assert (done.code, "1 records added, 12 known already, 0 refused" in done.out) == (0, True)
    assert held(taking) == held(giving)


def test_bad_rows_are_refused_one_by_one_and_the_rest_is_brought(pair):
    (giving, taking), (here, there) = pair
    giving.add_records([*RECORDS, record_of(day=28, origin="ahead")])
    giving.add_trials(TRIALS)
    spoil(giving, "UPDATE records SET kernel = 'of tomorrow' WHERE id = 2")
    spoil(giving, "UPDATE records SET median_ms = 0.1 WHERE id = 3")
    ahead = "2999-01-01T00:00:00+00:00"
    spoil(giving, f"UPDATE records SET created_at = '{ahead}', digest = '' WHERE id = 13")
    spoil(giving, "UPDATE trials SET status = 'fine' WHERE id = 1")
    done = autoflash("db", "push", there, "--db", here)
    assert done.code == 1
    for reason in (
        "records, row 2: unknown kernel 'of tomorrow'",
        "records, row 3: its digest isn't that of the row",
        f"records, row 13: created_at='{ahead}': more than a day ahead",
        "trials, row 1: unknown trial status 'fine'",
    ):
        assert reason in done.told
    assert held(taking) == (
        sorted(map(record_digest, [RECORDS[0], *RECORDS[3:]])),
        sorted(map(trial_digest, TRIALS[1:])),
    )


def test_rows_of_an_older_version_are_known_by_what_they_say(pair):
    (giving, taking), _ = pair
    for store in (giving, taking):
        store.add_records(RECORDS)
        store.add_trials(TRIALS)
        for statement in TO_THE_FIRST_SCHEMA:
            spoil(store, statement)
    giving_place = getattr(giving, "path", None) or giving.url
    taking_place = getattr(taking, "path", None) or taking.url
    old = open_store(giving_place, read_only=True)
    upgraded = open_store(taking_place, spooled=False)
    expected = {"records": (0, 12, 0), "trials": (0, len(TRIALS), 0)}
    assert counts(bring(old, upgraded)) == expected
    assert held(upgraded)[0] == sorted(map(record_digest, RECORDS))
    assert counts(bring(upgraded, open_store(giving_place, spooled=False))) == expected


def test_several_at_once_double_nothing(home):
    store = home.open()
    start = threading.Barrier(4)

    def add():
        own = home.open()
        start.wait()
        for record in RECORDS:
            add_lacking_records(own, [record, record])
        add_lacking_trials(own, TRIALS)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held(store) == (sorted(map(record_digest, RECORDS)), sorted(map(trial_digest, TRIALS)))


def test_what_can_not_be_opened_makes_no_other(tmp_path, pair):
    _, (here, _) = pair
    done = autoflash("db", "push", tmp_path / "new.sqlite", "--db", tmp_path / "none.sqlite")
    assert (done.code, "none.sqlite: no such store" in done.told) == (2, True)
    assert not (tmp_path / "new.sqlite").exists()
    done = autoflash("db", "pull", "mysql://host/db", "--db", here)
    assert (done.code, "scheme 'mysql' is not served" in done.told) == (2, True)


def test_a_reader_is_brought_nothing(home):
    with pytest.raises(StoreError, match="could not bring rows: it was opened with read_only=True"):
        bring(home.open(), home.open(read_only=True))


def test_the_same_said_of_another_problem_is_another_row(home):
    store = home.open()
    one = record_of()
    assert add_lacking_records(store, [one, replace(one, problem=problem_of(batch=3))]) == 2
    assert add_lacking_records(store, [one]) == 0
    with store._session("count") as session:
        assert session.query(RecordRow).count() == 2
