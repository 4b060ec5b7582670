"""The console under attack: it reads, within its limits, and does nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.client import HTTPConnection

import httpx
import pytest

import rftdata
from rftcore.studio import readers
from tests.support.studio_run import HOSTILE
from tests.support.studio_site import Site, account, open_site
from tests.support.waiting import wait_until

LOGINS = "SELECT rolname::text AS name FROM pg_roles WHERE starts_with(rolname, 'rft_studio_reader_')"
STATE = "SELECT (SELECT count(*) FROM rft.experience) AS n, (SELECT sum(reward) FROM rft.experience) AS rewards, (SELECT count(*) FROM rft.label) AS labels"


@pytest.fixture(scope="module")
def owner(site: Site) -> Iterator[httpx.Client]:
    with site.owner() as opened:
        yield opened


def ask(client: httpx.Client, query: str) -> httpx.Response:
    return client.post("/sql", data={"query": query}, headers={"HX-Request": "true"})


@pytest.mark.parametrize(
    "query",
    [
        "COPY (SELECT 1) TO PROGRAM 'touch /tmp/owned'",
        "COPY rft.label FROM PROGRAM 'id'",
        "SELECT 1; DELETE FROM rft.write_receipt",
        "SELECT 1); UPDATE rft.experience SET reward = 9; SELECT (1",
        "ANALYZE) UPDATE rft.experience SET reward = 9 --",
        "ANALYZE UPDATE rft.experience SET reward = 9",
        "EXPLAIN ANALYZE UPDATE rft.experience SET reward = 9",
        "UPDATE rft.experience SET reward = 9",
        "UPDATE rft.experience SET reward = 9 RETURNING 1",
        "WITH x AS (UPDATE rft.experience SET reward = 9 RETURNING 1) SELECT * FROM x",
        "SELECT * FROM rft.experience FOR UPDATE",
        "SELECT set_config('transaction_read_only', 'off', true)",
        "SELECT set_config('session_authorization', 'default', false), set_config('role', rolname, false) FROM pg_roles WHERE rolsuper",
        "SET ROLE rft_worker",
        "SELECT query_to_xml('UPDATE rft.experience SET reward = 9 RETURNING 1', true, true, '')",
        "SELECT query_to_xml('COMMIT', true, true, '')",
        "SELECT pg_read_file('/etc/passwd')",
        "SELECT pg_ls_dir('/')",
        "SELECT lo_import('/etc/passwd')",
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usesysid = 10",
        "SELECT rft.begin_label_batches(1)",
        "SELECT rolpassword FROM pg_authid",
        "SELECT nextval('rft.label_label_id_seq')",
        "CREATE TEMP TABLE x AS SELECT 1",
        "DO $$ BEGIN RAISE 'x'; END $$",
        "LISTEN rft",
        "VALUES (1) /* ",
        "SELECT '",
        "SELECT $1",
        "-- nothing",
        "",
    ],
)
def test_what_does_not_read_is_refused_and_changes_nothing(
    owner: httpx.Client, studio_buffer: rftdata.Buffer, query: str
) -> None:
    before = studio_buffer.sql(STATE).to_pylist()
    answer = ask(owner, query)
    assert answer.status_code == 422 and "<table" not in answer.text, answer.text
    assert studio_buffer.sql(STATE).to_pylist() == before


def test_what_reads_is_a_table(owner: httpx.Client) -> None:
    text = ask(owner, "select run, count(*) as n, null::text as nothing from v_experience group by run; ").text
    assert ">sums<" in text and ">21<" in text and "NULL" in text and "1 rows in" in text
    assert "twice" in ask(owner, "SELECT 1 AS twice, '{x} %s' AS twice -- a comment").text


def test_an_owner_reads_as_a_login_that_may_do_nothing_else_and_ends_with_the_studio(
    studio_buffer: rftdata.Buffer,
) -> None:
    before = studio_buffer.sql(LOGINS).to_pylist()
    with open_site(studio_buffer) as site, site.owner() as client:
        text = ask(
            client,
            "SELECT session_user, current_setting('is_superuser') AS super, current_setting('transaction_read_only') AS reads",
        ).text
        assert "rft_studio_reader_" in text and ">off<" in text and ">on<" in text
        (login,) = [row["name"] for row in studio_buffer.sql(LOGINS).to_pylist() if row not in before]
        roles = studio_buffer.sql(
            "SELECT m.rolname::text AS name FROM pg_roles m WHERE pg_has_role(%s, m.oid, 'MEMBER')", [login]
        )
        assert sorted(roles["name"].to_pylist()) == sorted(["rft_reader", login])
    assert studio_buffer.sql(LOGINS).to_pylist() == before


def test_a_login_that_a_killed_studio_left_is_dropped_once_it_has_expired(studio_buffer: rftdata.Buffer) -> None:
    studio_buffer.sql("CREATE ROLE rft_studio_reader_left LOGIN VALID UNTIL '2001-01-01' IN ROLE rft_reader")
    with open_site(studio_buffer) as site, site.owner() as client:
        assert ask(client, "SELECT 1").status_code == 200
        assert "rft_studio_reader_left" not in studio_buffer.sql(LOGINS)["name"].to_pylist()


def test_a_labeller_reads_with_the_own_account_and_a_worker_with_the_limited_login(
    site: Site, ada: str, studio_buffer: rftdata.Buffer
) -> None:
    with site.account(ada) as client:
        assert f">{ada}<" in ask(client, "SELECT session_user").text
        assert ask(client, "UPDATE rft.experience SET reward = 9").status_code == 422
    with account(studio_buffer, "studio_wim", "rft_worker") as name, site.account(name) as client:
        assert "rft_studio_reader_" in ask(client, "SELECT session_user").text


def test_rows_and_values_are_cut(owner: httpx.Client) -> None:
    text = ask(owner, "SELECT n FROM generate_series(1, 1500) AS n").text
    assert "1000 rows" in text and "There are more" in text and ">1000<" in text and ">1001<" not in text
    text = ask(owner, "SELECT repeat('x', 10000000) AS long").text
    assert len(text) < 20_000 and "x …" in text


def test_what_takes_long_is_ended(owner: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LIMIT_S", 0.5)
    for query in (
        "SELECT pg_sleep(60)",
        "SELECT set_config('statement_timeout', '0', true), pg_sleep(60)",
        "SELECT count(*) FROM generate_series(1, 1e12)",
    ):
        began = time.monotonic()
        answer = ask(owner, query)
        assert answer.status_code == 422 and "did not end within 0.5 s" in answer.text and time.monotonic() - began < 10


def test_a_lock_ends_with_its_query(owner: httpx.Client, studio_buffer: rftdata.Buffer) -> None:
    assert ask(owner, "SELECT pg_advisory_lock(31)").status_code == 200
    wait_until(
        lambda: (
            studio_buffer.sql("SELECT count(*) AS n FROM pg_locks WHERE locktype = 'advisory' AND objid = 31")["n"][
                0
            ].as_py()
            == 0
        )
    )


def at_work(buffer: rftdata.Buffer) -> int:
    rows = buffer.sql(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE query LIKE '%%pg_sleep(500)%%' AND state = 'active' AND pid <> pg_backend_pid()"
    )
    return int(rows["n"][0].as_py())


def begin(site: Site, client: httpx.Client, query: str) -> HTTPConnection:
    """Send a query as `client` would, and do not wait for its answer."""
    request = client.build_request("POST", "/sql", data={"query": query})
    connection = HTTPConnection("127.0.0.1", site.server.port)
    connection.request("POST", "/sql", body=request.read(), headers=dict(request.headers))
    return connection


def test_a_third_query_waits_for_nobody_and_a_browser_that_leaves_ends_its_own(
    site: Site, owner: httpx.Client, studio_buffer: rftdata.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LIMIT_S", 600)
    connections = [begin(site, owner, "SELECT pg_sleep(500)") for _ in range(2)]
    wait_until(lambda: at_work(studio_buffer) == 2)
    answer = ask(owner, "SELECT 1")
    assert answer.status_code == 429 and "2 queries are running" in answer.text
    for connection in connections:
        connection.close()
    wait_until(lambda: at_work(studio_buffer) == 0)
    wait_until(lambda: ask(owner, "SELECT 1").status_code == 200)


def test_names_and_values_are_texts(owner: httpx.Client) -> None:
    text = ask(
        owner, f"""SELECT $x${HOSTILE[0]}$x$ AS "{HOSTILE[1].replace('"', "''")}", $x$\u202e{HOSTILE[2]}$x$ AS b"""
    ).text
    assert "<img" not in text and "<div hx-get" not in text and "<script" not in text and "\u202e" not in text


def test_queries_are_kept_by_labellers_and_removed_by_their_account(
    site: Site, ada: str, bob: str, studio_buffer: rftdata.Buffer
) -> None:
    asked = {"kind": "query", "name": "counts", "query": "SELECT count(*) FROM v_experience"}
    with site.account(ada) as client, site.account(bob) as other, site.owner() as owner:
        assert client.post("/saved-queries", data=asked).status_code == 204
        assert other.post("/saved-queries", data=asked).status_code == 409
        (key,) = studio_buffer.sql("SELECT saved_query_id FROM rft.saved_query")["saved_query_id"].to_pylist()
        assert asked["query"] in owner.get("/sql", params={"saved": key}).text
        refused = other.post("/saved-queries/remove", data={"saved_query_id": key})
        assert refused.status_code == 422 and "was saved by the account" in refused.text
        assert client.post("/saved-queries/remove", data={"saved_query_id": key}).status_code == 204
        assert other.post("/saved-queries", data=asked).status_code == 204
    with account(studio_buffer, "studio_rita", "rft_reader") as name, site.account(name) as client:
        assert client.post("/saved-queries", data={**asked, "name": "x"}).status_code == 422
