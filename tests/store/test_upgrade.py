"""From the first release to this one: every row is kept, and the schema is that of a new buffer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from rftdata import Buffer
from rftdata.postgres.database import Database, migrate, schema_version, sql_folder
from rftdata.postgres.embedded import EmbeddedServer
from tests.store.test_schema import CATALOGUE

FIRST = "0001"
# Values that a column's checks demand; any other column gets one by its type.
DEMANDED = {"field": "reward", "method": "memory", "purpose": "test", "decoding": "greedy", "taskset": "t"}
BY_TYPE: dict[str, Any] = {
    "bigint": 1, "integer": 1, "text": "ünï", "jsonb": '{"a": [1, null]}', "double precision": 0.5, "boolean": True,
    "timestamp with time zone": "2026-01-31 12:00+00", "uuid": "0c2ad1b5-7d3f-4f7e-9d5e-3a1a4b0b7f11",
}  # fmt: skip
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
    """A database of the first release with a row in every table."""
    name = f"old_{abs(hash(request.node.nodeid)):x}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    database = Database(server.uri.replace("/rft?", f"/{name}?"))
    upgrade_to(database, FIRST)
    with database.connection() as connection:
        for table in _tables(connection):
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
    """Every table but Alembic's, runs before what refers to them."""
    rows = connection.execute(
        "SELECT relname::text AS t FROM pg_class WHERE relnamespace = 'rft'::regnamespace AND relkind = 'r'"
        " AND relname <> 'schema_version' ORDER BY relname <> 'run', relname <> 'run_attempt', 1"
    )
    return [row["t"] for row in rows]


def _insert_a_row(connection: Any, table: str) -> None:
    columns = connection.execute(
        "SELECT a.attname::text AS name, format_type(a.atttypid, NULL) AS type, t.typtype = 'e' AS is_enum,"
        " (SELECT min(enumlabel::text) FROM pg_enum WHERE enumtypid = a.atttypid) AS label"
        " FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid"
        " WHERE a.attrelid = to_regclass('rft.' || quote_ident(%s)) AND a.attnum > 0 AND a.attidentity = ''",
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
    if table == "attempt_history":
        values["history_id"] = values["attempt_id"] = 99  # the trigger has written that of attempt 1
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


def test_an_upgrade_of_a_filled_buffer_keeps_every_row_and_makes_todays_schema(old: Database, buffer: Buffer) -> None:
    with old.connection() as connection:
        before = _rows(connection)
    assert schema_version(old) == FIRST and all(before.values())
    head = migrate(old)
    assert head == schema_version(old) == schema_version(buffer.database) != FIRST
    with old.connection() as connection:
        after = _rows(connection)
        assert connection.execute(CATALOGUE).fetchall() == buffer.sql(CATALOGUE).to_pylist()
        assert connection.execute(RIGHTS).fetchall() == buffer.sql(RIGHTS).to_pylist()
    for table, rows in before.items():
        kept = [{name: row[name] for name in rows[0]} for row in after[table]]
        assert kept == rows, table
    old.close()


def test_an_upgraded_buffer_works(old: Database, tmp_path: Path) -> None:
    import rftdata
    from rftdata import labels
    from rftdata.config import BufferConfig
    from tests.store_roles import Roles

    uri = old.uri
    old.close()
    with rftdata.open(BufferConfig(uri=uri, segments=str(tmp_path / "segments"), min_free_bytes=0)) as opened:
        labels.set_rewards(opened, {1: 0.25}, author="ada")
        roles = Roles(opened, steps=1)
        with roles.attempt() as attempt:
            roles.work()
            assert len(roles.train(attempt, 1)) == 2


def test_features_that_a_person_set_are_told_from_what_a_pipeline_gave(server: EmbeddedServer) -> None:
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute("CREATE DATABASE before_manual_features")
    database = Database(server.uri.replace("/rft?", "/before_manual_features?"))
    upgrade_to(database, "0011")
    with database.connection() as opened:
        opened.execute(
            "INSERT INTO rft.task (taskset, task_key, payload, features, source_features, task_verdict_id) VALUES"
            """ ('t', '1', '{}', '{"n": 1, "q": 0.5, "level": 3}', '{"n": 1}', 1), ('t', '2', '{}', '{"n": 1}', NULL, NULL)"""
        )
        opened.execute(
            "INSERT INTO rft.task_verdict (task_verdict_id, task_id, pipeline_version, kept, features)"
            " VALUES (1, 1, 'v', true, '{\"q\": 0.5}')"
        )
    migrate(database)
    with database.connection() as opened:
        rows = opened.execute("SELECT manual_features AS m FROM rft.task ORDER BY task_id").fetchall()
    assert [row["m"] for row in rows] == [{"level": 3}, {}]
    database.close()
