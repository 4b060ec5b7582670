"""Sessions leave the database to the run: few for each account, few connections, and none that nothing uses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import httpx
import pytest

import rftdata
from rftcore.studio import sessions
from rftdata import connection
from tests.support.studio_site import FROM_HERE, PASSWORD, Site, open_site
from tests.support.waiting import wait_until


def num_connections(buffer: rftdata.Buffer, account: str) -> int:
    query = "SELECT count(*) AS n FROM pg_stat_activity WHERE usename = %s AND datname = current_database()"
    return int(buffer.sql(query, [account])["n"][0].as_py())


def sign_in(client: httpx.Client, account: str) -> httpx.Response:
    return client.post("/sign-in", data={"account": account, "password": PASSWORD})


@contextmanager
def limit(buffer: rftdata.Buffer, what: str, num: int) -> Iterator[None]:
    with buffer.database.connection() as opened:
        opened.execute(f"ALTER {what} CONNECTION LIMIT {num}")
    try:
        yield
    finally:
        with buffer.database.connection() as opened:
            opened.execute(f"ALTER {what} CONNECTION LIMIT -1")


def test_a_ninth_session_of_an_account_ends_the_one_that_was_unused_the_longest(
    site: Site, studio_buffer: rftdata.Buffer, ada: str
) -> None:
    with ExitStack() as stack:
        clients = [stack.enter_context(site.stranger(**FROM_HERE)) for _ in range(sessions.MAX_OF_ACCOUNT + 3)]
        for client in clients:
            assert sign_in(client, ada).status_code == 303
        found = [client.get("/review").status_code for client in clients]
        assert found == [303] * 3 + [200] * sessions.MAX_OF_ACCOUNT
        assert num_connections(studio_buffer, ada) <= 2 * sessions.MAX_OF_ACCOUNT


def test_signing_in_again_ends_the_former_session_of_the_browser(site: Site, ada: str, bob: str) -> None:
    with site.stranger(**FROM_HERE) as client, site.stranger() as thief:
        assert sign_in(client, ada).status_code == 303
        thief.cookies.update(client.cookies)
        assert thief.get("/review").status_code == 200
        assert sign_in(client, bob).status_code == 303
        assert thief.get("/review").status_code == 303 and client.get("/review").status_code == 200


def test_a_session_that_nobody_uses_has_no_connections_and_opens_one_on_demand(
    site: Site, studio_buffer: rftdata.Buffer, bob: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_UNUSED_S", 0.5)
    with site.account(bob) as client:
        wait_until(lambda: num_connections(studio_buffer, bob) == 0)
        assert client.get("/review").status_code == 200


def test_all_sessions_together_leave_half_of_the_connections(studio_buffer: rftdata.Buffer, ada: str, bob: str) -> None:
    with open_site(studio_buffer) as site, ExitStack() as stack:
        held = site.server.studio.sessions
        held._most = 1
        first, second = (stack.enter_context(site.stranger(**FROM_HERE)) for _ in range(2))
        assert sign_in(first, ada).status_code == 303
        refused = sign_in(second, bob)
        assert refused.status_code == 401 and "too many people" in refused.text
        for session in held._sessions.values():
            session.last_used = time.monotonic() - sessions.REPLACEABLE_S - 1
        assert sign_in(second, bob).status_code == 303
        assert first.get("/review").status_code == 303
        num = studio_buffer.sql("SELECT current_setting('max_connections')::int AS n")["n"][0].as_py()
        with open_site(studio_buffer) as other:
            assert other.server.studio.sessions._most * 2 <= num / 2


def test_a_refused_connection_is_not_told_as_a_wrong_password(studio_buffer: rftdata.Buffer, ada: str) -> None:
    database = studio_buffer.sql("SELECT current_database() AS name")["name"][0].as_py()
    with open_site(studio_buffer) as site, site.stranger(**FROM_HERE) as client:
        for what in (f'ROLE "{ada}"', f'DATABASE "{database}"'):
            with limit(studio_buffer, what, 0):
                answer = sign_in(client, ada)
                assert answer.status_code == 503 and "no free connection" in answer.text
        assert sign_in(client, ada).status_code == 303
