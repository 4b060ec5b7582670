"""Alembic's environment: online only, on the connection from rftdata.postgres.migrations."""

from __future__ import annotations

from alembic import context

connection = context.config.attributes["connection"]
context.configure(
    connection=connection, target_metadata=None, version_table="schema_version", version_table_schema="rft"
)
with context.begin_transaction():
    context.run_migrations()
