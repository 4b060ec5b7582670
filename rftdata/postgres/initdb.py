"""Creation of the data folder of an embedded server: `initdb`, its settings, and the account that owns the files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rftdata.files.durable import sync_path, write_whole
from rftdata.postgres.programs import open_path_for, run_program, server_account
from rftdata.postgres.server_errors import does_not_start

OWNER = "rft_owner"
UNFINISHED = "postgres.unfinished"
"""Folder in which the data folder is created."""
LOCK = "initdb.lock"
"""File that `initdb` holds locked."""
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
    "scram_iterations": "4096",  # of people's passwords; `initialise` takes fewer for its own
}
if sys.platform == "linux":
    # After a kill the server makes every file durable before it recovers. One call per file system does what one fsync per file does,
    # which took 4 of the 4.3 seconds until a small buffer answered again.
    _SETTINGS["recovery_init_sync_method"] = "syncfs"


def initialise(folder: Path, data: Path, password_file: Path) -> None:
    """Create the data folder under another name and rename it, so that a crash leaves no partial folder.

    Args:
        folder: of the buffer.
    """
    with _alone(folder) as lock:
        _initialise(folder, data, password_file, lock)


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[int]:
    """Wait until no `initdb` works in the folder, which one does for a moment after its parent was killed; yield the lock that it inherits."""
    path = folder / LOCK
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()
        path.unlink()  # under the server's lock, so that no other process waits for it


def _initialise(folder: Path, data: Path, password_file: Path, lock: int) -> None:
    _name_socket_dir(folder)
    unfinished = folder / UNFINISHED
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(mode=0o700)
    if not password_file.exists():
        write_whole(password_file, secrets.token_urlsafe(24), mode=0o600)
    with tempfile.NamedTemporaryFile("w", prefix="rft-", suffix=".pw") as pwfile:
        pwfile.write(password_file.read_text())
        pwfile.flush()
        own(folder, unfinished, Path(pwfile.name))
        run(
            folder,
            data,
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
            inherited=(lock,),
        )
    lines = [f"{key} = {value}" for key, value in _SETTINGS.items()]
    with open(unfinished / "postgresql.conf", "a", encoding="utf-8") as file:
        file.write("\n".join(["", "# rftdata", *lines, ""]))
    sync_path(unfinished / "postgresql.conf")
    (folder / "host").unlink(missing_ok=True)
    unfinished.rename(data)
    sync_path(folder)  # a rename lost to a power cut would make the next start delete the database


def own(folder: Path, *paths: Path) -> None:
    """Give paths in a buffer's folder to the account under which the server runs, if that is another one."""
    user = server_account()
    if user is None:
        return
    open_path_for(folder)
    for path in paths:
        os.chown(path, user.pw_uid, user.pw_gid)


def run(folder: Path, data: Path, program: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program of the server with `run_program`, and raise if it fails."""
    result = run_program(program, *arguments, **options)
    if result.returncode != 0:
        raise does_not_start(folder, data / "server.log", program, result.stdout)
    return result


def _name_socket_dir(folder: Path) -> None:
    """Choose the folder of the unix socket of a new buffer, and record it."""
    name = f"socket-{secrets.token_hex(4)}"
    inside = folder / name
    # libpq reads a comma as a separator of hosts.
    fits = len(os.fsencode(inside)) <= _MAX_SOCKET_DIR and "," not in str(inside)
    place = inside if fits else Path(tempfile.gettempdir()) / f"rft-{name}"
    write_whole(folder / "socket_dir", f"{place}\n")
