"""Every rule of the studio's safety, against the real server (docs/security.md)."""

from __future__ import annotations

import http.client
import logging
import socket

import pytest
from fastapi.routing import APIRoute

import rftdata
from rftcore.cli.studio import studio
from rftcore.studio import guards
from rftcore.studio.pages import all_pages
from rftcore.studio.settings import StudioSettings
from rftdata.annotations import LabelKind, define_kinds
from rftdata.errors import ConfigError
from tests.store.studio.test_studio_sessions import num_connections
from tests.support.studio_site import FROM_HERE, PASSWORD, Site, open_site
from tests.support.waiting import wait_until

ANSWER = {"item": "1", "choice": "pass"}


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "::", "example.org"])
def test_other_machines_reach_no_studio_without_encryption(host: str) -> None:
    with pytest.raises(ConfigError, match="without encryption"):
        StudioSettings(host=host)
    StudioSettings(host=host, behind_proxy=True, hosts=("studio.example.org",))


def test_it_listens_on_this_machine_alone(site: Site) -> None:
    assert StudioSettings().host == "127.0.0.1"
    assert site.server._socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(ConfigError, match="without encryption"):
        studio(host="0.0.0.0")


@pytest.mark.parametrize("name", ["evil.example.org", "127.0.0.1.evil.example.org", "", "localhost.", "[::2]:80"])
def test_a_forged_host_is_refused(site: Site, name: str) -> None:
    with site.stranger(Host=name) as client:
        assert client.get("/sign-in").status_code == 400


def test_a_one_time_address_signs_in_once_and_is_cleaned(site: Site) -> None:
    address = site.server.address()
    with site.stranger() as first, site.stranger() as second:
        answer = first.get(address)
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert address.partition("token=")[2] not in answer.text and 'content="0; url=/"' in answer.text
        assert first.get("/review").status_code == 200
        assert second.get(address).status_code == 401
        assert second.get("/review").headers["location"] == "/sign-in?next=%2Freview"


def test_neither_tokens_nor_passwords_are_logged(
    studio_buffer: rftdata.Buffer, ada: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        open_site(studio_buffer) as site,
        site.owner() as owner,
        site.stranger() as first,
        site.account(ada) as labeller,
        site.stranger(**FROM_HERE) as wrong,
    ):
        token = site.server.address().partition("token=")[2]
        assert [first.get("/", params={"token": token}).status_code for _ in range(2)] == [200, 401]
        wrong.post("/sign-in", data={"account": ada, "password": "secret guess"})
        secrets = [PASSWORD, "secret guess", token, *owner.cookies.values(), *labeller.cookies.values()]
        owner.get("/nothing")
    own = [
        record.getMessage() for record in caplog.records if not record.name.startswith("http")
    ]  # not those of the test's client
    printed = "\n".join([*own, *capfd.readouterr()])
    assert not [secret for secret in secrets if secret in printed]


def test_labels_name_the_account_that_signed_in(site: Site, ada: str, studio_buffer: rftdata.Buffer) -> None:
    with site.account(ada) as client:
        assert client.post("/review/answer", data={"item": "2", "choice": "pass", "reward": "0.25"}).status_code == 200
    rows = studio_buffer.sql("SELECT author, session_user_name FROM rft.label WHERE experience_id = 2").to_pylist()
    assert rows == [{"author": ada, "session_user_name": ada}]


def test_an_account_without_the_right_is_told_so_and_changes_nothing(site: Site, studio_buffer: rftdata.Buffer) -> None:
    from tests.support.studio_site import account

    with account(studio_buffer, "rita", "rft_reader"), site.account("rita") as client:
        answer = client.post("/review/answer", data=ANSWER, headers={"Accept": "application/json"})
    assert answer.status_code == 422 and "lacks the right" in answer.json()["problem"]
    with account(studio_buffer, "nils", None), site.stranger(**FROM_HERE) as client:
        answer = client.post("/sign-in", data={"account": "nils", "password": PASSWORD})
    assert answer.status_code == 401 and "GRANT rft_labeler TO nils" in answer.text


def test_a_wrong_password_and_an_unknown_name_look_alike(studio_buffer: rftdata.Buffer, ada: str) -> None:
    with open_site(studio_buffer) as site, site.stranger(**FROM_HERE) as client:
        answers = [
            client.post("/sign-in", data={"account": name, "password": "wrong"}).text.replace(name, "")
            for name in (ada, "nobody")
        ]
    assert answers[0] == answers[1] and "wrong" in answers[0]


def test_an_empty_password_is_not_looked_up_elsewhere(
    studio_buffer: rftdata.Buffer, ada: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    with open_site(studio_buffer) as site, site.stranger(**FROM_HERE) as client:
        assert client.post("/sign-in", data={"account": ada, "password": ""}).status_code in (401, 422)


def test_sign_in_is_limited(studio_buffer: rftdata.Buffer, ada: str) -> None:
    with open_site(studio_buffer) as site, site.stranger(**FROM_HERE) as client:
        tries = [client.post("/sign-in", data={"account": ada, "password": f"guess {n}"}).status_code for n in range(6)]
        assert tries == [401] * 5 + [429]
        assert client.post("/sign-in", data={"account": ada, "password": PASSWORD}).status_code == 429


def test_a_success_and_a_forged_header_do_not_hide_failures_of_an_address(
    studio_buffer: rftdata.Buffer, ada: str
) -> None:
    with open_site(studio_buffer, behind_proxy=True, hosts=("127.0.0.1",)) as site:

        def try_it(account: str, password: str, forged: str) -> int:
            # A proxy may append the address as a header of its own.
            headers = [("x-forwarded-for", forged), ("x-forwarded-for", "203.0.113.9"), *FROM_HERE.items()]
            with site.stranger() as client:
                return client.post(
                    "/sign-in", data={"account": account, "password": password}, headers=headers
                ).status_code

        assert [try_it(f"guessed_{n}", "x", f"6.6.6.{n}") for n in range(4)] == [401] * 4
        assert [try_it(ada, PASSWORD, "6.6.6.7") for _ in range(2)] == [303] * 2
        assert [try_it(f"guessed_{n}", "x", f"6.6.7.{n}") for n in range(2)] == [401, 429]


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "none"},
        {"Origin": "https://evil.example.org"},
        {"Origin": "null"},
        {},
    ],
    ids=str,
)
def test_a_write_from_elsewhere_is_refused(site: Site, headers: dict[str, str]) -> None:
    with site.owner() as client:
        del client.headers["Sec-Fetch-Site"]
        assert client.post("/review/answer", data=ANSWER, headers=headers).status_code == 403
        assert client.post("/sign-in", data={"account": "a", "password": "b"}, headers=headers).status_code == 403


def test_an_older_browser_may_name_its_origin_instead(site: Site) -> None:
    with site.owner() as client:
        del client.headers["Sec-Fetch-Site"]
        assert client.post("/language", data={"language": "zh"}, headers={"Origin": site.origin}).status_code == 200


def test_a_write_without_the_token_of_the_session_is_refused(site: Site) -> None:
    with site.owner() as client, site.owner() as other:
        token = client.headers.pop("X-Studio-Token")
        assert client.post("/review/answer", data=ANSWER).status_code == 403
        assert other.post("/review/answer", data=ANSWER, headers={"X-Studio-Token": token}).status_code == 403


def test_a_write_made_under_another_account_is_refused(site: Site, ada: str, bob: str) -> None:
    with site.account(ada) as first, site.account(bob) as second:
        # The page of bob has loaded, with its token, but what it sends was entered by ada.
        answer = second.post(
            "/review/answer", data=ANSWER, headers={"X-Studio-Identity": first.headers["X-Studio-Identity"]}
        )
        assert answer.status_code == 403 and "entered under another account" in answer.text
        del second.headers["X-Studio-Identity"]
        assert second.post("/review/answer", data=ANSWER).status_code == 403


def written(buffer: rftdata.Buffer) -> int:
    """Return how many rows were ever written, as far as sessions that have ended say; without kinds, which the test itself has just defined."""
    query = (
        "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint AS n FROM pg_stat_user_tables"
        " WHERE schemaname = 'rft' AND relname <> 'label_kind'"
    )
    return int(buffer.sql(query)["n"][0].as_py())


def test_no_get_route_writes(site: Site, ada: str, studio_buffer: rftdata.Buffer) -> None:
    routes = [route for _, router in all_pages() for route in router.routes if isinstance(route, APIRoute)]
    known = {"kind": "helpful", "target": "experience"}
    define_kinds(studio_buffer, [LabelKind("helpful", "bool")], author="olga")
    wait_until(lambda: not num_connections(studio_buffer, ada))  # what they did is counted when they have ended
    before = written(studio_buffer)
    with site.account(ada) as client:
        for route in routes:
            path = route.path.format(**{each.name: known.get(each.name, "1") for each in route.dependant.path_params})
            fields = {each.name: "1" for each in route.dependant.query_params}
            answer = client.get(path, params={**ANSWER, **fields} if "POST" in (route.methods or ()) else fields)
            is_read = "GET" in (route.methods or ()) or any(
                each.path == route.path for each in routes if each.methods == {"GET"}
            )
            assert is_read or answer.status_code in (404, 405), path
    wait_until(lambda: not num_connections(studio_buffer, ada))
    assert written(studio_buffer) == before


def test_every_answer_has_the_policy(site: Site) -> None:
    with site.owner() as client, site.stranger() as stranger:
        answers = [
            client.get("/review"),
            client.get("/nothing"),
            client.get("/static/studio.js"),
            stranger.get("/sign-in"),
        ]
        answers += [
            stranger.get("/review"),
            client.post("/review/answer", data={}),
            stranger.get("/sign-in", headers={"Host": "x"}),
        ]
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert answers[0].headers["cache-control"] == "no-store"


def test_a_body_is_limited_whether_or_not_it_names_its_length(site: Site) -> None:
    with site.owner() as client:
        assert client.post("/review/answer", data={**ANSWER, "reason": "x" * 2**20}).status_code == 413
        pieces = (b"reason=" + b"x" * 2**16 for _ in range(20))
        headers = {"Content-Type": "application/x-www-form-urlencoded"}
        assert client.post("/review/answer", content=pieces, headers=headers).status_code == 413


def raw_answer(site: Site, request: bytes) -> bytes:
    """Send bytes; return what the studio sends until it closes the connection."""
    with socket.create_connection(("127.0.0.1", site.server.port), timeout=60) as line:
        line.sendall(request)
        return b"".join(iter(lambda: line.recv(65536), b""))


def test_two_names_of_the_host_are_refused(site: Site) -> None:
    for names in (("127.0.0.1", "evil.example.org"), ("evil.example.org", "127.0.0.1"), ("127.0.0.1", "127.0.0.1")):
        hosts = "".join(f"Host: {name}\r\n" for name in names)
        answer = raw_answer(site, f"GET /sign-in HTTP/1.1\r\n{hosts}Connection: close\r\n\r\n".encode())
        assert answer.startswith(b"HTTP/1.1 400")


def test_a_body_that_does_not_arrive_ends_its_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "BODY_S", 1.0)
    form = "Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n"
    answer = raw_answer(
        site, f"POST /sign-in HTTP/1.1\r\nHost: 127.0.0.1\r\nSec-Fetch-Site: same-origin\r\n{form}\r\na".encode()
    )
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive in time" in answer
    with site.stranger() as client, client.stream("GET", "/static/studio.js") as other:
        assert other.status_code == 200


def test_a_sign_in_leads_to_no_other_site(site: Site, ada: str) -> None:
    for path in ("//evil.example.org", "https://evil.example.org", "/\\evil.example.org"):
        with site.stranger(**FROM_HERE) as client:
            answer = client.post("/sign-in", params={"next": path}, data={"account": ada, "password": PASSWORD})
            assert answer.headers.get("location", "/") == "/"


def test_no_path_leads_out_of_the_static_files(site: Site) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", site.server.port)  # a client that leaves paths as they are
    for path in ("/static/../app.py", "/static/..%2fapp.py", "/static/%2e%2e/app.py", "/static//etc/passwd"):
        connection.request("GET", path)
        answer = connection.getresponse()
        assert answer.status in (404, 405) and b"import" not in answer.read()
    connection.close()


def test_a_studio_behind_a_proxy_has_no_one_time_address_and_a_secure_cookie(
    studio_buffer: rftdata.Buffer, ada: str
) -> None:
    with open_site(studio_buffer, behind_proxy=True, hosts=("studio.example.org",)) as site:
        assert site.server.address() == "https://studio.example.org/"
        with site.stranger(Host="studio.example.org", **FROM_HERE) as client:
            answer = client.post("/sign-in", data={"account": ada, "password": PASSWORD})
    assert answer.headers["set-cookie"].startswith("__Host-rft_studio=") and "Secure" in answer.headers["set-cookie"]


def test_signing_out_ends_the_session(site: Site, ada: str) -> None:
    with site.account(ada) as client:
        cookie = dict(client.cookies)
        assert client.post("/sign-out").headers["hx-redirect"] == "/sign-in"
        with site.stranger() as again:
            again.cookies.update(cookie)
            assert again.get("/review").status_code == 303
