"""Locks across transactions, by name: a session holds them until the block or its process ends.

No transaction stays open meanwhile, which would keep old versions of rows from being removed. An account that may only read cannot take or
delay one: see `sql/migrations/versions/0001_initial/40_lock.sql`.
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

from rftdata.postgres.database import Connection, Database, fetch
from rftdata.postgres.driver_errors import translated

# A wait ends when the holder's session releases its key. Another session could keep the key, so the lock is tried again after this time.
_LOOK_AGAIN_S = 1.0


@contextlib.contextmanager
def holding(database: Database, *names: str, wait_s: float = 0.0) -> Iterator[str | None]:
    """Hold locks while the block runs, on one connection.

    Args:
        names: of several, in the order in which every process takes them.
        wait_s: longest wait for another holder of each.

    Yields:
        None if all are held; otherwise the other holder of one of them, and none is held.
    """
    with translated(database.uri), database.dedicated() as connection:
        keys: dict[str, int] = {}
        try:
            held_by = None
            for name in names:
                key = secrets.randbits(62)
                held_by = _hold(connection, name, key, wait_s)
                if held_by is not None:
                    _release(connection, keys)
                    break
                keys[name] = key
            yield held_by
        finally:
            _release(connection, keys)


def _release(connection: Connection, keys: dict[str, int]) -> None:
    """Release locks at once; the server releases those of a lost connection."""
    while keys and not connection.closed:
        name, key = keys.popitem()
        with contextlib.suppress(psycopg.OperationalError):
            fetch(connection, "release_lock", name=name, key=key)


def _hold(connection: Connection, name: str, key: int, wait_s: float) -> str | None:
    deadline = time.monotonic() + wait_s
    holder = f"{socket.gethostname()}, process {os.getpid()}"
    while True:
        attempt = fetch(connection, "hold_lock", name=name, holder=holder, key=key)[0]
        left = deadline - time.monotonic()
        if attempt["held_by"] is None or left <= 0:
            return None if attempt["held_by"] is None else str(attempt["held_by"])
        with contextlib.suppress(psycopg.errors.LockNotAvailable), connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {math.ceil(1000 * min(left, _LOOK_AGAIN_S))}")
            fetch(connection, "wait_for_holder", key=attempt["held_key"])
