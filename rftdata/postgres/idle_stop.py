"""Idle stop of an embedded server: the marks of the processes that use it, and the start of its watcher process.

Every process that has the buffer open shares a lock (flock) on `<folder>/in_use`, which the kernel releases however the process
ends. `<folder>/idle_stop_s` contains how long the running server may be unused, `<folder>/server.watch` is the lock of its
watcher (`idle_watch`). A process that opens or closes the buffer restarts a killed watcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
import weakref
from pathlib import Path

from rftdata.files.durable import write_whole
from rftdata.postgres import idle_watch
from rftdata.postgres.database import queries
from rftdata.postgres.programs import binary_dir

DEFAULT_S = 60.0
_UNTIL_STOPPED = "until stopped"
# A watcher holds the lock of the users for a moment when the last of them has left.
_WATCHER_S = 0.5


class IdleStop:
    """Marks the use of one server by one `EmbeddedServer`.

    Args:
        folder: the buffer's folder.
        user, database: with which the watcher asks for sessions.
    """

    def __init__(self, folder: Path, user: str, database: str) -> None:
        self.folder = folder
        self._arguments = [user, database]
        self._end: weakref.finalize[[Path, int, list[str]], IdleStop] | None = None

    def hold(self) -> None:
        """Mark the buffer as open until `release`, the end of this object or the end of the process."""
        if self._end is not None and self._end.alive:
            return
        mark = os.open(self.folder / "in_use", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(mark, fcntl.LOCK_SH)
        os.utime(mark)
        self._end = weakref.finalize(self, _leave, self.folder, mark, self._arguments)

    def release(self) -> None:
        """Mark the buffer as closed."""
        if self._end is not None:
            self._end()

    def has_other_users(self) -> bool:
        """Return whether another object or process has the buffer open; this one must have released it."""
        try:
            mark = os.open(self.folder / "in_use", os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            deadline = time.monotonic() + _WATCHER_S
            while True:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return False
                if time.monotonic() > deadline:
                    return True
                time.sleep(0.01)
        finally:
            os.close(mark)

    @property
    def limit_s(self) -> float:
        """Unused seconds after which the running server stops; 0 for never."""
        return idle_watch.read_limit_s(self.folder)

    def settle(self, wanted_s: float | None, *, started: bool) -> None:
        """Set how long the server may be unused, and start its watcher if needed.

        Args:
            wanted_s: seconds, 0 for unlimited. None keeps the setting of a running server, and is `DEFAULT_S` for one that starts.
            started: whether the server was started just now. A setting of `never` stays if that server ended without a stop command.
        """
        if self._read() == _UNTIL_STOPPED:
            return
        if started:
            self._write(f"{DEFAULT_S if wanted_s is None else wanted_s:g}")
        elif wanted_s is not None and self._read() != f"{wanted_s:g}":
            self._write(f"{wanted_s:g}")
        _watch(self.folder, self._arguments)

    def never(self) -> None:
        """Keep the running server until a command stops it, whatever configurations set."""
        self._write(_UNTIL_STOPPED)

    def forget(self) -> None:
        """Forget the setting after a stop command, so that the next server may stop by itself again."""
        (self.folder / "idle_stop_s").unlink(missing_ok=True)

    def _read(self) -> str:
        try:
            return (self.folder / "idle_stop_s").read_text().strip()
        except FileNotFoundError:
            return ""

    def _write(self, text: str) -> None:
        write_whole(self.folder / "idle_stop_s", f"{text}\n")


def _leave(folder: Path, mark: int, arguments: list[str]) -> None:
    with contextlib.suppress(OSError):  # the buffer was removed
        os.utime(mark)
        _watch(folder, arguments)
    os.close(mark)


def _watch(folder: Path, arguments: list[str]) -> None:
    """Start the watcher of a running server if it has none."""
    if not idle_watch.read_limit_s(folder):
        return
    lock = os.open(folder / "server.watch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        subprocess.run(
            [
                sys.executable,
                "-IS",
                idle_watch.__file__,
                str(folder),
                str(binary_dir()),
                *arguments,
                queries()["open_sessions"],
                str(lock),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            pass_fds=(lock,),
            check=False,
        )
    except BlockingIOError:
        pass  # it has a watcher
    finally:
        os.close(lock)
