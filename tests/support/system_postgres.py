"""A PostgreSQL server of the machine's own programs, in the place of the embedded one: for the oldest version that buffers work on."""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
from pathlib import Path
from urllib.parse import quote

from rftdata.postgres.programs import open_path_for, server_account


class SystemServer:
    """A server with a database `rft`, reached by a unix socket and a password.

    Args:
        folder: where its files go.
        programs: folder of initdb, pg_ctl and createdb.
    """

    def __init__(self, folder: Path, programs: Path) -> None:
        self.folder = folder
        self.data = folder / "postgres"
        self.socket_dir = folder / "socket"
        self.password_file = folder / "password"
        self._programs, self._account = programs, server_account()

    @property
    def uri(self) -> str:
        password = quote(self.password_file.read_text())
        return f"postgresql://rft_owner:{password}@/rft?host={quote(str(self.socket_dir), safe='')}&port=5432"

    def start(self) -> str:
        """Initialise and start it; returns the connection string."""
        for folder in (self.data, self.socket_dir):
            folder.mkdir(parents=True)
        self.password_file.write_text(secrets.token_urlsafe(24))
        if self._account is not None:
            open_path_for(self.folder)
            for path in (self.data, self.socket_dir, self.password_file):
                os.chown(path, self._account.pw_uid, self._account.pw_gid)
        self._run(
            "initdb",
            "-D",
            self.data,
            "-U",
            "rft_owner",
            f"--pwfile={self.password_file}",
            "--auth=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
        )
        options = shlex.join([f"-cunix_socket_directories={self.socket_dir}", "-clisten_addresses="])
        self._run("pg_ctl", "start", "-w", "-D", self.data, "-l", self.data / "server.log", "-o", options)
        self._run(
            "createdb", "-h", self.socket_dir, "-U", "rft_owner", "rft", PGPASSWORD=self.password_file.read_text()
        )
        return self.uri

    def stop(self) -> None:
        self._run("pg_ctl", "stop", "-D", self.data, "-m", "fast", "-w")

    def _run(self, program: str, *arguments: object, **environment: str) -> None:
        owner = (
            {}
            if self._account is None
            else {"user": self._account.pw_uid, "group": self._account.pw_gid, "extra_groups": []}
        )
        # No pipes: the server would inherit them and never close them.
        subprocess.run(
            [self._programs / program, *map(str, arguments)],
            cwd="/",
            env={**os.environ, "LC_ALL": "C", **environment},
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            **owner,
        )
