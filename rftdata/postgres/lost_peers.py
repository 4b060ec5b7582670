"""Notice within a quarter of a minute that the other end of a database connection cannot be reached any more.

A network that drops packets reports nothing. With the system's defaults a client waits for an answer for a quarter of an hour, and an idle
one for two hours. The server keeps the session of a client that it cannot reach as long, with its locks, for which every other role
waits. So each side probes the other. The limits are shorter than leases (`explorer.lease_s`, `trainer.lease_s`) and than the time for which roles
tolerate a missing database (`retry.RIDE_OUT_S`).

A unix socket ends with its process; both sides ignore the settings there.
"""

from __future__ import annotations

from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

_IDLE_S, _INTERVAL_S, _COUNT = 5, 3, 3
# With this limit the kernel probes an idle connection, too, and does not count the probes.
LIMIT_S = 15

_CLIENT = {
    "keepalives_idle": _IDLE_S,
    "keepalives_interval": _INTERVAL_S,
    "keepalives_count": _COUNT,
    "tcp_user_timeout": 1000 * LIMIT_S,
}


def client_settings(uri: str) -> dict[str, Any]:
    """Return libpq's parameters for the client's end; those that the URL sets are left as they are.

    Raises:
        psycopg.ProgrammingError: it is not a URL of PostgreSQL.
    """
    return {key: value for key, value in _CLIENT.items() if key not in conninfo_to_dict(uri)}


def server_settings() -> dict[str, int]:
    """Return the parameters of the query `prepare_session`, for the server's end."""
    return {"idle": _IDLE_S, "interval": _INTERVAL_S, "count": _COUNT, "limit": 1000 * LIMIT_S}


def is_remote(connection: psycopg.Connection[Any]) -> bool:
    """Return whether a connection goes over TCP."""
    return not connection.info.host.startswith(("/", "@"))
