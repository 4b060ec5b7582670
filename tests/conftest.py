"""Real PostgreSQL for every test that asks for a buffer: one embedded server per session, a fresh database per test.

A template database is migrated once and copied, which takes a fifth of a second less than migrating again.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg_pool import ConnectionPool

import rftdata
from rftcore.garbage import collect_rarely
from rftdata.config import BufferConfig
from rftdata.postgres.database import Database
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.migrations import migrate
from tests.support import durations, session_processes
from tests.support.system_postgres import SystemServer

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Models of tests are so small that a second thread costs more than it brings, and several processes share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
session_processes.mark_session()
for number in (signal.SIGINT, signal.SIGHUP):
    # Ignored where the session was started by `nohup` or in the background of a shell. What the tests start would ignore it, too.
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)
collect_rarely()
# On a busy machine examples take longer to generate and to run, which is no fault of the test. Examples are the same in every run.
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("busy machine")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give the session a folder for `tmp_path` of its own, which ends with it; `--basetemp` names another, which stays.

    By default all sessions of a user share a folder, and each that starts removes other users' rights on it. As root, the servers of the
    others would lose access to their data.
    """
    if config.option.basetemp is None:
        config.option.basetemp = str(Path(tempfile.gettempdir()) / f"{session_processes.folder_prefix()}t")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Processes side by side take the longest files first, so that they end together; one process keeps the order of the names."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: durations.rank(item.path))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop every embedded server that a test left running, in any folder; the session's last process does so for all."""
    if "PYTEST_XDIST_WORKER" not in os.environ and (left := session_processes.stop(session_processes.servers())):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print(f"\nPostgreSQL servers of the tests that do not stop: {[process.pid for process in left]}")


@pytest.fixture(scope="session")
def server_folders() -> Iterator[Path]:
    """Folder of the tests' embedded servers, in memory where there is room.

    In memory, because a database is a copy of the template's 415 files. On a disk, making and removing them takes 0.05 to 0.4 s of the
    kernel's time for each test, more the longer a session lasts; in memory it takes 0.03 s.
    """
    with tempfile.TemporaryDirectory(prefix=session_processes.folder_prefix(), dir=_memory()) as folder:
        yield Path(folder)


def _memory() -> Path | None:
    """A file system in memory with room for the servers of several processes; None: the usual temporary folder."""
    room = Path("/dev/shm")
    return room if os.access(room, os.W_OK) and shutil.disk_usage(room).free > 4 * 2**30 else None


@pytest.fixture(scope="session")
def server(server_folders: Path) -> Iterator[EmbeddedServer | SystemServer]:
    """The embedded server, or one of the programs that `make test-postgres` names."""
    folder, programs = server_folders / "session", os.environ.get("RFT_TEST_POSTGRES")
    server = SystemServer(folder, Path(programs)) if programs else EmbeddedServer(folder)
    uri = server.start()
    with psycopg.connect(uri, autocommit=True) as connection:
        connection.execute("ALTER SYSTEM SET fsync = off")  # no test here outlives a power cut
        connection.execute("ALTER SYSTEM SET max_wal_size = '256MB'")  # it may lie in memory
        connection.execute("SELECT pg_reload_conf()")
        connection.execute("CREATE DATABASE template_rft")
    template = Database(_database_uri(uri, "template_rft"))
    migrate(template)
    template.close()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def databases(server: EmbeddedServer | SystemServer) -> Iterator[Callable[[str], AbstractContextManager[str]]]:
    """Called with a name: a context with the address of a fresh migrated database of that name."""
    # One connection for all that are made and removed; another one, if a test has restarted the server.
    with ConnectionPool(
        server.uri, min_size=1, kwargs={"autocommit": True}, check=ConnectionPool.check_connection
    ) as pool:

        @contextmanager
        def fresh(name: str) -> Iterator[str]:
            with pool.connection() as connection:
                # Files are copied, without a record of each page in the log: a third less of processor time.
                connection.execute(f'CREATE DATABASE "{name}" TEMPLATE template_rft STRATEGY FILE_COPY')
            try:
                yield _database_uri(server.uri, name)
            finally:
                with pool.connection() as connection:
                    connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')

        yield fresh


@pytest.fixture
def database_uri(
    databases: Callable[[str], AbstractContextManager[str]], request: pytest.FixtureRequest
) -> Iterator[str]:
    """A fresh migrated database."""
    with databases(f"test_{abs(hash(request.node.nodeid)):x}") as uri:
        yield uri


@pytest.fixture
def buffer(database_uri: str, tmp_path: Path) -> Iterator[rftdata.Buffer]:
    """An open buffer on a database and a segment folder of its own."""
    with rftdata.open(BufferConfig(uri=database_uri, segments=str(tmp_path / "segments"), min_free_bytes=0)) as opened:
        yield opened


def _database_uri(uri: str, name: str) -> str:
    return uri.replace("/rft?", f"/{name}?")
