"""The program that stops an embedded server some time after its last use. `rftdata.postgres.idle_stop` starts it by its path.

There is one process per running server. It uses only the standard library, so it is small, and it sleeps in the kernel on two locks:
`in_use`, which every process that has the buffer open shares, and `server.alive`, which the server holds. It ends with the server,
however that ends. While it asks for sessions and stops the server it holds `server.lock`. A process that opens the buffer at that
moment waits, finds the server stopped, and starts it again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_SMART_S = 10
_QUERY_S = 15


def read_limit_s(folder: Path) -> float:
    """Return how long the running server may be unused, in seconds; 0 for a server that only a command stops."""
    try:
        return float((folder / "idle_stop_s").read_text())
    except (OSError, ValueError):  # removed with the buffer, or `until stopped`
        return 0.0


class Watcher:
    """Waits until a server is no longer used, and stops it.

    Args:
        folder: the buffer's folder.
        binaries: folder of the PostgreSQL programs.
        sessions: the query that lists the sessions of other clients.
        environment: of psql: user, database.
    """

    def __init__(self, folder: Path, binaries: Path, sessions: str, environment: dict[str, str]) -> None:
        self.folder = folder
        self.data = folder / "postgres"
        self.binaries = binaries
        self.sessions = sessions
        self.environment = environment
        self.stopping = False
        self.in_use = os.open(folder / "in_use", os.O_RDWR)

    def run(self, held: int) -> None:
        """Watch until the server has ended.

        Args:
            held: file descriptor of the lock that marks the server as watched.
        """
        threading.Thread(target=self._end_with_server, args=(held,), daemon=True).start()
        idle_since = 0.0
        while limit_s := read_limit_s(self.folder):
            if self._waited_for_users():
                idle_since = time.time()
            idle_since = max(idle_since, self._last_use())
            left_s = min(limit_s, idle_since + limit_s - time.time())
            if left_s > 0:
                time.sleep(left_s)
                continue
            with self._start_lock():
                if self._was_replaced():
                    return
                if not self._is_unused() or self._last_use() > idle_since:
                    continue
                if not self._has_postmaster():
                    return
                if not self._has_sessions():
                    self._stop()
                    return
                idle_since = time.time()

    def _end_with_server(self, held: int) -> None:
        """Exit when the server and all its sessions have ended."""
        alive = os.open(self.folder / "server.alive", os.O_RDWR)
        fcntl.flock(alive, fcntl.LOCK_EX)
        if not self.stopping:
            os.close(held)  # first, so that the next server, which waits for `alive`, finds that it has no watcher
            os._exit(0)

    @contextlib.contextmanager
    def _start_lock(self) -> Iterator[None]:
        """Hold the lock under which servers are started and stopped."""
        lock = os.open(self.folder / "server.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _was_replaced(self) -> bool:
        """Return whether the buffer was removed; a buffer created in its place has a separate watcher."""
        try:
            return not os.path.samestat(os.stat(self.folder / "in_use"), os.fstat(self.in_use))
        except FileNotFoundError:
            return True

    def _is_unused(self) -> bool:
        try:
            fcntl.flock(self.in_use, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self.in_use, fcntl.LOCK_UN)
        return True

    def _waited_for_users(self) -> bool:
        """Wait until no process has the buffer open; return whether any had."""
        if self._is_unused():
            return False
        fcntl.flock(self.in_use, fcntl.LOCK_EX)
        fcntl.flock(self.in_use, fcntl.LOCK_UN)
        return True

    def _last_use(self) -> float:
        return os.fstat(self.in_use).st_mtime

    def _line(self, number: int) -> str:
        """Return a line of the server's lock file: 0 its process id, 3 its port."""
        try:
            return (self.data / "postmaster.pid").read_text().split("\n")[number].strip()
        except (OSError, IndexError):
            return ""

    def _has_postmaster(self) -> bool:
        """Return whether the server's process is visible; the number may belong to another program or container."""
        if not Path("/proc/self").exists():
            return bool(self._line(0))
        try:
            return os.readlink(f"/proc/{self._line(0)}/cwd") == str(self.data)
        except PermissionError:  # it runs under another account, as servers started by root do
            return True
        except OSError:
            return False

    def _has_sessions(self) -> bool:
        """Return whether a client without a mark is connected: psql, a notebook on another machine, a dashboard."""
        connection = {
            "PGHOST": (self.folder / "socket_dir").read_text().strip(),
            "PGPORT": self._line(3),
            "PGPASSWORD": (self.folder / "password").read_text().strip(),
            "PGCONNECT_TIMEOUT": "10",
        }
        # Settings of the environment for clients (PGOPTIONS, PGSSLMODE) are for other servers.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        try:
            asked = subprocess.run(
                [str(self.binaries / "psql"), "-XAtc", self.sessions],
                env={**inherited, **self.environment, **connection},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                timeout=_QUERY_S,
            )
        except subprocess.TimeoutExpired:  # meanwhile `server.lock` is held, for which every command waits
            return True
        # A server that refuses the connection is full or recovering.
        return asked.returncode != 0 or bool(asked.stdout.strip())

    def _stop(self) -> None:
        """Stop the server. It waits for a client that connects at this moment, up to a limit."""
        self.stopping = True
        account = os.stat(self.data)
        user = {"user": account.st_uid, "group": account.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
        for mode, limit_s in (("smart", _SMART_S), ("fast", 60)):
            stopped = subprocess.run(
                [str(self.binaries / "pg_ctl"), "stop", "-D", str(self.data), "-m", mode, "-w", "-t", str(limit_s)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                cwd="/",
                **user,  # type: ignore[call-overload]
            )
            if stopped.returncode == 0:
                break
        sockets = Path((self.folder / "socket_dir").read_text().strip())
        if not sockets.is_relative_to(self.folder):
            shutil.rmtree(sockets, ignore_errors=True)  # created again by the next start


def main() -> None:
    """Run the watcher. Arguments: folder, folder of the programs, user, database, query for sessions, file descriptor of its lock."""
    folder, binaries, user, database, sessions, held = sys.argv[1:]
    if os.fork():
        os._exit(0)  # the watcher becomes a child of init, so its starter keeps no zombie
    with contextlib.suppress(OSError):  # the buffer was removed
        Watcher(Path(folder), Path(binaries), sessions, {"PGUSER": user, "PGDATABASE": database}).run(int(held))
    os._exit(0)


if __name__ == "__main__":
    main()
