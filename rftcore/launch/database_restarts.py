"""Restarts of the embedded database of a run.

Roles wait for a database that was killed (`rftdata.postgres.retry`). It is started again up to `MAX_RESTARTS` times. A database that a person stopped
is not started again: the run ends if it stays away.
"""

from __future__ import annotations

import time

from rftcore.launch.terminal.views import View
from rftcore.run.commands import resume_command
from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError, RftError
from rftdata.run import Run

MAX_RESTARTS = 10
_AWAY_S = 10.0


class DatabaseRestarts:
    """Starts the embedded database again when it was killed.

    Raises:
        BufferUnavailableError: the database was stopped, or was killed too often.
    """

    def __init__(self, buffer: Buffer, run: Run, view: View) -> None:
        self._buffer, self._run, self._view = buffer, run, view
        self._num_left = MAX_RESTARTS
        self._away_since: float | None = None

    def __call__(self) -> None:
        """Start it if it was killed since the last call."""
        server = self._buffer.server
        if server is None or server.lives():
            self._away_since = None
            return
        now = time.monotonic()
        self._away_since = self._away_since or now
        killed = server.was_killed()
        if not killed or not self._num_left:
            if now - self._away_since > _AWAY_S:
                why = "was killed too often, or does not start" if killed else "is stopped"
                raise BufferUnavailableError(
                    f"the database of the buffer {self._buffer.location} {why}: the run ends",
                    todo=f"continue from the last checkpoint: {resume_command(self._buffer.location, self._run)} starts it again",
                )
            return
        self._num_left -= 1
        self._view.message("the database was killed: it is started again")
        try:
            server.start()
        except RftError as error:
            self._num_left = 0
            self._view.message(f"warning: the database does not start: {error}")
