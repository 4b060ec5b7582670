"""Sign-in by a provider of OpenID Connect: what is proved counts, and everything that is forged, stale or meant for others is refused."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from joserfc.jwk import RSAKey

import rftdata
from rftcore.studio.oidc import flows
from rftcore.studio.oidc import provider as provider_module
from rftcore.studio.oidc.settings import CLIENT_SECRET, OidcSettings, read_settings
from rftcore.studio.settings import StudioSettings
from rftdata.errors import ConfigError
from tests.support.browsers import PATIENCE_MS, REPORT_VIOLATIONS, violations
from tests.support.oidc_provider import CLIENT, SECRET, Claims, OidcProvider, open_provider
from tests.support.ports import closed_port
from tests.support.studio_site import FROM_HERE, PASSWORD, Site, open_site, with_token
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def provider() -> Iterator[OidcProvider]:
    with open_provider() as opened:
        yield opened


def settings_for(folder: Path, issuer: str, accounts: dict[str, str], **values: Any) -> OidcSettings:
    """Write the files of an owner; return what the studio reads."""
    for name, text in (
        ("passwords", "".join(f"{each}:{PASSWORD}\n" for each in accounts.values())),
        ("secret", SECRET),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    file = folder / "oidc.yaml"
    written = {
        "issuer": issuer,
        "client_id": CLIENT,
        "client_secret_file": "secret",
        "passwords_file": "passwords",
        "accounts": accounts,
        **values,
    }
    file.write_text(json.dumps(written))
    return read_settings(file)


@pytest.fixture(scope="module")
def oidc(provider: OidcProvider, tmp_path_factory: pytest.TempPathFactory, ada: str) -> OidcSettings:
    return settings_for(tmp_path_factory.mktemp("oidc"), provider.issuer, {"ada-1": ada, "left": "studio_left"})


@pytest.fixture(scope="module")
def oidc_site(studio_buffer: rftdata.Buffer, oidc: OidcSettings) -> Iterator[Site]:
    with open_site(studio_buffer, oidc=oidc) as site:
        site.server.studio.app._app.state.provider_visits._count = 10_000  # type: ignore[attr-defined]
        yield site


@pytest.fixture(autouse=True)
def as_usual(provider: OidcProvider) -> Iterator[None]:
    person, key = dict(provider.person), provider.key
    yield
    provider.key = key
    provider.forge, provider.metadata, provider.answers, provider.person, provider.keys_s = None, {}, {}, person, 0.0


def answer_of(client: httpx.Client, next_path: str = "/review") -> str:
    """Go to the provider as a browser does; return the address to which it sends the browser back."""
    sent = client.get("/sign-in/provider", params={"next": next_path})
    assert sent.status_code == 303, sent.text
    with httpx.Client(trust_env=False) as elsewhere:
        return str(elsewhere.get(sent.headers["location"]).headers["location"])


def sign_in(client: httpx.Client) -> httpx.Response:
    return client.get(answer_of(client))


def test_a_proved_person_works_with_the_mapped_account(
    oidc_site: Site, ada: str, studio_buffer: rftdata.Buffer, provider: OidcProvider
) -> None:
    for key in (provider.key, provider.curve):
        provider.forge = lambda claims, key=key: provider.sign(claims, key)
        with oidc_site.stranger(**FROM_HERE) as client:
            answer = client.get(answer_of(client, "/label?x=1&y=%22"))
            assert answer.status_code == 200 and 'content="0; url=/label?x=1&amp;y=' in answer.text
            cookies = answer.headers.get_list("set-cookie")
            assert "SameSite=strict" in cookies[0] and "HttpOnly" in cookies[0]
            assert f"Account of the database: {ada}" in client.get("/review").text
            with_token(client)
            # A query of the console is this account's, and there is no other account to go back to.
            for reset in ("default", "none", "postgres"):
                query = f"SELECT session_user, current_user FROM (SELECT set_config('role', '{reset}', true)) x"
                told = client.post("/sql", data={"query": query})
                assert told.status_code == 422 or told.text.count(f">{ada}<") == 2, told.text
            told = client.post(
                "/sql", data={"query": "SELECT set_config('session_authorization', 'default', true), session_user"}
            )
            assert f">{ada}<" in told.text
            if key is provider.key:
                assert (
                    client.post("/review/answer", data={"item": "2", "choice": "pass", "reward": "0.5"}).status_code
                    == 200
                )
            client.post("/sign-out")
    rows = studio_buffer.sql("SELECT author, session_user_name FROM rft.label WHERE experience_id = 2").to_pylist()
    assert rows == [{"author": ada, "session_user_name": ada}]


def other_key(provider: OidcProvider) -> RSAKey:
    return RSAKey.generate_key(2048, {"kid": provider.key.kid})


FORGERIES: dict[str, Callable[[OidcProvider, Claims], str]] = {
    "unsigned": lambda p, c: p.unsigned(c),
    "unsigned, in capitals": lambda p, c: p.unsigned(c, "None"),
    "without a signature": lambda p, c: p.sign(c).rpartition(".")[0] + ".",
    "of another key with the same name": lambda p, c: p.sign(c, other_key(p)),
    "of a key that the provider does not have": lambda p, c: p.sign(c, kid="three"),
    "with a key of its own": lambda p, c: p.sign(c, other_key(p), jwk=other_key(p).as_dict(private=False)),
    "with an address of keys of its own": lambda p, c: p.sign(c, other_key(p), jku="http://127.0.0.1:1/keys"),
    "signed with the public key as a secret": lambda p, c: p.symmetric(c, p.key.as_pem(private=False)),
    "signed with the client's secret": lambda p, c: p.symmetric(c, SECRET.encode()),
    "with other claims under the signature": lambda p, c: ".".join(
        [p.sign(c).split(".")[0], p.unsigned({**c, "sub": "bob"}).split(".")[1], p.sign(c).split(".")[2]]
    ),
    "unsigned, with the name of an algorithm": lambda p, c: p.unsigned(c, "RS256"),
    "expired": lambda p, c: p.sign({**c, "exp": int(time.time()) - 120}),
    "without an end": lambda p, c: p.sign({name: value for name, value in c.items() if name != "exp"}),
    "of the future": lambda p, c: p.sign({**c, "iat": int(time.time()) + 600}),
    "not valid yet": lambda p, c: p.sign({**c, "nbf": int(time.time()) + 600}),
    "for another client": lambda p, c: p.sign({**c, "aud": "another"}),
    "for several clients, without a name of the one": lambda p, c: p.sign({**c, "aud": [CLIENT, "another"]}),
    "for several clients, issued to another": lambda p, c: p.sign({**c, "aud": [CLIENT, "another"], "azp": "another"}),
    "without an audience": lambda p, c: p.sign({name: value for name, value in c.items() if name != "aud"}),
    "of another issuer": lambda p, c: p.sign({**c, "iss": "https://evil.example.org"}),
    "of an issuer that begins alike": lambda p, c: p.sign({**c, "iss": p.issuer + "/"}),
    "of another sign-in": lambda p, c: p.sign({**c, "nonce": "another"}),
    "without a nonce": lambda p, c: p.sign({name: value for name, value in c.items() if name != "nonce"}),
    "with a nonce that is no text": lambda p, c: p.sign({**c, "nonce": [c["nonce"]]}),
    "without a subject": lambda p, c: p.sign({name: value for name, value in c.items() if name != "sub"}),
    "that is no token": lambda p, c: "x.y.z",
    "that is empty": lambda p, c: "",
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_token_is_refused(
    oidc_site: Site, provider: OidcProvider, forgery: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens: list[str] = []

    def forge(claims: Claims) -> str:
        tokens.append(FORGERIES[forgery](provider, claims))
        return tokens[-1]

    provider.forge = forge
    with oidc_site.stranger() as client:
        answer = sign_in(client)
        assert answer.status_code == 401 and "is not accepted" in answer.text
        assert client.get("/review").status_code == 303
    assert "has failed" in caplog.text and not [token for token in tokens if token and token in caplog.text]


def test_a_token_of_an_earlier_sign_in_is_refused(oidc_site: Site, provider: OidcProvider) -> None:
    kept: list[str] = []

    def first(claims: Claims) -> str:
        kept.append(provider.sign(claims))
        return kept[0]

    provider.forge = first
    with oidc_site.stranger() as client:
        assert sign_in(client).status_code == 200
    with oidc_site.stranger() as client:
        assert sign_in(client).status_code == 401


def test_an_answer_counts_once_and_in_the_browser_that_asked(
    oidc_site: Site, provider: OidcProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    with oidc_site.stranger() as client, oidc_site.stranger() as victim:
        address = answer_of(client)
        assert victim.get(address).status_code == 401  # nobody is signed in as the one who sent the address
        second = answer_of(client)  # in another tab
        assert client.get(address).status_code == 200
        assert client.get(address).status_code == 401
        assert client.get(second).status_code == 200
        for path in ("/sign-in/proved", "/sign-in/proved?state=%00&code=x", "/sign-in/proved?state=" + "x" * 9000):
            assert client.get(path).status_code in (400, 401)
        late = answer_of(client)
        monkeypatch.setattr(flows, "LIFE_S", -1.0)
        assert client.get(late).status_code == 401


def test_a_code_of_another_person_does_not_fit(oidc_site: Site) -> None:
    """PKCE: the provider gives no token for a code that another browser has asked for."""
    with oidc_site.stranger() as client, oidc_site.stranger() as other:
        mine, stolen = (parse_qs(urlsplit(answer_of(each)).query) for each in (client, other))
        answer = client.get("/sign-in/proved", params={"state": mine["state"][0], "code": stolen["code"][0]})
        assert answer.status_code == 401 and "is not accepted" in answer.text


def test_an_answer_of_another_issuer_is_refused(oidc_site: Site, provider: OidcProvider) -> None:
    with oidc_site.stranger() as client:
        assert client.get(answer_of(client) + "&iss=https%3A%2F%2Fevil.example.org").status_code == 401
        provider.metadata = {"authorization_response_iss_parameter_supported": True}
        known = oidc_site.server.studio.app._app.state.provider  # type: ignore[attr-defined]
        known._metadata_until = 0.0
        address = answer_of(client)
        assert client.get(address.partition("&iss=")[0]).status_code == 401
        assert client.get(answer_of(client)).status_code == 200
        known._metadata_until = 0.0


def test_people_without_an_account_are_told_whom_to_ask(
    oidc_site: Site, provider: OidcProvider, caplog: pytest.LogCaptureFixture
) -> None:
    for person in ("eve", "<img src=x onerror=alert(1)>", "ada-1 ", "ADA-1", "{account}", "x\u202ey"):
        provider.person = {"sub": person}
        with oidc_site.stranger() as client:
            answer = sign_in(client)
            assert answer.status_code == 403 and "Ask the owner of the studio" in answer.text
            assert "<img" not in answer.text and "\u202e" not in answer.text
            assert client.get("/review").status_code == 303
    provider.person = {"sub": "left"}  # mapped, and not an account of the database any more
    with oidc_site.stranger() as client:
        answer = sign_in(client)
        assert answer.status_code == 500 and "no valid password of your account studio_left" in answer.text
    assert PASSWORD not in caplog.text


def test_an_address_counts_if_the_provider_has_verified_it(
    studio_buffer: rftdata.Buffer, provider: OidcProvider, ada: str, tmp_path: Path
) -> None:
    settings = settings_for(tmp_path, provider.issuer, {"ada@example.org": ada}, claim="email")
    with open_site(studio_buffer, oidc=settings) as site:
        for verified, status in ((True, 200), (False, 403), ("true", 403), (None, 403)):
            provider.person = {"sub": "x", "email": "ada@example.org", "email_verified": verified}
            with site.stranger() as client:
                assert sign_in(client).status_code == status
        provider.person = {"sub": "x", "email": ["ada@example.org"], "email_verified": True}
        with site.stranger() as client:
            assert sign_in(client).status_code == 403


def test_a_provider_that_fails_is_told_and_new_keys_are_found(
    studio_buffer: rftdata.Buffer, provider: OidcProvider, oidc: OidcSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "_KEEP_S", -1.0)  # it is asked anew each time
    monkeypatch.setattr(provider_module, "_ASK_AGAIN_S", -1.0)
    path = "/.well-known/openid-configuration"
    wrong = [
        {path: (500, b"{}")},
        {path: (200, b"no JSON")},
        {path: (200, b"[]")},
        {path: (200, b'{"issuer": "https://evil.example.org"}')},
        {path: (200, b" " * 2**21)},
        {path: (302, b"{}")},
        {path: (200, b"[" * 100_000)},
    ]
    with open_site(studio_buffer, oidc=oidc) as site, site.stranger() as client:
        for answers in wrong:
            provider.answers = dict(answers)
            told = client.get("/sign-in/provider")
            assert told.status_code == 503 and "does not answer as it should" in told.text
        provider.answers = {}
        provider.metadata = {"token_endpoint": "http://192.0.2.1/token"}
        assert sign_in(client).status_code == 503
        provider.metadata = {}
        assert sign_in(client).status_code == 200
        monkeypatch.setattr(provider_module, "_KEEP_S", 3600.0)
        provider.key = RSAKey.generate_key(2048, {"kid": "new"})
        assert sign_in(client).status_code == 200
        for answer in ((200, b"{}"), (200, b'{"id_token": 5}'), (503, b"{}")):
            provider.answers = {"/token": answer}
            assert sign_in(client).status_code == 503
        provider.answers = {}


def test_unknown_keys_are_asked_for_once_in_a_while(oidc_site: Site, provider: OidcProvider) -> None:
    provider.forge = lambda claims: provider.sign(claims, kid="unknown")
    with oidc_site.stranger() as client:
        before = provider.keys_asked
        for _ in range(5):
            assert sign_in(client).status_code == 401
    assert provider.keys_asked <= before + 1


def test_first_sign_ins_at_once_share_the_keys_and_a_failure_is_not_kept(
    studio_buffer: rftdata.Buffer, provider: OidcProvider, oidc: OidcSettings
) -> None:
    with open_site(studio_buffer, oidc=oidc) as site, ExitStack() as stack:
        clients = [stack.enter_context(site.stranger()) for _ in range(3)]
        provider.answers = {"/keys": (500, b"{}")}
        assert sign_in(clients[0]).status_code == 503
        provider.answers, provider.keys_s = {}, 0.5
        before = provider.keys_asked
        addresses = [answer_of(client) for client in clients]
        with ThreadPoolExecutor() as threads:
            answers = list(threads.map(lambda client, address: client.get(address), clients, addresses))
        assert [answer.status_code for answer in answers] == [200] * 3 and provider.keys_asked == before + 1


def test_a_sign_in_ends_the_former_session_and_begins_on_a_page_of_the_studio(oidc_site: Site) -> None:
    sessions = oidc_site.server.studio.sessions._sessions
    with oidc_site.stranger() as client:
        assert sign_in(client).status_code == 200
        name = oidc_site.server.studio.app._app.state.cookie_name  # type: ignore[attr-defined]
        former = client.cookies[name]
        address = answer_of(client)
        for site_of_link in ("cross-site", "same-site"):
            told = client.get("/sign-in/provider", headers={"Sec-Fetch-Site": site_of_link})
            assert told.status_code == 200 and "/sign-in/provider?next=" in told.text
        del client.cookies[name]  # as a browser that another site redirects
        assert client.get(address).status_code == 200
        assert client.cookies[name] != former and former not in sessions


def test_a_proved_session_ends_although_it_is_used(oidc_site: Site) -> None:
    with oidc_site.stranger() as client:
        assert sign_in(client).status_code == 200 and client.get("/review").status_code == 200
        (session,) = [each for each in oidc_site.server.studio.sessions._sessions.values() if each.ends < math.inf][-1:]
        session.ends = time.monotonic() - 1
        assert client.get("/review").status_code == 303


def test_settings_are_refused_where_secrets_would_leak_or_people_could_not_sign_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(message: str, **values: Any) -> None:
        with pytest.raises(ConfigError, match=message):
            settings_for(tmp_path, **{"issuer": "https://id.example.org", "accounts": {"ada-1": "ada"}, **values})

    for issuer in ("http://id.example.org", "id.example.org", "file:///etc/passwd", "http://127.0.0.1.evil.org", ""):
        refused("an address that begins with https://", issuer=issuer)
    refused("accounts", accounts={})
    refused("openid is one of the scopes", scopes=["email"])
    refused("client_secret", client_secret="in the file of settings")
    refused("cannot be read", passwords_file="nothing")
    settings = settings_for(tmp_path, "https://id.example.org", {"ada-1": "ada"})
    with pytest.raises(ConfigError, match="has no password of the account bob"):
        settings.model_copy(update={"accounts": {"x": "bob"}}).check()
    (tmp_path / "passwords").chmod(0o640)
    with pytest.raises(ConfigError, match="other users can read"):
        settings.password_of("ada")
    monkeypatch.setenv(CLIENT_SECRET, "of the environment")
    assert settings.model_copy(update={"client_secret_file": None}).client_secret() == "of the environment"
    assert "other" not in repr(settings) and PASSWORD not in repr(settings) and SECRET not in repr(settings)


def test_addresses_that_a_provider_is_told_do_not_come_from_the_request() -> None:
    proxy = StudioSettings(behind_proxy=True, hosts=("studio.example.org", "other.example.org"))
    own = StudioSettings(host="0.0.0.0", tls_certificate=Path("c"), tls_key=Path("k"), hosts=("studio.example.org",))
    assert proxy.origin(8765) == own.origin(443) == "https://studio.example.org"
    assert own.origin(8443) == "https://studio.example.org:8443"
    assert StudioSettings(host="::1").origin(1) == "http://[::1]:1"


def test_a_person_signs_in_through_the_button_in_a_browser(
    browser: Any, oidc_site: Site, ada: str, provider: OidcProvider
) -> None:
    context = browser.new_context(locale="en")
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(REPORT_VIOLATIONS)
    errors: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: errors.append(message.text) if message.text.startswith("CSP") else None)
    page.goto(f"{oidc_site.origin}/runs")
    assert violations(page) == []
    page.get_by_role("link", name="Sign in with 127.0.0.1").click()
    page.wait_for_url(f"{oidc_site.origin}/runs")
    assert page.locator(".who").inner_text() == ada and errors == []
    context.close()


@contextmanager
def published_provider(person: Claims) -> Iterator[str]:
    """Run the provider of the package oidc-provider-mock, which is built on Authlib."""
    with closed_port() as port:
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "oidc_provider_mock",
            "--port",
            str(port),
            "--require-nonce",
            "true",
        ]
        process = subprocess.Popen(
            [*command, "--user-claims", json.dumps(person)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        issuer = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            try:
                return httpx.get(f"{issuer}/jwks", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(answers)
            yield issuer
        finally:
            process.terminate()
            process.wait()


def test_a_provider_of_another_maker_signs_in(studio_buffer: rftdata.Buffer, ada: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        issuer = stack.enter_context(published_provider({"sub": "ada-1", "email": "ada@example.org"}))
        site = stack.enter_context(open_site(studio_buffer, oidc=settings_for(tmp_path, issuer, {"ada-1": ada})))
        client, elsewhere = stack.enter_context(site.stranger()), stack.enter_context(httpx.Client(trust_env=False))
        address = client.get("/sign-in/provider").headers["location"]
        answer = elsewhere.post(address, data={"sub": "ada-1"})
        assert client.get(answer.headers["location"]).status_code == 200
        assert f"Account of the database: {ada}" in client.get("/review").text


def test_the_secret_and_the_passwords_are_not_logged(
    studio_buffer: rftdata.Buffer, oidc: OidcSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with open_site(studio_buffer, oidc=oidc) as site, site.stranger() as client:
        assert sign_in(client).status_code == 200
        cookies = list(client.cookies.values())
    own = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    assert not [text for text in (PASSWORD, SECRET, *cookies) if text in "\n".join(own)]
