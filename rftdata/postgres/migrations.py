"""The schema's version, the migrations, and the rights of its roles.

Alembic runs the scripts of `sql/migrations`, whose DDL is in plain SQL files beside them. All migrations run in one transaction,
so a database has either the old schema or the new one.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import psycopg
import psycopg.errors

from rftdata.errors import SchemaVersionError
from rftdata.postgres.database import Database, sql_folder
from rftdata.postgres.driver_errors import translated

_MIGRATING = threading.Lock()
_COMMENT = (
    "The experience database: what was sampled, what people and pipelines decided about it, and what was trained on it."
)


def run_folder(bind: Any, migration: str) -> None:
    """Run the DDL of a migration: the files in the folder named like its script, in the order of their names.

    Args:
        bind: the connection on which Alembic runs the migration.
        migration: path of the script.
    """
    for file in sorted(Path(migration).with_suffix("").glob("*.sql")):
        # The driver itself, because SQLAlchemy would pass parameters, and psycopg then reads % as a placeholder.
        bind.connection.driver_connection.execute(file.read_text(encoding="utf-8"))


def newest_version() -> str:
    """Return the schema version of this program.

    Revisions are numbered, so this needs no import of Alembic, which would cost every command a second.
    """
    versions = sql_folder() / "migrations" / "versions"
    return max(file.name.partition("_")[0] for file in versions.glob("[0-9]*.py"))


def check_schema(version: str | None, location: str) -> None:
    """Refuse a schema of another release.

    Raises:
        SchemaVersionError: with the way to upgrade.
    """
    newest = newest_version()
    if version is not None and version < newest:
        raise SchemaVersionError(
            f"the schema of the buffer {location} is older than this program, and commands that only read do not change it",
            value=version,
            allowed=newest,
            todo=f"end the processes of the earlier release, then run `rft db migrate --buffer {location}` (`rft db backup` first)",
        )
    if version != newest:
        raise _newer(version)


def _newer(version: str | None) -> SchemaVersionError:
    return SchemaVersionError(
        "the database's schema is newer than this program",
        value=version,
        allowed=f"up to {newest_version()}",
        todo="upgrade rftdata",
    )


def migrate(database: Database) -> str:
    """Migrate the schema to the newest version; return that version. Concurrent callers wait for each other.

    Raises:
        SchemaVersionError: the database was migrated by a newer release.
    """
    head = newest_version()
    if schema_version(database) == head:
        return head
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError
    from sqlalchemy import create_engine
    from sqlalchemy.exc import IntegrityError, ProgrammingError

    config = Config()
    config.set_main_option("script_location", str(sql_folder() / "migrations"))
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(database.uri))

    def upgrade() -> None:
        # Alembic keeps state in globals, so threads of this process take turns, whatever their databases.
        with _MIGRATING, translated(database.uri), engine.begin() as connection:
            connection.exec_driver_sql("CREATE SCHEMA IF NOT EXISTS rft")
            # Two processes may open a new buffer at once. Only the owner may comment on a schema, and whoever does locks it until the end
            # of the transaction.
            connection.exec_driver_sql(f"COMMENT ON SCHEMA rft IS '{_COMMENT}'")
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
            connection.exec_driver_sql("SELECT rft.grant_roles()")  # for tables newer than the roles

    try:
        try:
            upgrade()
        except IntegrityError as error:
            if not isinstance(error.orig, psycopg.errors.UniqueViolation):
                raise
            upgrade()  # another process has created the schema meanwhile
    except ProgrammingError as error:
        if not isinstance(error.orig, psycopg.errors.InsufficientPrivilege):
            raise
        raise SchemaVersionError(
            f"the schema must be migrated to version {head}, for which this account has no rights",
            value=schema_version(database),
            todo="let the schema's owner run `rft db migrate`",
        ) from error
    except CommandError as error:
        raise _newer(schema_version(database)) from error
    finally:
        engine.dispose()
    return head


def schema_version(database: Database) -> str | None:
    """Return the revision of the schema; None for a database without one."""
    with database.connection() as connection:
        table = connection.execute("SELECT to_regclass('rft.schema_version') AS t").fetchone()
        if table is None or table["t"] is None:
            return None
        row = connection.execute("SELECT version_num FROM rft.schema_version").fetchone()
        return None if row is None else str(row["version_num"])
