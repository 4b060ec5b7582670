"""From the first version of the schema to the next: every row is kept, and the schema is that of a new buffer.

The next version, after those of this program, is `next_version/`, for tests alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from rftdata.errors import SchemaVersionError
from rftdata.postgres.database import Database, sql_folder
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import check_schema, migrate, schema_version
from tests.store.conftest import CURRENT
from tests.store.postgres.test_schema import CATALOGUE

FIRST = "0001"
RENAMED = {"device_turn": "shared_device"}
# Values that a column's checks demand; any other column gets one by its type.
DEMANDED = {
    "aged_out": False,
    "method": "memory",
    "purpose": "test",
    "decoding": "greedy",
    "taskset": "t",
    "rejected_id": 2,
    "path": "experience/run=a/0a-1-1.parquet",
    "formula": "priority",
}
BY_TYPE: dict[str, Any] = {
    "bigint": 1,
    "integer": 1,
    "text": "ünï",
    "jsonb": '{"a": [1, null]}',
    "double precision": 0.5,
    "boolean": True,
    "smallint": 1,
    "bytea": b"\x01\xff",
    "real[]": [0.5],
    "text[]": ["ünï"],
    "integer[]": [7],
    "bigint[]": [8],
    "timestamp with time zone": "2026-01-31 12:00+00",
    "uuid": "0c2ad1b5-7d3f-4f7e-9d5e-3a1a4b0b7f11",
    "rft.file_name": "a.arrows",
}
RIGHTS = """
    SELECT c.relname::text AS name, coalesce(c.relacl::text, '') AS rights, obj_description(c.oid) AS comment FROM pg_class c
      WHERE c.relnamespace = 'rft'::regnamespace
    UNION ALL
    SELECT c.relname || '.' || a.attname, coalesce(a.attacl::text, ''), col_description(c.oid, a.attnum)
      FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
      WHERE c.relnamespace = 'rft'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
    UNION ALL
    SELECT p.proname, coalesce(p.proacl::text, '') || p.prosecdef || coalesce(p.proconfig::text, ''), obj_description(p.oid)
      FROM pg_proc p WHERE p.pronamespace = 'rft'::regnamespace
    ORDER BY 1"""


@pytest.fixture
def old(server: EmbeddedServer, request: pytest.FixtureRequest) -> Database:
    """A database of the first version with a row in every table."""
    name = f"old_{abs(hash(request.node.nodeid)):x}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    database = Database(server.uri.replace("/rft?", f"/{name}?"))
    upgrade_to(database, FIRST)
    with database.connection() as connection:
        for table in _tables(connection):
            if connection.execute(sql.SQL("SELECT FROM rft.{}").format(sql.Identifier(table))).rowcount == 0:
                for _ in range(2 if table == "experience" else 1):  # a pair takes two
                    _insert_a_row(connection, table)
    return database


def upgrade_to(database: Database, revision: str) -> None:
    from alembic import command
    from alembic.config import Config
    from sqlalchemy import create_engine

    config = Config()
    config.set_main_option("script_location", str(sql_folder() / "migrations"))
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database.uri))
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE SCHEMA IF NOT EXISTS rft")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)
    engine.dispose()


def _tables(connection: Any) -> list[str]:
    """Every table but Alembic's, those to which others refer first."""
    rows = connection.execute(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
        " AND relname <> 'schema_version'"
        " ORDER BY array_position(ARRAY['run', 'run_attempt', 'policy_version', 'worker', 'weight_transfer', 'purge'], relname::text), 1"
    )
    return [row["t"] for row in rows]


def _insert_a_row(connection: Any, table: str) -> None:
    columns = connection.execute(
        "SELECT a.attname::text AS name, format_type(a.atttypid, NULL) AS type, t.typtype = 'e' AS is_enum,"
        " (SELECT min(enumlabel::text) FROM pg_enum WHERE enumtypid = a.atttypid) AS label"
        " FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
        " WHERE a.attrelid = to_regclass('rft.' || quote_ident(%s)) AND a.attnum > 0 AND a.attidentity = '' AND a.attgenerated = ''",
        [table],
    ).fetchall()
    values = {
        column["name"]: DEMANDED.get(
            column["name"], column["label"] if column["is_enum"] else BY_TYPE.get(column["type"])
        )
        for column in columns
    }
    unknown = [column for column in columns if values[column["name"]] is None]
    assert unknown == [], table
    if table == "run_attempt":
        values["parent_attempt_id"] = None
    if table == "archive":
        values["status"] = "writing"  # the rows of an archived run do not change
    names = sql.SQL(", ").join(map(sql.Identifier, values))
    places = sql.SQL(", ").join(sql.Placeholder() * len(values))
    connection.execute(
        sql.SQL("INSERT INTO rft.{} ({}) VALUES ({})").format(sql.Identifier(table), names, places),
        list(values.values()),
    )


def _rows(connection: Any) -> dict[str, list[dict[str, Any]]]:
    return {
        table: connection.execute(sql.SQL("SELECT * FROM rft.{} ORDER BY 1").format(sql.Identifier(table))).fetchall()
        for table in _tables(connection)
    }


def test_an_upgrade_of_a_filled_buffer_keeps_every_row_and_makes_the_next_schema(
    old: Database, empty_uri: str, next_version: str
) -> None:
    with old.connection() as connection:
        before = _rows(connection)
    assert schema_version(old) == FIRST and all(before.values())
    new = Database(empty_uri)
    assert migrate(old) == migrate(new) == schema_version(old) == schema_version(new) == next_version != FIRST
    with old.connection() as connection, new.connection() as other:
        after = _rows(connection)
        assert connection.execute(CATALOGUE).fetchall() == other.execute(CATALOGUE).fetchall()
        assert connection.execute(RIGHTS).fetchall() == other.execute(RIGHTS).fetchall()
    for table, rows in before.items():
        table = RENAMED.get(table, table)
        kept = [{name: row[name] for name in rows[0]} for row in after[table]]
        assert kept == rows, table
    new.close()
    old.close()


def test_an_upgrade_fills_what_it_adds_from_what_is_there_and_grants_it(old: Database, next_version: str) -> None:
    with old.connection() as connection:
        connection.execute("INSERT INTO rft.worker (run_id, role, host, pid) VALUES (1, 'explorer', 'h', 2)")
    assert migrate(old) == next_version
    with old.connection() as connection:
        peers = connection.execute("SELECT num_peers AS n FROM rft.worker ORDER BY worker_id").fetchall()
        words = connection.execute("SELECT task_id, num_letters FROM rft.task_word").fetchall()
        rights = connection.execute(
            "SELECT has_table_privilege('rft_reader', 'rft.task_word', 'SELECT') AS read,"
            " has_table_privilege('rft_worker', 'rft.task_word', 'INSERT') AS write"
        ).fetchall()
        old_segments = connection.execute("SELECT turn_rewards_from AS n FROM rft.buffer").fetchall()
        connection.execute("INSERT INTO rft.worker (run_id, role, host, pid) VALUES (1, 'tester', 'h', 3)")
    assert old_segments == [{"n": 2}]  # the segment 1 may have rewards of turns
    assert peers == [{"n": 2}, {"n": 2}]
    assert words == [{"task_id": 1, "num_letters": 3}]
    assert rights == [{"read": True, "write": False}]  # rft.worker_rights lists what a worker writes
    old.close()


def test_an_upgrade_knows_what_answered_a_review_and_which_reviews_wait(old: Database, next_version: str) -> None:
    review = (
        "INSERT INTO rft.review (experience_id, group_id, run_id, name, question, otherwise, asked_at, deadline, answer, answer_id, author,"
        " session_user_name, answered_at) VALUES (1, 1, 1, %s, '?', 'drop', now() - interval '2 h', now() + %s::interval, %s, 99, 'ada', 'ada', %s)"
    )
    label = (
        "INSERT INTO rft.label (experience_id, new_value, author, session_user_name, label_batch_id, labelled_at)"
        " VALUES (1, 1, 'ada', 'ada', 1, now() - %s::interval) RETURNING label_id"
    )
    with old.transaction() as connection:
        connection.execute("SET LOCAL session_replication_role = replica")
        (answered_by,) = connection.execute(label, ["1 s"]).fetchall()
        connection.execute(label, ["1 h"])  # a restored backup has the rows of all transactions in one
        for name, until, answer in (("told", "1 h", "pass"), ("late", "-1 h", None), ("open", "1 h", None)):
            connection.execute(review, [name, until, answer, "now" if answer else None])
        connection.execute("UPDATE rft.experience SET reward = 1e39, reward_sampled = 1e39 WHERE experience_id = 2")
        connection.execute("UPDATE rft.archive SET status = 'archived'")
    assert migrate(old) == next_version
    with old.transaction() as connection:
        told = connection.execute("SELECT reward_label_id AS id FROM rft.review WHERE name = 'told'").fetchall()
        asked = connection.execute("SELECT name FROM rft.question JOIN rft.review USING (review_id)").fetchall()
        # A reward of before refuses no purge.
        connection.execute("UPDATE rft.archive SET status = 'restored'")
        connection.execute("SET LOCAL rft.purge = '1'")
        connection.execute("UPDATE rft.experience SET response = '[purged]' WHERE experience_id = 2")
        with pytest.raises(psycopg.errors.CheckViolation, match="the reward of experience 2 is as great"):
            connection.execute("UPDATE rft.experience SET reward = 2e39 WHERE experience_id = 2")
    assert told == [{"id": answered_by["label_id"]}] and asked == [{"name": "open"}]
    old.close()


def test_an_upgrade_that_fails_changes_nothing(old: Database, next_version: str) -> None:
    with old.connection() as connection:
        connection.execute("CREATE TABLE rft.task_word (mine text)")  # as the last file of the version would
        before = connection.execute(CATALOGUE).fetchall()
    with pytest.raises(psycopg.errors.DuplicateTable, match="task_word"):
        migrate(old)
    assert schema_version(old) == FIRST
    with old.connection() as connection:
        assert connection.execute(CATALOGUE).fetchall() == before
        connection.execute("DROP TABLE rft.task_word")
    assert migrate(old) == next_version
    old.close()


def test_a_program_of_before_refuses_the_next_schema(
    old: Database, next_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert migrate(old) == next_version
    monkeypatch.undo()  # the program of this version again
    for refused in (lambda: migrate(old), lambda: check_schema(schema_version(old), "b")):
        with pytest.raises(SchemaVersionError, match=rf"newer than this program.*{next_version}.*up to {CURRENT}"):
            refused()
    assert schema_version(old) == next_version
    old.close()


def test_an_upgraded_buffer_works(old: Database, tmp_path: Path, next_version: str) -> None:
    import rftdata
    from rftdata import labels
    from rftdata.config import BufferConfig
    from tests.support.store_roles import Roles

    uri = old.uri
    old.close()
    with rftdata.open(BufferConfig(uri=uri, segments=str(tmp_path / "segments"), min_free_bytes=0)) as opened:
        assert schema_version(opened.database) == next_version
        labels.set_rewards(opened, {1: 0.25}, author="ada")
        roles = Roles(opened, steps=1)
        with roles.attempt() as attempt:
            roles.work()
            assert len(roles.train(attempt, 1)) == 2
