"""A studio on a buffer of the tests' server, with accounts of the database, and clients that behave like a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from psycopg import sql

from rftcore.studio.server import StudioServer
from rftcore.studio.settings import StudioSettings
from rftdata import Buffer

PASSWORD = "correct horse 🐎 @:/?#"
FROM_HERE = {"Sec-Fetch-Site": "same-origin"}


@dataclass
class Site:
    """A running studio."""

    buffer: Buffer
    server: StudioServer

    @property
    def origin(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def stranger(self, **headers: str) -> httpx.Client:
        """Return a client that has not signed in."""
        return httpx.Client(base_url=self.origin, headers=headers, timeout=60, trust_env=False)

    @contextmanager
    def owner(self) -> Iterator[httpx.Client]:
        """Yield a client signed in by a one-time address."""
        with self.stranger(**FROM_HERE) as client:
            assert client.get(self.server.address()).status_code == 200
            yield with_token(client)

    @contextmanager
    def account(self, name: str, password: str = PASSWORD) -> Iterator[httpx.Client]:
        """Yield a client signed in with an account of the database."""
        with self.stranger(**FROM_HERE) as client:
            answer = client.post("/sign-in", data={"account": name, "password": password})
            assert answer.status_code == 303, answer.text
            yield with_token(client)
            client.post("/sign-out")  # an account has few sessions, and that of a browser must not end


def with_token(client: httpx.Client) -> httpx.Client:
    """Let a client that has signed in send what a page sends with its writes."""
    found = re.search(r'data-token="([^"]+)" data-identity="([^"]+)"', client.get("/review").text)
    assert found is not None
    client.headers["X-Studio-Token"], client.headers["X-Studio-Identity"] = found[1], found[2]
    return client


@contextmanager
def open_site(buffer: Buffer, **settings: Any) -> Iterator[Site]:
    """Serve the studio while the block runs."""
    with StudioServer(buffer, StudioSettings(**{"author": "olga", **settings})).in_thread() as server:
        yield Site(buffer, server)


@contextmanager
def account(buffer: Buffer, name: str, role: str | None) -> Iterator[str]:
    """Create an account that may sign in while the block runs; roles of a server belong to all its databases."""
    with buffer.database.connection() as connection:
        user = sql.Identifier(name)
        connection.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(user))
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(user, sql.Literal(PASSWORD)))
        if role is not None:
            connection.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(role), user))
    try:
        yield name
    finally:
        with buffer.database.connection() as connection:
            connection.execute(sql.SQL("DROP ROLE {}").format(user))
