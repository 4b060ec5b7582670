"""What several files of tests share: empty databases, and a program of the next release."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psycopg
import pytest

import rftdata
from rftdata import Buffer
from rftdata.config import BufferConfig
from rftdata.postgres import database, migrations
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.lossy_line import LossyLine
from tests.support.models import make_tiny_model
from tests.support.system_postgres import SystemServer

NEXT = Path(__file__).with_name("next_version")
CURRENT = migrations.newest_version()
Login = Callable[[str], psycopg.Connection]


@pytest.fixture
def empty_uri(server: EmbeddedServer, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of a server."""
    name = f"empty_{abs(hash(request.node.nodeid)):x}"
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    yield server.uri.replace("/rft?", f"/{name}?")
    with psycopg.connect(server.uri, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture
def has_pgvector(server: EmbeddedServer | SystemServer) -> bool:
    """Whether the server has the extension: the embedded one always, those of `make test-postgres` where it is installed."""
    with psycopg.connect(server.uri) as connection:
        found = connection.execute("SELECT FROM pg_available_extensions WHERE name = 'vector'").rowcount == 1
    assert found or isinstance(server, SystemServer)
    return found


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `model` with a random model."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def beside_a_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder has a model in its folder `model`."""
    monkeypatch.chdir(tiny_model.parent)


@pytest.fixture
def other(databases: Callable[[str], AbstractContextManager[str]], buffer: Buffer, tmp_path: Path) -> Iterator[Buffer]:
    """A second buffer, empty."""
    with (
        databases(buffer.config.uri.split("?")[0].rpartition("/")[2] + "b") as uri,
        rftdata.open(BufferConfig(uri=uri, segments=str(tmp_path / "other"), min_free_bytes=0)) as opened,
    ):
        opened.sql(
            "UPDATE rft.buffer SET buffer_id = gen_random_uuid()"
        )  # a copy of the template is not the same buffer
        yield opened


@pytest.fixture
def next_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """From here on this program is that of a release with one more version of the schema; that version."""
    folder = tmp_path / "sql-of-the-next-release"
    shutil.copytree(database.sql_folder(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(NEXT, folder / "migrations" / "versions", dirs_exist_ok=True)
    monkeypatch.setattr(migrations, "sql_folder", lambda: folder)
    return migrations.newest_version()


@pytest.fixture
def line(database_uri: str) -> Iterator[LossyLine]:
    """A line to the database of `buffer` that can lose answers."""
    with LossyLine(database_uri) as made:
        yield made


@pytest.fixture
def through(line: LossyLine, buffer: Buffer) -> Iterator[Buffer]:
    """The buffer over the line."""
    with rftdata.open(BufferConfig(uri=line.uri, segments=buffer.config.segments, min_free_bytes=0)) as opened:
        yield opened


@pytest.fixture
def login(buffer: Buffer) -> Iterator[Login]:
    """Opens a session of an account that is a member of a role, and of nothing else; `rft_other_labeler` names a second labeller."""
    sessions, accounts = [], []
    name = buffer.database.uri.rpartition("/")[2].partition("?")[0]

    def log_in(role: str) -> psycopg.Connection:
        account = f"{role}_of_{name}"
        if account not in accounts:
            buffer.sql(
                f"CREATE ROLE \"{account}\" LOGIN PASSWORD 'secret' IN ROLE {role.replace('_other', '').replace('_third', '')}"
            )
            accounts.append(account)
        sessions.append(psycopg.connect(buffer.database.uri, user=account, password="secret", autocommit=True))
        return sessions[-1]

    yield log_in
    for session in sessions:
        session.close()
    for account in accounts:
        buffer.sql(f'DROP OWNED BY "{account}"')
        buffer.sql(f'DROP ROLE "{account}"')
