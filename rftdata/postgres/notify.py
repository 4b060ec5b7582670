"""Wake-ups: NOTIFY with a constant payload per topic, LISTEN on a dedicated connection, a slow poll as a fallback.

`notify` runs outside the durable transaction and at most once per piece of work, since NOTIFY serialises commits. A lost
notification costs one poll interval, never correctness, because every listener looks for work by state.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import psycopg

from rftdata.errors import BufferUnavailableError
from rftdata.postgres.database import Connection, Database, execute

PLANNED = "rft_planned"
SEALED = "rft_sealed"
READY = "rft_ready"
POLICY = "rft_policy"
RUN = "rft_run"
WEIGHTS = "rft_weights"
SHARED_DEVICE = "rft_shared_device"

POLL_S = 0.25


def notify(database: Database, *topics: str) -> None:
    """Wake all listeners of the topics.

    The work they are woken for is committed. If the database is unreachable now, they find it with their next poll.
    """
    with contextlib.suppress(BufferUnavailableError), database.connection() as connection:
        execute(connection, "notify", topics=list(topics))


class Listener:
    """Waits for topics; for use by one thread.

    Args:
        database: where to listen.
        topics: what wakes it.
        check: called before every wait; its exception ends the wait. A process that holds a claim passes a function that raises
            once the claim is lost (`Attempt.check`).
    """

    def __init__(self, database: Database, *topics: str, check: Callable[[], None] | None = None) -> None:
        self._database = database
        self._topics = topics
        self._check = check
        self._connection: Connection | None = None

    def wait(self, timeout_s: float = POLL_S) -> bool:
        """Wait for a notification of a topic; return False after `timeout_s`."""
        if self._check is not None:
            self._check()
        try:
            if self._connection is None:
                self._connection = self._database.dedicated()
                for topic in self._topics:
                    self._connection.execute(f"LISTEN {topic}")
                return True  # work notified before this LISTEN must be looked for
            woken = any(True for _ in self._connection.notifies(timeout=timeout_s, stop_after=1))
            if woken:
                # One wake-up for all that were notified meanwhile.
                for _ in self._connection.notifies(timeout=0):
                    pass
            return woken
        except (psycopg.OperationalError, BufferUnavailableError):
            # The server restarts or the connection broke: listen again after a poll interval.
            self.close()
            time.sleep(POLL_S)
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
