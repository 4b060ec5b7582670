"""A provider of OpenID Connect that checks what a client sends, and whose tokens a test may forge. It signs with joserfc, the studio verifies with PyJWT."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, RSAKey

CLIENT, SECRET = "rft-studio", "client secret é/:"
Claims = dict[str, Any]


class OidcProvider:
    """A provider on this machine.

    Attributes:
        person: claims of the person who signs in there.
        forge: makes a token of the right claims; None: the right token.
        metadata: added to the discovery document.
        keys_asked: how often the keys were asked for.
        keys_s: how long their answer takes.
        answers: replaces the answer of a path; None: as usual.
    """

    def __init__(self, port: int) -> None:
        self.issuer = f"http://127.0.0.1:{port}"
        self.key = RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})
        self.curve = ECKey.generate_key("P-256", {"kid": "two", "use": "sig"})
        self.person: Claims = {"sub": "ada-1", "email": "ada@example.org", "email_verified": True}
        self.forge: Callable[[Claims], str] | None = None
        self.metadata: Claims = {}
        self.answers: dict[str, tuple[int, bytes]] = {}
        self.keys_asked, self.keys_s = 0, 0.0
        self._codes: dict[str, Claims] = {}

    def sign(self, claims: Claims, key: RSAKey | ECKey | None = None, **header: Any) -> str:
        """Return a signed token."""
        used = key or self.key
        names = {"alg": "ES256" if isinstance(used, ECKey) else "RS256", "kid": used.kid, **header}
        return jwt.encode(names, claims, used, algorithms=[names["alg"]])

    def unsigned(self, claims: Claims, algorithm: str = "none") -> str:
        """Return a token without a signature."""
        return (
            ".".join(_encoded(json.dumps(part).encode()) for part in ({"alg": algorithm, "kid": "one"}, claims)) + "."
        )

    def symmetric(self, claims: Claims, secret: bytes) -> str:
        """Return a token signed with a secret. By hand, since no library signs with a public key as a secret."""
        text = self.unsigned(claims, "HS256").rstrip(".")
        return f"{text}.{_encoded(hmac.digest(secret, text.encode(), 'sha256'))}"

    def authorize(self, asked: dict[str, str]) -> tuple[str, str]:
        """Sign the person in; return the address to which the browser goes back, and the code."""
        assert asked["response_type"] == "code" and asked["client_id"] == CLIENT and "openid" in asked["scope"].split()
        assert asked["code_challenge_method"] == "S256" and asked["redirect_uri"].endswith("/sign-in/proved")
        code = secrets.token_urlsafe(16)
        self._codes[code] = dict(asked)
        answer = {"code": code, "state": asked["state"]}
        if self.metadata.get("authorization_response_iss_parameter_supported"):
            answer["iss"] = self.issuer
        return f"{asked['redirect_uri']}?{urlencode(answer)}", code

    def redeem(self, form: dict[str, str], authorization: str | None) -> tuple[int, Claims]:
        """Answer a request for a token."""
        asked = self._codes.pop(form.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        if asked is None or asked["code_challenge"] != challenge.decode().rstrip("="):
            return 400, {"error": "invalid_grant"}
        user, _, password = base64.b64decode((authorization or "").removeprefix("Basic ")).decode().partition(":")
        if (unquote(user), unquote(password)) != (CLIENT, SECRET) or form["redirect_uri"] != asked["redirect_uri"]:
            return 401, {"error": "invalid_client"}
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 300, "nonce": asked["nonce"]}
        claims |= self.person
        return 200, {
            "token_type": "Bearer",
            "access_token": "x",
            "id_token": self.sign(claims) if self.forge is None else self.forge(claims),
        }

    def discovery(self) -> Claims:
        """Return what the provider says about itself."""
        endpoints = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
        return {
            "issuer": self.issuer,
            **{name: f"{self.issuer}/{path}" for name, path in endpoints.items()},
            **self.metadata,
        }


def _encoded(part: bytes) -> str:
    return base64.urlsafe_b64encode(part).decode().rstrip("=")


@contextmanager
def open_provider() -> Iterator[OidcProvider]:
    """Serve a provider while the block runs."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path, asked = urlsplit(self.path).path, parse_qs(urlsplit(self.path).query)
            if path in provider.answers:
                self._send(*provider.answers[path])
            elif path == "/authorize":
                address, _ = provider.authorize({name: values[0] for name, values in asked.items()})
                self._send(303, b"", address)
            elif path == "/keys":
                provider.keys_asked += 1
                time.sleep(provider.keys_s)
                self._send_json(200, KeySet([provider.key, provider.curve]).as_dict(private=False))
            else:
                self._send_json(200, provider.discovery())

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            if "/token" in provider.answers:
                self._send(*provider.answers["/token"])
            else:
                fields = {name: values[0] for name, values in form.items()}
                self._send_json(*provider.redeem(fields, self.headers.get("Authorization")))

        def _send_json(self, status: int, value: Any) -> None:
            self._send(status, json.dumps(value).encode())

        def _send(self, status: int, body: bytes, location: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if location is not None:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    provider = OidcProvider(server.server_port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
