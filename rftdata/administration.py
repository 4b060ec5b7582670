"""Administration of buffers' databases: the embedded server of a folder, its sessions, and the roles of a database."""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.rows import dict_row

from rftdata.postgres.database import queries
from rftdata.postgres.driver_errors import translated
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import grant_roles

__all__ = ["EmbeddedServer", "grant_roles", "open_sessions"]


def open_sessions(server: EmbeddedServer) -> list[dict[str, Any]]:
    """Return the open sessions of a server except this one."""
    with (
        translated(server.uri),
        psycopg.connect(server.uri, row_factory=dict_row, application_name="rft db") as connection,
    ):
        return connection.execute(queries()["open_sessions"]).fetchall()
