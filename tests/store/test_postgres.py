"""What only a store on a server can show: its making, its plans, its refusals, its limits."""

import subprocess
import sys
import threading
import traceback

import alembic.autogenerate
import alembic.runtime.migration
import pytest
import sqlalchemy

from autoflash.errors import InvalidInputError, StoreError
from autoflash.settings import DatabaseUrl
from autoflash.store import postgres, schema
from autoflash.store.models import Base
from autoflash.store.opening import open_store, spool_path
from autoflash.store.postgres import PostgresStore
from autoflash.store.store import Store
from tests.store.support import TO_THE_FIRST_SCHEMA


def ask(url, statement):
    engine = sqlalchemy.create_engine(url.with_password, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        return connection.exec_driver_sql(statement).fetchall()


def name_of(url):
    return str(url).rpartition("/")[2]


def test_migrations_make_the_schema_of_the_models(bare_url, make):
    store = PostgresStore(bare_url)
    assert store.schema_version == schema.SCHEMA_VERSIONS[-1]
    with store._session("look") as session:
        context = alembic.runtime.migration.MigrationContext.configure(
            session.connection(),
            opts={"version_table": schema.VERSION_TABLE, "compare_type": True},
        )
        assert alembic.autogenerate.compare_metadata(context, Base.metadata) == []
    collations = ask(
        bare_url,
        "SELECT DISTINCT collation_name FROM information_schema.columns "
        "WHERE table_name IN ('records', 'trials') AND data_type = 'character varying'",
    )
    assert collations == [("C",)]


def test_a_database_of_the_first_schema_is_read_and_upgraded(url, make):
    old = make.trial(reason="of old")
    PostgresStore(url).add_trial(old)
    PostgresStore(url).add_record(make.record())
    with sqlalchemy.create_engine(url.with_password).begin() as connection:
        for statement in TO_THE_FIRST_SCHEMA:
            connection.exec_driver_sql(statement)
    reader = PostgresStore(url, read_only=True)
    assert reader.trials(make.bucket, make.h200) == [old]
    assert reader.best(make.bucket, make.h200) == make.record() == reader.records()[0]
    upgraded = PostgresStore(url)
    new = make.trial(came_from="tpe")
    upgraded.add_trial(new)
    assert upgraded.trials(make.bucket, make.h200) == [old, new]


def test_an_upgrade_that_fails_leaves_all_as_it_was(server, bare_url):
    server.execute("CREATE FUNCTION f() RETURNS event_trigger LANGUAGE plpgsql AS "
                   "$$ BEGIN RAISE 'no tables today'; END $$", name_of(bare_url))  # fmt: skip
    server.execute("CREATE EVENT TRIGGER t ON ddl_command_end WHEN TAG IN ('CREATE INDEX') "
                   "EXECUTE FUNCTION f()", name_of(bare_url))  # fmt: skip
    with pytest.raises(StoreError, match="could not upgrade it: no tables today"):
        PostgresStore(bare_url)
    assert ask(bare_url, "SELECT to_regclass('records')") == [(None,)]
    server.execute("DROP EVENT TRIGGER t", name_of(bare_url))
    assert PostgresStore(bare_url).records() == []


def test_reading_makes_nothing(bare_url):
    with pytest.raises(StoreError, match="holds no tables of ours; tuning something makes them"):
        PostgresStore(bare_url, read_only=True)
    assert ask(bare_url, "SELECT to_regclass('autoflash_schema')") == [(None,)]


def test_a_newer_schema_is_only_read(server, url, make, caplog):
    PostgresStore(url).add_record(make.record())
    server.execute(f"UPDATE {schema.VERSION_TABLE} SET version_num = '9999'", name_of(url))
    with pytest.raises(StoreError, match="has schema 9999, newer than our"):
        PostgresStore(url)
    assert PostgresStore(url, read_only=True).records() == [make.record()]
    assert "has schema 9999" in caplog.text


@pytest.mark.parametrize("read_only", [True, False])
def test_tables_of_something_else_are_left_alone(server, bare_url, read_only):
    server.execute("CREATE TABLE records (url text)", name_of(bare_url))
    with pytest.raises(StoreError, match="has tables of something else"):
        PostgresStore(bare_url, read_only=read_only)


@pytest.mark.parametrize("read_only", [True, False])
def test_a_view_in_place_of_a_table_is_refused(server, url, read_only):
    server.execute("ALTER TABLE records RENAME TO kept", name_of(url))
    server.execute("CREATE VIEW records AS SELECT * FROM kept", name_of(url))
    with pytest.raises(StoreError, match="can't be trusted"):
        PostgresStore(url, read_only=read_only)


def test_lookups_use_the_index(server, url, make):
    store = PostgresStore(url)
    store.add_records([make.record(day=day) for day in range(1, 21)])
    others = [make.record(problem=make.problem(head_dim=d, head_dim_v=d)) for d in range(8, 257, 8)]
    store.add_records(others * 20)
    store.add_trials([make.trial(problem=r.problem) for r in others] * 20)
    server.execute("ANALYZE", name_of(url))
    plans = []

    @sqlalchemy.event.listens_for(store._engine, "before_cursor_execute")
    def explain(connection, cursor, statement, parameters, *_):
        if "FROM records" in statement or "FROM trials" in statement:
            cursor.execute(f"EXPLAIN {statement}", parameters)
            plans.append("\n".join(row[0] for row in cursor.fetchall()))

    for lookup in (store.best, store.neighbours, store.siblings, store.trials):
        lookup(make.bucket, make.h200)
    # The row that serves is read by its id.
    indexes = ["ix_records_key", "records_pkey", "ix_records_key", "ix_records_key"]
    assert len(plans) == 5
    for index, plan in zip([*indexes, "ix_trials_key"], plans, strict=True):
        assert index in plan, plan
        assert "Seq Scan" not in plan


def test_sessions_have_limits(url):
    def shown(store):
        names = ("statement_timeout", "lock_timeout", "default_transaction_read_only")
        with store._session("look") as session:
            connection = session.connection()
            return [connection.exec_driver_sql(f"SHOW {name}").scalar() for name in names]

    assert shown(PostgresStore(url)) == ["30s", "30s", "off"]
    assert shown(PostgresStore(url, read_only=True, timeout_s=2)) == ["2s", "2s", "on"]


def test_a_lock_of_another_is_a_store_error(url, make):
    store = PostgresStore(url, timeout_s=0.3)
    with sqlalchemy.create_engine(url.with_password).begin() as connection:
        connection.exec_driver_sql("LOCK TABLE records")
        with pytest.raises(StoreError, match=r"could not store records: .*timeout; .*try again"):
            store.add_record(make.record())
    store.add_record(make.record())


def test_a_connection_that_the_server_ended_is_opened_anew(server, url, make):
    store = PostgresStore(url)
    store.add_record(make.record())
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        f"WHERE datname = '{name_of(url)}' AND pid <> pg_backend_pid()"
    )
    assert store.records() == [make.record()]


def test_threads_leave_one_connection(server, url, make):
    store = PostgresStore(url)
    threads = [threading.Thread(target=store.records) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    count = f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{name_of(url)}'"
    # Those that count close for themselves.
    assert ask(url, count)[0][0] <= 3


@pytest.mark.parametrize(
    ("change", "step"),
    [
        (("admin:", "admin:wr"), "check the user and the password"),
        (("admin:", "n0b0dy:"), "check the user and the password"),
        (("/tests_", "/no_such_"), "create the database"),
    ],
)
def test_what_is_wrong_is_said_without_the_password(server, url, change, step):
    wrong = DatabaseUrl(url.with_password.replace(*change))
    with pytest.raises(StoreError, match=step) as caught:
        open_store(wrong)
    assert server.password not in "".join(traceback.format_exception(caught.value))


def test_a_password_in_the_query_is_not_shown_either(server, url):
    text = f"postgresql://127.0.0.1:1/db?user=me&password={server.password}"
    with pytest.raises(StoreError) as caught:
        open_store(text, read_only=True)
    assert server.password not in "".join(traceback.format_exception(caught.value))
    assert str(caught.value).startswith("postgresql+psycopg://127.0.0.1:1/db: ")


def test_without_psycopg_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(StoreError, match=r"pip install 'autoflash\[postgres\]'"):
        open_store("postgresql://host/db", read_only=True)


def test_a_path_a_text_and_a_url_are_told_apart(tmp_path, url):
    assert isinstance(open_store(tmp_path / "a.sqlite"), Store)
    assert isinstance(open_store(str(tmp_path / "a.sqlite"), read_only=True), Store)
    assert isinstance(open_store(url.with_password, read_only=True), PostgresStore)
    with pytest.raises(InvalidInputError, match="scheme 'mysql'"):
        open_store("mysql://host/db")


def test_a_spool_is_of_one_database_whatever_the_password():
    def spool(text):
        return spool_path(DatabaseUrl.parse(text)).name

    base = "postgresql://me:one@host/db?host=/run/a&sslpassword=x"
    assert spool(base) == spool(base.replace("one", "two").replace("=x", "=y"))
    for change in (("me:", "you:"), ("@host", "@other"), ("/db?", "/dc?"), ("run/a", "run/b")):
        assert spool(base) != spool(base.replace(*change)), change


def test_psycopg_is_loaded_for_a_server_alone(tmp_path):
    code = (
        "import sys\n"
        "from autoflash.store.opening import open_store\n"
        "open_store(sys.argv[1]).records()\n"
        "assert not {'psycopg', 'autoflash.store.postgres'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "a.sqlite"], check=True)
    assert postgres.TIMEOUT_S == 30
