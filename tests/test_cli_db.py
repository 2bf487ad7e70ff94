"""``autoflash db``: what it writes, refuses and says, and how it ends."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from autoflash.problem import Bucket
from autoflash.settings import settings
from autoflash.store import jsonl
from autoflash.store.digest import record_digest
from autoflash.store.postgres import PostgresStore
from autoflash.store.shipped import all_shipped_records
from autoflash.store.store import Store
from autoflash.store.untrusted import write_text
from autoflash.target import named_target
from tests.store.hostile import sealed
from tests.store.support import H200, PROBLEM, problem_of, record_of
from tests.test_cli import autoflash, squeezed

A = [record_of(ms=2.0, day=1), record_of(ms=3.0, day=2), record_of(problem=problem_of(head_dim=64))]
B = [record_of(ms=2.5, origin="host-b"), record_of(ms=9.0, noisy=True, day=9, origin="host-b")]


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return Store(tmp_path_factory.mktemp("empty") / "empty.sqlite").path


@pytest.fixture(params=["sqlite", "postgres"])
def store_of(request, tmp_path, empty):
    """Makes a store that holds records; the tests that ask for it run over both databases."""
    made = []

    def make(name, records):
        if request.param == "sqlite":
            shutil.copy(empty, tmp_path / name)
            made.append(Store(tmp_path / name))
        else:
            server = request.getfixturevalue("server")
            template = request.getfixturevalue("empty_database")
            made.append(PostgresStore(server.new_database(template)))
        made[-1].add_records(records)
        return made[-1]

    yield make
    for store in made:
        if request.param == "postgres":
            store._engine.dispose()
            request.getfixturevalue("server").drop(store.url)


def place(store):
    """What --db takes."""
    return store.path if isinstance(store, Store) else store.url.with_password


@pytest.fixture
def file_of(tmp_path):
    def make(name, records):
        write_text(tmp_path / name, jsonl.dump(records))
        return tmp_path / name

    return make


def digests(records):
    return {record_digest(record) for record in records}


def test_two_clusters_tune_apart_exchange_files_and_serve_the_same(tmp_path, store_of):
    ours, theirs = store_of("a.sqlite", A), store_of("b.sqlite", B)
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for store, file in zip((ours, theirs), files, strict=True):
        done = autoflash("db", "export", file, "--db", place(store))
        assert (done.code, done.err) == (0, "")
    for store, file in zip((theirs, ours), files, strict=True):
        done = autoflash("db", "import", file, "--db", place(store), "--json")
        assert (done.code, done.json["known"]) == (0, 0)
        again = autoflash("db", "import", file, "--db", place(store), "--json")
        assert (again.code, again.json["added"]) == (0, 0)
    assert digests(ours.records()) == digests(theirs.records()) == digests([*A, *B])
    # Host A took its 2.0 ms back: its word is 3.0 ms.
    for store in (ours, theirs):
        assert store.best(Bucket.of(PROBLEM), H200) == B[0]
    out = [autoflash("db", "export", "--db", place(store)).out for store in (ours, theirs)]
    assert out[0] == out[1] == jsonl.dump([*A, *B])


def test_export(tmp_path, store_of):
    h100 = record_of(target=named_target("h100"))
    store = store_of("a.sqlite", [*A, h100])
    done = autoflash("db", "export", "--db", place(store), "--target", "h100")
    assert (done.code, done.out) == (0, jsonl.dump([h100]))
    to = tmp_path / "out.jsonl"
    done = autoflash("db", "export", to, "--db", place(store), "--json")
    assert done.json["records"] == 4
    assert done.json["digest"] == jsonl.load(to).digest
    done = autoflash("db", "export", "--json", "--db", place(store))
    assert (done.code, "name a file" in done.told) == (2, True)
    done = autoflash("db", "export", "--db", tmp_path / "none.sqlite")
    assert (done.code, "none.sqlite: can't be read" in done.told) == (2, True)


def test_the_shipped_records_travel_whole(tmp_path):
    done = autoflash("db", "export", tmp_path / "s.jsonl", "--shipped")
    shipped = all_shipped_records()
    assert f"{len(shipped)} records" in done.out
    assert digests(jsonl.load(tmp_path / "s.jsonl").records) == digests(shipped)
    done = autoflash("db", "verify", tmp_path / "s.jsonl", "--json")
    assert (done.code, done.json[0]["faults"]) == (0, [])


def test_import_keeps_the_good_and_names_the_bad(tmp_path, store_of):
    store = store_of("a.sqlite", A)
    good = jsonl.dump(B).splitlines()[1:]
    path = tmp_path / "bad.jsonl"
    path.write_bytes(sealed([good[0], '{"kernel": "[red]{{ 7*7 }}\\u001b"}', good[1]]))
    done = autoflash("db", "import", path, "--db", place(store))
    assert done.code == 1
    assert f"{path}: line 3: record: field" in done.told
    assert "2 added, 0 known already" in done.out
    assert digests(store.records()) == digests([*A, *B])


def test_import_of_what_is_no_such_file_writes_nothing(tmp_path, store_of, file_of, empty):
    store = store_of("a.sqlite", A)
    for data in (b"", b"\0" * 100, empty.read_bytes()):
        (tmp_path / "odd").write_bytes(data)
        done = autoflash(
            "db", "import", file_of("b.jsonl", B), tmp_path / "odd", "--db", place(store)
        )
        assert (done.code, "odd: not an autoflash-exchange file" in done.told) == (2, True)
    assert len(store.records()) == len(A)


def test_a_changed_file_is_told_of_and_its_good_lines_kept(store_of, file_of):
    path = file_of("b.jsonl", B)
    path.write_text(path.read_text().replace('"median_ms":9.0', '"median_ms":0.1'))
    store = store_of("a.sqlite", A)
    done = autoflash("db", "import", path, "--db", place(store))
    assert done.code == 1
    assert "the digest in the header isn't that of the lines" in done.told
    assert "its digest isn't that of the record" in done.told
    assert digests(store.records()) == digests([*A, B[0]])


def test_merge_gives_the_same_file_in_any_order(tmp_path, file_of):
    a, b = file_of("a.jsonl", A), file_of("b.jsonl", B)
    done = autoflash("db", "merge", a, b, a, "--to", tmp_path / "ab.jsonl")
    assert (done.code, "ab.jsonl: 5 records" in done.out) == (0, True)
    done = autoflash("db", "merge", b, a, "--to", tmp_path / "ba.jsonl", "--json")
    assert (done.json["records"], len(done.json["files"])) == (5, 2)
    assert (tmp_path / "ab.jsonl").read_text() == (tmp_path / "ba.jsonl").read_text()


def test_merge_takes_databases_too(tmp_path, store_of, file_of):
    store, to = store_of("a.sqlite", A), tmp_path / "ab.jsonl"
    assert autoflash("db", "merge", place(store), file_of("b.jsonl", B), "--to", to).code == 0
    assert to.read_text() == jsonl.dump([*A, *B])


def test_export_tells_of_rows_that_cannot_be_read(store_of):
    store = store_of("a.sqlite", A)
    with store._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE records SET kernel = 'of tomorrow' WHERE id = 2")
    done = autoflash("db", "export", "--db", place(store))
    assert (done.code, done.out) == (1, jsonl.dump([A[0], A[2]]))
    assert "row 2: unknown kernel 'of tomorrow'" in done.told


def test_a_backup_lies_beside_the_store_and_no_password_is_shown(store_of):
    store = store_of("a.sqlite", A)
    done = autoflash("db", "prune", "--yes", "--db", place(store), "--json")
    assert (done.code, done.json["superseded"]) == (0, 1)
    assert jsonl.load(Path(done.json["backup"])).records == A[:1]
    near = store.path if isinstance(store, Store) else settings().db_path
    assert Path(done.json["backup"]).parent == near.parent
    for words in (["stats"], ["verify"], ["verify", "--json"], ["prune"]):
        done = autoflash("db", *words, "--db", place(store))
        assert done.code == 0
        assert squeezed(store.name) in squeezed(done.out)
        if isinstance(store, PostgresStore):
            assert urlsplit(store.url.with_password).password not in done.out + done.err


def test_diff_says_who_wins_and_why(store_of, file_of, tmp_path):
    store = store_of("a.sqlite", A)
    before = store.numbered_records()
    done = autoflash("db", "diff", file_of("b.jsonl", B), "--db", place(store), "--json")
    assert done.code == 1
    mine, alone = sorted(done.json, key=lambda d: d["theirs"] is None)
    assert (mine["wins"], mine["why"]) == ("theirs", "lower time")
    assert mine["stands"] == mine["theirs"] == record_digest(B[0])
    assert mine["ours"] == record_digest(A[1])
    assert (mine["only_ours"], mine["only_theirs"]) == (2, 2)
    assert (alone["wins"], alone["why"]) == ("ours", "known to one side alone")
    assert store.numbered_records() == before
    table = squeezed(autoflash("db", "diff", tmp_path / "b.jsonl", "--db", place(store)).out)
    assert "3.0000ms(host-a,2025-03-02)" in table
    assert "theirslowertime" in table


def test_diff_of_the_same_is_nothing(store_of, file_of):
    store = store_of("a.sqlite", A)
    done = autoflash("db", "diff", file_of("a.jsonl", A[::-1]), place(store))
    assert (done.code, "the same records on both sides" in done.out) == (0, True)


CASES = {
    "both": (A, A[1:], "the same record stands; the histories differ"),
    "theirs": (A[:1], A[1:2], "newer: its own origin's word of 2025-03-02"),
    "neither": (
        [record_of(ms=1.0), record_of(ms=3.0, origin="b")],
        [record_of(ms=4.0, day=2)],
        "newer: its own origin's word of 2025-03-02",
    ),
}


@pytest.mark.parametrize("wins", CASES)
def test_what_else_a_diff_may_say(wins, file_of):
    ours, theirs, reason = CASES[wins]
    done = autoflash("db", "diff", file_of("t", theirs), file_of("o", ours), "--json")
    assert (done.json[0]["wins"], done.json[0]["why"]) == (wins, reason)


def test_verify_names_rows_lines_and_configs_that_cannot_run(store_of, file_of, tmp_path):
    store = store_of("a.sqlite", A)
    assert autoflash("db", "verify", "--db", place(store)).code == 0
    with store._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE records SET median_ms = -1 WHERE id = 2")
    done = autoflash("db", "verify", place(store), file_of("b.jsonl", B), "--json")
    assert done.code == 1
    database, file = done.json
    assert (database["records"], database["refused"]) == (2, 1)
    assert database["refusals"][0].startswith("row 2: median_ms=-1")
    assert (file["clean"], file["digest"]) == (True, jsonl.load(tmp_path / "b.jsonl").digest)
    heavy = record_of(problem=problem_of(head_dim=256, head_dim_v=256), BLOCK_N=128)
    done = autoflash("db", "verify", file_of("h.jsonl", [heavy]))
    assert (done.code, "h.jsonl: flash_fwd, " in done.told) == (1, True)


def test_stats(store_of):
    store = store_of("a.sqlite", [*A, *B])
    found = autoflash("db", "stats", "--db", place(store), "--json").json
    assert (found["records"], found["standing"], found["superseded"]) == (5, 2, 2)
    assert (found["noisy"], found["origins"]) == (1, {"host-a": 3, "host-b": 2})
    assert (found["first"][:10], found["last"][:10]) == ("2025-03-01", "2025-03-09")
    assert "host-a: 3, host-b: 2" in autoflash("db", "stats", place(store)).out


def test_prune_deletes_only_what_can_never_stand_and_can_be_undone(tmp_path, store_of):
    taken_back, word, other = A
    store = store_of("a.sqlite", [*A, *B, word])
    before = store.records()
    done = autoflash("db", "prune", "--db", place(store))
    assert (done.code, "3 superseded; --yes deletes them" in done.out) == (0, True)
    assert store.records() == before
    backup = tmp_path / "gone.jsonl"
    done = autoflash("db", "prune", "--yes", "--backup", backup, "--db", place(store), "--json")
    assert done.json == {"superseded": 3, "deleted": True, "backup": str(backup)}
    assert sorted(map(record_digest, store.records())) == sorted(digests([word, other, B[0]]))
    assert store.best(Bucket.of(PROBLEM), H200) == B[0]
    assert digests(jsonl.load(backup).records) == digests([taken_back, B[1], word])
    assert autoflash("db", "prune", "--yes", "--db", place(store), "--json").json == {
        "superseded": 0, "deleted": True, "backup": None,
    }  # fmt: skip
    assert autoflash("db", "import", backup, "--db", place(store)).code == 0
    assert digests(store.records()) == digests(before)


def test_prune_without_a_backup_deletes_nothing(tmp_path, store_of, empty):
    store = store_of("a.sqlite", A)
    for backup in (tmp_path / "none" / "b.jsonl", empty):
        done = autoflash("db", "prune", "--yes", "--backup", backup, "--db", place(store))
        assert (done.code, "nothing was pruned" in done.told) == (2, True)
    assert digests(store.records()) == digests(A)


def test_prune_leaves_rows_that_cannot_be_read(store_of):
    store = store_of("a.sqlite", A)
    with store._engine.begin() as connection:
        connection.exec_driver_sql("UPDATE records SET kernel = 'of tomorrow' WHERE id = 2")
    done = autoflash("db", "prune", "--yes", "--db", place(store), "--json")
    assert done.json["superseded"] == 0
    with store._engine.begin() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM records").scalar() == 3


def test_signing(tmp_path, store_of, file_of):
    pytest.importorskip("cryptography")
    store, key, to = store_of("a.sqlite", A), tmp_path / "key", tmp_path / "signed.jsonl"
    made = autoflash("db", "keygen", key, "--json").json
    assert autoflash("db", "keygen", key).code == 2
    done = autoflash("db", "export", to, "--db", place(store), "--sign", key)
    assert f"signed by {made['fingerprint']}" in done.out
    wanted = ("--require-signed-by", made["public"])
    assert autoflash("db", "verify", to, *wanted, "--json").json[0]["verified"]
    assert "(not checked)" in autoflash("db", "verify", to).out
    for path, reason in (
        (file_of("b.jsonl", B), "refused: not signed"),
        (place(store), "a database is not signed"),
    ):
        done = autoflash("db", "verify", path, *wanted)
        assert (done.code, reason in done.told) == (2, True)
    other = store_of("other.sqlite", [])
    to.write_text(to.read_text().replace('"median_ms":2.0', '"median_ms":1.0'))
    done = autoflash("db", "import", to, *wanted, "--db", place(other))
    assert (done.code, "refused: changed since it was signed" in done.told) == (2, True)
    assert other.records() == []


def test_what_a_stranger_wrote_is_shown_as_text(store_of, file_of):
    text = "[red]{{7*7}}[/red]"
    base = record_of()
    record = replace(base, target=replace(base.target, name=text))
    record = replace(record, provenance=replace(record.provenance, origin=text))
    path = file_of("t.jsonl", [record])
    table = autoflash("db", "diff", path, place(store_of("a.sqlite", []))).out
    assert squeezed(table).count("[red]") == 2
    assert text in autoflash("db", "stats", path).out


@pytest.mark.skipif(os.name != "posix", reason="needs modes")
def test_a_world_writable_folder_is_told(tmp_path, file_of):
    path = file_of("b.jsonl", B)
    tmp_path.chmod(0o777)
    done = autoflash("db", "verify", path)
    assert (done.code, "world-writable" in done.told) == (0, True)
    assert json.loads(autoflash("db", "verify", path, "--json").out)[0]["warnings"]
