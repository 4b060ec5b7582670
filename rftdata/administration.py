"""Servers and accounts of buffers: the embedded server of a folder, who uses it, and the roles of a database."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row

from rftdata.postgres.database import queries, translated
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import grant_roles

__all__ = ["EmbeddedServer", "grant_roles", "open_sessions"]


def open_sessions(server: EmbeddedServer) -> list[dict[str, Any]]:
    """Open sessions of a server but the one that asks."""
    with (
        translated(server.uri),
        psycopg.connect(server.uri, row_factory=dict_row, application_name="rft db") as connection,
    ):
        return connection.execute(queries()["open_sessions"]).fetchall()
