"""A tune whose database server goes away: it goes on, and nothing that it found is lost."""

import contextlib

import pytest

from autoflash.problem import Bucket
from autoflash.settings import settings
from autoflash.store import spool
from autoflash.store.opening import open_store, spool_path
from autoflash.store.postgres import PostgresStore
from autoflash.store.spool import waiting
from autoflash.tuning import tune as loop
from autoflash.tuning.progress import Listener
from autoflash.tuning.tune import tune
from tests.test_cli import autoflash

AWAY_AFTER = 7
BACK_AFTER = 15


class At(Listener):
    """Does something after so many trials."""

    def __init__(self, **what):
        self.what = {int(name.removeprefix("after_")): do for name, do in what.items()}
        self.trials = []

    def tried(self, trial, best_ms):
        self.trials.append(trial)
        self.what.get(len(self.trials), lambda: None)()


@pytest.fixture
def tuned(lab, url, monkeypatch):
    """Runs a tune of the lab's problem into the database, by recorded trials."""

    @contextlib.contextmanager
    def recorded(workers, target, gpus):
        yield [lab.runner(lab.trials())]

    monkeypatch.setattr(loop, "live_runners", recorded)
    monkeypatch.setattr(loop, "gpu_is_present", lambda: True)
    monkeypatch.setenv("AUTOFLASH_DB", url.with_password)

    def run(listener):
        (result,) = tune(lab.problem, budget_s=600, listener=listener)
        return result

    return run


def held(url, lab):
    """The trials and records on the server."""
    store = PostgresStore(url, read_only=True)
    return store.trials(Bucket.of(lab.problem), lab.a100), store.records()


def test_what_it_found_waits_in_the_spool_for_the_next_tune(lab, tuned, url, going_away, caplog):
    listener = At(**{f"after_{AWAY_AFTER}": going_away.stop})
    result = tuned(listener)
    assert len(listener.trials) == len(lab.trials()) == 24
    # Those after it went, and the record.
    assert waiting(spool_path(url)) == 24 - AWAY_AFTER + 1
    assert f"{24 - AWAY_AFTER + 1} rows wait in" in caplog.text
    going_away.start()
    trials, records = held(url, lab)
    assert (trials, records) == (listener.trials[:AWAY_AFTER], [])
    # Any process of this host that tunes into this database brings the rest.
    open_store(settings().db)
    assert held(url, lab) == (listener.trials, [result.record])
    assert waiting(spool_path(url)) == 0
    again = tuned(At())
    assert (again.resumed, again.record.config) == (24, result.record.config)
    assert held(url, lab)[0] == listener.trials


def test_a_server_that_comes_back_during_the_tune_has_all_at_its_end(
    lab, tuned, url, going_away, monkeypatch
):
    monkeypatch.setattr(spool, "REST_S", 0.0)
    listener = At(
        **{f"after_{AWAY_AFTER}": going_away.stop, f"after_{BACK_AFTER}": going_away.start}
    )
    result = tuned(listener)
    assert held(url, lab) == (listener.trials, [result.record])
    assert len(listener.trials) == 24
    assert waiting(spool_path(url)) == 0


def test_doctor_tells_of_the_server_and_of_what_waits_for_it(lab, tuned, url, going_away):
    def doctor():
        done = autoflash("doctor", "--db", url.with_password, "--json")
        assert going_away.password not in done.out + done.err
        found = {one["subject"]: (one["state"], one["text"]) for one in done.json}
        return done.code, found.get("spool"), found["store"]

    tuned(At(**{f"after_{AWAY_AFTER}": going_away.stop}))
    waits = f"{24 - AWAY_AFTER + 1} rows wait in {spool_path(url)}: the next tune that reaches"
    code, spooled, store = doctor()
    assert (code, spooled[0], store[0]) == (1, "warning", "error")
    assert spooled[1].startswith(waits)
    assert "check that the server runs" in store[1]
    going_away.start()
    code, spooled, store = doctor()
    assert (spooled[0], store) == ("warning", ("ok", f"{url}, 0 records"))
    open_store(settings().db)
    code, spooled, store = doctor()
    assert (spooled, store) == (None, ("ok", f"{url}, 1 records"))
