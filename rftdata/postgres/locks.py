"""Locks across transactions: a session holds them until the block or its process ends.

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
from dataclasses import asdict, dataclass

import psycopg
import psycopg.errors

from rftdata.postgres.database import Connection, Database, fetch
from rftdata.postgres.driver_errors import translated

# A wait ends when the holder's session releases its key. Another session could keep the key, so the lock is tried again after this time.
_LOOK_AGAIN_S = 1.0


@dataclass(frozen=True)
class Lock:
    """What only one process does at a time.

    Attributes:
        name: what is done.
        run_id: the run for which it is done; 0 for the whole buffer.
        object: the taskset or pipeline version for which it is done; empty for all of the run or the buffer.
    """

    name: str
    run_id: int = 0
    object: str = ""


@contextlib.contextmanager
def holding(database: Database, *locks: Lock, wait_s: float = 0.0) -> Iterator[str | None]:
    """Hold locks while the block runs, on one connection.

    Args:
        locks: of several, in the order in which every process takes them.
        wait_s: longest wait for another holder of each.

    Yields:
        None if all are held; otherwise the other holder of one of them, and none is held.
    """
    with translated(database.uri), database.dedicated() as connection:
        keys: dict[Lock, int] = {}
        try:
            held_by = None
            for lock in locks:
                key = secrets.randbits(62)
                held_by = _hold(connection, lock, key, wait_s)
                if held_by is not None:
                    _release(connection, keys)
                    break
                keys[lock] = key
            yield held_by
        finally:
            _release(connection, keys)


def _release(connection: Connection, keys: dict[Lock, int]) -> None:
    """Release locks at once; the server releases those of a lost connection."""
    while keys and not connection.closed:
        lock, key = keys.popitem()
        with contextlib.suppress(psycopg.OperationalError):
            fetch(connection, "release_lock", **asdict(lock), key=key)


def _hold(connection: Connection, lock: Lock, key: int, wait_s: float) -> str | None:
    deadline = time.monotonic() + wait_s
    holder = f"{socket.gethostname()}, process {os.getpid()}"
    while True:
        attempt = fetch(connection, "hold_lock", **asdict(lock), holder=holder, key=key)[0]
        left = deadline - time.monotonic()
        if attempt["held_by"] is None or left <= 0:
            return None if attempt["held_by"] is None else str(attempt["held_by"])
        with contextlib.suppress(psycopg.errors.LockNotAvailable), connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {math.ceil(1000 * min(left, _LOOK_AGAIN_S))}")
            fetch(connection, "wait_for_holder", key=attempt["held_key"])
