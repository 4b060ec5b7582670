"""The main process of the server of a data folder, as its lock file `postmaster.pid` names it."""

from __future__ import annotations

from pathlib import Path

import psutil

_PID, _STARTED_AT, _PORT, _ADDRESS = 0, 2, 3, 5  # lines of the lock file


class Postmaster:
    """The main process of one server, running or not.

    Args:
        data: the data folder.
    """

    def __init__(self, data: Path) -> None:
        self._data = data

    @property
    def pid(self) -> int | None:
        """The process id; None without a lock file. In another container, another process may have this number."""
        pid = self._line(_PID)
        return int(pid) if pid.isdigit() else None

    @property
    def started_at(self) -> int | None:
        """The time of its start, in seconds since 1970; None if it is not known."""
        started = self._line(_STARTED_AT)
        return int(started) if started.isdigit() else None

    @property
    def port(self) -> str:
        """The port, which is also in the name of the unix socket; empty without a lock file."""
        return self._line(_PORT)

    @property
    def address(self) -> str:
        """The address on which it listens; empty for the unix socket only."""
        return self._line(_ADDRESS)

    def is_visible(self) -> bool:
        """Return whether the process runs and can be seen from here; in another container it cannot."""
        pid = self.pid
        if pid is None:
            return False
        # The number may have passed to another program.
        try:
            process = psutil.Process(pid)
            if process.name() != "postgres" or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return False
            return process.cwd() == str(self._data)
        except psutil.AccessDenied:
            return True
        except psutil.Error:
            return False

    def _line(self, number: int) -> str:
        try:
            lines = (self._data / "postmaster.pid").read_text().split("\n")
        except OSError:
            return ""
        return lines[number].strip() if number < len(lines) else ""
