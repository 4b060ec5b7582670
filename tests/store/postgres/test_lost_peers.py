"""Each end of a TCP connection to the database notices soon that the other one cannot be reached; see also the cuts of tests/crash."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rftdata
from rftdata.config import BufferConfig
from rftdata.errors import BufferUnavailableError
from rftdata.postgres.database import Connection, Database
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.postgres.lost_peers import LIMIT_S
from rftdata.postgres.retry import RIDE_OUT_S
from tests.support.ports import closed_port


@pytest.fixture(scope="module")
def url(server_folders: Path) -> Iterator[str]:
    with closed_port() as port:
        server = EmbeddedServer(server_folders / "peers", listen=f"127.0.0.1:{port}")
        rftdata.open(BufferConfig(uri=str(server.folder), listen=server.listen)).close()
        yield f"postgresql://rft_owner:{server.password_file.read_text().strip()}@127.0.0.1:{port}/rft"
        server.stop()


def limits_of(connection: Connection) -> tuple[int, int, str]:
    """The client's limit in ms, its first probe in s, and the server's own limit."""
    with socket.socket(fileno=os.dup(connection.pgconn.socket)) as end:
        limit = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        idle = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    row = connection.execute("SHOW tcp_user_timeout").fetchone()
    assert row is not None
    return limit, idle, row["tcp_user_timeout"]


def test_both_ends_of_every_connection_have_a_limit(url: str) -> None:
    assert LIMIT_S < RIDE_OUT_S, "a role whose connection is cut must have time left to connect again"
    database = Database(url)
    with database.connection() as pooled, database.dedicated() as apart:
        assert limits_of(pooled) == limits_of(apart) == (1000 * LIMIT_S, 5, str(1000 * LIMIT_S))
    database.close()


def test_a_limit_in_the_url_stays(url: str) -> None:
    database = Database(f"{url}?tcp_user_timeout=4000")
    with database.connection() as pooled:
        assert limits_of(pooled)[0] == 4000
    database.close()


def hold(database: Database, others: Callable[[], object]) -> None:
    """Lock the runs, and do nothing until others have done something."""
    with database.transaction() as connection:
        connection.execute("LOCK TABLE rft.run")
        others()
        connection.execute("SELECT FROM rft.run")


def lock(database: Database) -> None:
    with database.transaction() as connection:
        connection.execute("LOCK TABLE rft.run")


def test_an_idle_transaction_releases_its_locks(url: str) -> None:
    suspended, other = Database(url, idle_s=0.2), Database(url)
    with contextlib.closing(suspended), contextlib.closing(other), pytest.raises(BufferUnavailableError):
        hold(suspended, lambda: lock(other))
