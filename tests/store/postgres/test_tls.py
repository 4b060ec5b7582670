"""A server from the system's packages, over TLS, by password: the oldest supported PostgreSQL, and the strictest connection."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

import rftdata
from rftcore.cli import run_command
from rftcore.config.run import parse_config
from rftcore.launch.preparation import stored_config
from rftdata import Buffer
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError
from rftdata.maintenance import backup, purge
from rftdata.maintenance.verification import verify
from rftdata.postgres.database import Database
from rftdata.postgres.programs import server_account
from rftdata.uri import redacted
from tests.support.ports import closed_port
from tests.support.store_roles import Roles
from tests.support.waiting import PATIENCE_S

PASSWORD = "s3cr3t/w:th@ödd %41"
# Where distributions put the programs of a server, the newest last.
_PROGRAMS = sorted(path for pattern in ("lib/postgresql/*/bin", "pgsql-*/bin") for path in Path("/usr").glob(pattern))
_SERVERS = [path for path in _PROGRAMS if (path / "initdb").exists() and (path / "postgres").exists()]

pytestmark = [
    pytest.mark.skipif(not _SERVERS, reason="no PostgreSQL server of the system's packages is installed"),
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]


@dataclass
class TlsServer:
    """A running server that accepts TLS only.

    Attributes:
        url: of an ordinary account that owns its database.
        authority: the certificate that vouches for the server's.
    """

    url: str
    port: int
    folder: Path
    authority: Path

    def with_(self, **options: str) -> str:
        return self.url + "?" + "&".join(f"{key}={quote(value, safe='')}" for key, value in options.items())

    @property
    def verified(self) -> str:
        return self.with_(sslmode="verify-full", sslrootcert=str(self.authority))


@pytest.fixture(scope="module")
def tls() -> Iterator[TlsServer]:
    with tempfile.TemporaryDirectory(prefix="rft-tls-") as name, contextlib.ExitStack() as reserved:
        folder = Path(name)
        account = server_account()
        if account:
            os.chown(folder, account.pw_uid, account.pw_gid)

        def run(program: str | Path, options: str) -> None:
            done = subprocess.run(
                [program, *options.split()],
                cwd=folder,
                user=account.pw_uid if account else None,
                group=account.pw_gid if account else None,
                extra_groups=[] if account else None,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "LC_ALL": "C", "PGCTLTIMEOUT": f"{PATIENCE_S:.0f}"},
            )
            assert done.returncode == 0, done.stdout + done.stderr

        # The certificate of "localhost", signed by an authority of our own.
        certificate = "req -x509 -newkey rsa:2048 -nodes -days 2"
        run(
            "openssl",
            f"{certificate} -subj /CN=localhost -addext subjectAltName=DNS:localhost -keyout key.pem -out cert.pem",
        )
        run("openssl", f"{certificate} -subj /CN=other -keyout o.pem -out other.pem")
        (folder / "password").write_text("an administrator's")
        (folder / "password").chmod(0o644)
        programs = _SERVERS[0]
        run(
            programs / "initdb",
            "-D data -U admin --pwfile=password --auth=scram-sha-256 --encoding=UTF8 --locale=C",
        )
        port = reserved.enter_context(closed_port())
        (folder / "data" / "pg_hba.conf").write_text(
            "local all all scram-sha-256\nhostssl all all 127.0.0.1/32 scram-sha-256\n"
        )
        with open(folder / "data" / "postgresql.conf", "a", encoding="utf-8") as file:
            file.write(
                f"port = {port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = ''\nssl = on\nfsync = off\n"
                f"ssl_cert_file = '{folder}/cert.pem'\nssl_key_file = '{folder}/key.pem'\n"
            )
        run(programs / "pg_ctl", "start -w -D data -l log")
        try:
            admin = f"postgresql://admin:an%20administrator's@localhost:{port}"
            with psycopg.connect(f"{admin}/postgres", autocommit=True) as connection:
                connection.execute(psycopg.sql.SQL("CREATE ROLE trainee LOGIN PASSWORD {}").format(PASSWORD))
                connection.execute("CREATE DATABASE experiences OWNER trainee")
                connection.execute("ALTER SYSTEM SET log_statement = 'all'")  # from now on: what we send is in its log
                connection.execute("SELECT pg_reload_conf()")
            url = f"postgresql://trainee:{quote(PASSWORD, safe='')}@localhost:{port}/experiences"
            yield TlsServer(url, port, folder, folder / "cert.pem")
        finally:
            run(programs / "pg_ctl", "stop -m fast -D data")


@pytest.fixture
def buffer(tls: TlsServer, tmp_path: Path) -> Iterator[Buffer]:
    with rftdata.open(BufferConfig(uri=tls.verified, segments=str(tmp_path / "segments"), min_free_bytes=0)) as opened:
        yield opened


def spellings() -> list[str]:
    return [PASSWORD, quote(PASSWORD, safe=""), quote(PASSWORD), json.dumps(PASSWORD)[1:-1]]


def test_a_run_works_over_verified_tls(buffer: Buffer) -> None:
    roles = Roles(buffer, steps=1)
    with roles.attempt() as attempt:
        roles.work()
        assert len(roles.train(attempt, 1)) == 2
        attempt.commit_checkpoint(1, "/c/1")
        attempt.finish("done")
    with buffer.database.connection() as connection:
        row = connection.execute("SELECT ssl, version FROM pg_stat_ssl WHERE pid = pg_backend_pid()").fetchone()
        assert row is not None and row["ssl"] and row["version"].startswith("TLSv1.")
    purge.purge(buffer, "rollout_index = 0", reason="x", author="ada")
    assert list(verify(buffer)) == []


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"sslmode": "disable"}, "no pg_hba.conf entry|no encryption"),
        ({"sslmode": "verify-full", "sslrootcert": "other.pem"}, "certificate verify failed"),
        ({"sslmode": "verify-full", "sslrootcert": "missing.pem"}, "missing.pem"),
        ({"sslmode": "sometimes"}, "sslmode"),
    ],
)
def test_a_connection_that_is_not_as_safe_as_asked_for_is_refused(
    tls: TlsServer, options: dict[str, str], what: str
) -> None:
    if "sslrootcert" in options:
        options = {**options, "sslrootcert": str(tls.folder / options["sslrootcert"])}
    with pytest.raises(BufferUnavailableError, match=what) as refused:
        Database(tls.with_(**options))
    assert not any(spelling in str(refused.value) for spelling in spellings())


def test_the_name_in_the_certificate_counts(tls: TlsServer) -> None:
    uri = tls.verified.replace("@localhost:", "@127.0.0.1:")
    with pytest.raises(BufferUnavailableError, match="does not match host name"):
        Database(uri)
    Database(uri.replace("verify-full", "verify-ca")).close()


def test_nothing_that_is_stored_or_written_holds_the_password(
    tls: TlsServer, buffer: Buffer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = {
        "run": {"name": "r"},
        "model": {"path": "m"},
        "tasks": [{"name": "t", "source": "t.jsonl"}],
        "steps": 1,
        "buffer": {"uri": tls.verified, "segments": str(tmp_path / "segments")},
        "algorithm": {"name": "grpo"},
        "explorer": {"reward": ["accuracy"]},
        "trainer": {"batch_groups": 2, "learning_rate": 1e-6},
    }
    stored = stored_config(parse_config(raw, tmp_path, "a test"))
    buffer.create_run(name="r", config=stored, seed=1, steps=1, pipeline_version="p")
    outputs = [json.dumps(stored), redacted(tls.verified), buffer.location]
    monkeypatch.setenv("RFT_SEGMENTS", str(tmp_path / "segments"))
    for arguments in (
        ["status"],
        ["doctor"],
        ["doctor", "--json"],
        ["sql", "select config from run"],
        ["sql", "select nonsense"],
        ["export", str(tmp_path / "a.parquet"), "--where", "nonsense"],
        ["db", "roles"],
        ["db", "backup", str(tmp_path / "backup")],
        ["purge", "--where", "nonsense", "--reason", "x"],
        ["db", "stop"],
    ):
        run_command([*arguments, "--buffer", tls.verified, "--debug"])
        captured = capsys.readouterr()
        outputs += [captured.out, captured.err]
    monkeypatch.setenv("PGOPTIONS", "-c default_transaction_isolation=nonsense")
    with pytest.raises(BufferUnavailableError) as refused:
        backup.back_up(buffer, tmp_path / "second")
    outputs += [str(refused.value), (tls.folder / "log").read_text()]
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        outputs.append(file.read_bytes().decode("utf-8", "replace"))
    dumped = buffer.sql("SELECT r::text AS t FROM rft.run r")["t"].to_pylist()
    for text in [*outputs, *dumped]:
        assert not any(spelling in text for spelling in spellings()), text[:2000]
