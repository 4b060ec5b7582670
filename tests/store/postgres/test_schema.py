"""The schema: documented to the last column, made by the migrations alone, asked by queries that fit it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import psycopg
import pytest
from psycopg._queries import PostgresQuery
from psycopg.adapt import Transformer

import rftdata
from rftdata import Buffer
from rftdata.errors import BufferUnavailableError, ConflictError, SchemaVersionError
from rftdata.postgres.database import Database, queries, sql_folder
from rftdata.postgres.driver_errors import translated
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import migrate, schema_version
from rftdata.uri import redacted
from tests.support.waiting import PATIENCE_S

CATALOGUE = """
    SELECT 'relation' AS kind, c.relname::text AS name, pg_get_viewdef(c.oid) AS text
      FROM pg_class c WHERE c.relnamespace = 'rft'::regnamespace
    UNION ALL
    SELECT 'column', format('%s.%s', c.relname, a.attname), format('%s %s', format_type(atttypid, atttypmod), attnotnull)
      FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid WHERE c.relnamespace = 'rft'::regnamespace AND a.attnum > 0
    UNION ALL
    SELECT 'function', proname, pg_get_functiondef(oid) FROM pg_proc WHERE pronamespace = 'rft'::regnamespace
    UNION ALL
    SELECT 'constraint', conname, pg_get_constraintdef(oid) FROM pg_constraint WHERE connamespace = 'rft'::regnamespace
    UNION ALL
    SELECT 'trigger', tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
    UNION ALL
    SELECT 'enum', enumtypid::regtype::text, string_agg(enumlabel, ',' ORDER BY enumsortorder) FROM pg_enum GROUP BY enumtypid
    ORDER BY 1, 2, 3"""


def test_every_table_column_view_type_and_function_has_a_comment(buffer: Buffer) -> None:
    bare = buffer.sql("""
        SELECT relname::text AS name FROM pg_class
          WHERE relnamespace = 'rft'::regnamespace AND relkind IN ('r', 'v') AND obj_description(oid) IS NULL
        UNION ALL
        SELECT format('%s.%s', c.relname, a.attname) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
          WHERE c.relnamespace = 'rft'::regnamespace AND c.relkind = 'r' AND a.attnum > 0 AND NOT a.attisdropped
            AND col_description(c.oid, a.attnum) IS NULL
        UNION ALL
        SELECT proname FROM pg_proc WHERE pronamespace = 'rft'::regnamespace AND obj_description(oid) IS NULL
        UNION ALL
        SELECT typname FROM pg_type WHERE typnamespace = 'rft'::regnamespace AND typtype = 'e' AND obj_description(oid) IS NULL
        """)
    assert bare.num_rows == 0, bare.to_pylist()


def test_every_enum_value_is_explained_in_its_types_comment(buffer: Buffer) -> None:
    rows = buffer.sql(
        "SELECT t.typname::text AS type, e.enumlabel::text AS value, obj_description(t.oid) AS comment FROM pg_enum e"
        " JOIN pg_type t ON t.oid = e.enumtypid WHERE t.typname <> 'item_kind'"
    ).to_pylist()
    assert [f"{row['type']}.{row['value']}" for row in rows if row["value"] not in row["comment"]] == []


def test_no_row_is_attributed_to_an_empty_name(buffer: Buffer) -> None:
    tables = buffer.sql("""
        SELECT c.relname::text AS name,
               EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid AND k.contype = 'c' AND k.conkey = ARRAY[a.attnum]
                         AND position('<> '''':' in pg_get_constraintdef(k.oid)) > 0) AS is_checked
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
        WHERE c.relnamespace = 'rft'::regnamespace AND c.relkind = 'r' AND a.attname = 'author' AND a.attnotnull
        """).to_pylist()
    assert {table["name"] for table in tables} >= {"label", "preference_pair", "purge", "archive"}
    assert [table["name"] for table in tables if not table["is_checked"]] == []


def test_the_migrations_alone_make_the_schema_and_run_twice_without_a_trace(empty_uri: str, buffer: Buffer) -> None:
    database = Database(empty_uri)
    assert schema_version(database) is None
    head = migrate(database)
    with database.connection() as connection:
        first = connection.execute(CATALOGUE).fetchall()
    assert migrate(database) == head == schema_version(database)
    with database.connection() as connection:
        assert connection.execute(CATALOGUE).fetchall() == first
    assert buffer.sql(CATALOGUE).to_pylist() == first
    database.close()


def test_the_first_version_defines_everything_once() -> None:
    files = sorted((sql_folder() / "migrations" / "versions" / "0001_initial").glob("*.sql"))
    text = "\n".join(file.read_text() for file in files)
    made = re.findall(
        r"^CREATE (?:UNIQUE |CONSTRAINT )?(TABLE|TYPE|FUNCTION|VIEW|TRIGGER|INDEX) ([\w.]+)", text, re.MULTILINE
    )
    assert len(made) > 100 and len(set(made)) == len(made)
    altered = re.findall(r"^(?:CREATE OR REPLACE|DROP|ALTER) .*", text, re.MULTILINE)
    assert altered == [
        "ALTER TABLE rft.group_prompt",
        "ALTER TABLE rft.experience",
    ]  # storage of columns, which PostgreSQL 15 sets in no other way


def test_every_named_query_fits_the_schema(buffer: Buffer) -> None:
    """Parsed and analysed by the server: a renamed column or a removed table fails here."""
    unfit = {}
    with psycopg.connect(buffer.config.uri, autocommit=True) as connection:
        making = {name: text for name, text in queries().items() if re.search(r"^CREATE ", text, re.MULTILINE)}
        for text in making.values():
            connection.execute(text.replace("ON COMMIT DROP", ""))  # staging tables that others write to and read
        for name, text in queries().items():
            if name in making:
                continue
            converted = PostgresQuery(Transformer(connection))
            converted.convert(text, {key: _sample(key) for key in re.findall(r"%\((\w+)\)s", text)})
            result = connection.pgconn.prepare(name.encode(), converted.query, converted.types)
            if result.error_message and b"could not determine data type" not in result.error_message:
                unfit[name] = result.error_message.decode()
    assert unfit == {}


def _sample(key: str) -> object:
    """A value of the type that callers pass; None where the server can tell."""
    if key.endswith("_ids"):
        return [1]
    numbers = ("interval", "offset", "lease_s", "count", "limit", "num_groups")
    return 1 if key != "label_batch_id" and (key.endswith(("_id", "step")) or key in numbers) else None


def test_every_named_query_has_a_comment_that_states_what_it_answers() -> None:
    assert [name for name, text in queries().items() if not re.match(r"-- \S", text)] == []


def test_every_named_query_is_used_and_every_used_name_exists() -> None:
    root = Path(rftdata.__file__).parent.parent
    source = "\n".join(
        file.read_text() for package in ("rftdata", "rftcore", "operators") for file in (root / package).rglob("*.py")
    )
    used = {name for name in queries() if re.search(rf'["\']{name}["\']', source)}
    assert set(queries()) - used == set()


def test_a_database_of_a_newer_release_is_refused(empty_uri: str) -> None:
    database = Database(empty_uri)
    migrate(database)
    with database.connection() as connection:
        connection.execute("UPDATE rft.schema_version SET version_num = '9999'")
    with pytest.raises(SchemaVersionError, match=r"newer than this program.*9999.*upgrade rftdata"):
        migrate(database)
    database.close()


def test_two_that_migrate_at_once_both_succeed(empty_uri: str) -> None:
    databases = [Database(empty_uri) for _ in range(3)]
    versions: list[str] = []
    threads = [threading.Thread(target=lambda d=d: versions.append(migrate(d))) for d in databases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(versions) == 3 and len(set(versions)) == 1
    for database in databases:
        database.close()


def test_two_processes_may_open_a_new_folder_at_once(server_folders: Path) -> None:
    script = (
        "import sys, rftdata\n"
        "with rftdata.open(sys.argv[1]) as b: print(b.sql('SELECT count(*) AS n FROM rft.run')['n'].to_pylist())"
    )
    command = [sys.executable, "-c", script, str(server_folders / "new")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for process in processes:
            output, error = process.communicate(timeout=PATIENCE_S)
            assert (process.returncode, output.strip()) == (0, "[0]"), error
    finally:
        EmbeddedServer(server_folders / "new").stop()


@pytest.mark.parametrize(
    ("uri", "what"),
    [
        ("postgresql://missing:secret@127.0.0.1:1/rft", "cannot be used"),
        ("postgresql://missing@127.0.0.1:1/rft?password=secret", "cannot be used"),
        ("postgresql://missing:secret@127.0.0.1:port/rft", "buffer.uri"),
        ("postgresql://?nonsense=1&password=secret", "not a connection string"),
    ],
)
def test_a_database_that_cannot_be_reached_is_a_clear_error_without_the_password(
    tmp_path: Path, uri: str, what: str
) -> None:
    from rftdata.config import BufferConfig

    with pytest.raises(BufferUnavailableError, match=what) as refused:
        rftdata.open(BufferConfig(uri=uri, segments=str(tmp_path)))
    assert "secret" not in str(refused.value) and "secret" not in redacted(uri)


def test_wrong_credentials_are_reported_as_wrong(server: EmbeddedServer) -> None:
    uri = re.sub(r":[^:@]*@", ":wrong@", server.uri)
    with pytest.raises(BufferUnavailableError, match="password authentication failed"):
        Database(uri)


def test_a_deadlock_is_a_conflict_and_not_an_unreachable_database(buffer: Buffer) -> None:
    run = buffer.create_run(name="a", config={}, seed=1, steps=1, pipeline_version="p")
    other = buffer.create_run(name="b", config={}, seed=1, steps=1, pipeline_version="p")
    lock = "SELECT FROM rft.run WHERE run_id = %s FOR UPDATE"
    both_hold = threading.Barrier(2)
    conflicts: list[ConflictError] = []

    def cross(first: int, second: int) -> None:
        try:
            with buffer.database.transaction() as connection:
                connection.execute(lock, [first])
                both_hold.wait()
                connection.execute(lock, [second])
        except ConflictError as error:
            conflicts.append(error)

    ids = (run.run_id, other.run_id)
    threads = [threading.Thread(target=cross, args=order) for order in (ids, ids[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (conflict,) = conflicts
    assert "deadlock" in str(conflict) and "run it again" in str(conflict)


def test_the_pool_recovers_from_connections_that_died(buffer: Buffer) -> None:
    buffer.sql("SELECT 1")
    with psycopg.connect(buffer.config.uri, autocommit=True) as killer:
        killer.execute(
            "SELECT pg_terminate_backend(pid, 240000) FROM pg_stat_activity"  # and wait until they have ended
            " WHERE application_name = 'rft' AND datname = current_database()"
        )
    assert buffer.sql("SELECT 1 AS one")["one"].to_pylist() == [1]
    with pytest.raises(BufferUnavailableError), buffer.database.connection() as connection:
        connection.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    assert buffer.sql("SELECT 1 AS one")["one"].to_pylist() == [1]


def test_a_foreign_error_passes_unchanged(buffer: Buffer) -> None:
    with pytest.raises(ZeroDivisionError), translated(buffer.config.uri):
        raise ZeroDivisionError


def test_names_of_runs_are_numbered_even_when_many_start_at_once(buffer: Buffer) -> None:
    names: list[str] = []
    config = {"run": {"name": "sums (v1.5+)"}}

    def create() -> None:
        names.append(buffer.create_run(name="sums (v1.5+)", config=config, seed=1, steps=1, pipeline_version="p").name)

    threads = [threading.Thread(target=create) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(names) == ["sums (v1.5+)", *(f"sums (v1.5+)-{n}" for n in range(2, 6))]
    assert buffer.create_run(name="sums", config={}, seed=1, steps=1, pipeline_version="p").name == "sums"
    assert len(buffer.runs("sums (v1.5+)")) == 5
