"""Locks across transactions, by name: held by a session until the block ends, however its process ends.

Nothing of it is an open transaction, which would keep old versions of rows from being removed. An account that may only read cannot take or
delay one: see `sql/migrations/versions/0001_initial/34_lock.sql`.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import socket
import time
from collections.abc import Iterator

import psycopg
import psycopg.errors

from rftdata.postgres.database import Connection, Database, fetch, translated

# Waiting ends when the holder's session releases its key; another session could keep it, so the lock is looked at again after this.
_LOOK_AGAIN_S = 1.0


@contextlib.contextmanager
def holding(database: Database, name: str, *, wait_s: float = 0.0) -> Iterator[str | None]:
    """Hold a lock while the block runs.

    Args:
        wait_s: longest wait for another holder.

    Yields:
        None if it is held; otherwise who holds it instead.
    """
    key = secrets.randbits(62)
    with translated(database.uri), database.dedicated() as connection:
        held_by = _hold(connection, name, key, wait_s)
        try:
            yield held_by
        finally:
            if held_by is None and not connection.closed:  # the server releases it when the connection is lost
                with contextlib.suppress(psycopg.OperationalError):
                    fetch(connection, "release_lock", name=name, key=key)


def _hold(connection: Connection, name: str, key: int, wait_s: float) -> str | None:
    deadline = time.monotonic() + wait_s
    holder = f"{socket.gethostname()}, process {os.getpid()}"
    while True:
        found = fetch(connection, "hold_lock", name=name, holder=holder, key=key)[0]
        left = deadline - time.monotonic()
        if found["held_by"] is None or left <= 0:
            return None if found["held_by"] is None else str(found["held_by"])
        with contextlib.suppress(psycopg.errors.LockNotAvailable), connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {math.ceil(1000 * min(left, _LOOK_AGAIN_S))}")
            fetch(connection, "wait_for_holder", key=found["held_key"])
