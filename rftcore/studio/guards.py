"""Checks that every request passes before a route sees it, and the headers that every answer has.

- There is one header Host, with an allowed name: otherwise a page of another site could let its own name point to this machine (DNS rebinding).
- A body is at most 1 MB, and arrives within seconds.
- A request that may write comes from a page of the studio: the browser says so (Sec-Fetch-Site, or Origin in older browsers), and it carries the
  token of its session in a header, which forms of other sites cannot send. Only `/sign-in` has no session yet.
- A write names the buffer, the account and the author under which the page wrote it. Under others it is refused, and waits in the tab.
- All paths but `/sign-in`, `/static/` and the one-time address need a session.
- Answers have a content security policy without inline scripts and styles, and are not stored by browsers or proxies.

It is plain ASGI, because middleware of Starlette would hold back event streams.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from urllib.parse import parse_qs, quote, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rftcore.studio.sessions import Session, Sessions
from rftcore.studio.settings import StudioSettings

MAX_BODY = 2**20
BODY_S = 10.0
WRITE_TOKEN = "x-studio-token"
IDENTITY = "x-studio-identity"
_CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "frame-ancestors 'none'; base-uri 'none'"
)
_HEADERS = {
    "content-security-policy": _CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
_OPEN_PATHS = ("/static/", "/sign-in")
_READS = ("GET", "HEAD")


class _BodyRefusedError(Exception):
    """Ends the route that reads the body."""


class Guards:
    """Middleware around the pages.

    Args:
        app: what serves a request that has passed.
        cookie_name: the cookie with the session.
    """

    def __init__(self, app: ASGIApp, settings: StudioSettings, sessions: Sessions, cookie_name: str) -> None:
        self._app, self._settings, self._sessions, self._cookie_name = app, settings, sessions, cookie_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        body = _LimitedBody(receive)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                out = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    out[name] = value
                out.setdefault("cache-control", "no-store")
            await send(message)

        session = self._session(headers)
        scope.setdefault("state", {})["session"] = session
        refusal = self._refusal(scope, headers, session)
        if refusal is not None:
            await _refuse(send_guarded, *refusal)
            return

        async def send_unless_refused(message: Message) -> None:
            if body.refusal is None:
                await send_guarded(message)

        with contextlib.suppress(_BodyRefusedError):
            await self._app(scope, body.receive, send_unless_refused)
        if body.refusal is not None:
            await _refuse(send_guarded, *body.refusal)

    def _session(self, headers: Headers) -> Session | None:
        return self._sessions.find(cookie_parser(headers.get("cookie", "")).get(self._cookie_name))

    def _refusal(
        self, scope: Scope, headers: Headers, session: Session | None
    ) -> tuple[int, str, list[tuple[str, str]]] | None:
        """Return status, text and headers of the answer to a request that is refused; None if it may pass."""
        if len(headers.getlist("host")) > 1:
            return 400, "A request has one header Host.", []
        if _without_port(headers.get("host", "")) not in self._settings.allowed_hosts:
            return 400, "This name is not a name of the studio (--public-name adds one).", []
        if not headers.get("content-length", "0").isdigit() or int(headers.get("content-length", "0")) > MAX_BODY:
            return _TOO_LARGE
        path, method = scope["path"], scope["method"]
        is_write = method not in _READS
        if is_write and not _is_from_here(headers):
            return 403, "Only a page of the studio may send this.", []
        if path.startswith(_OPEN_PATHS) or (path == "/" and method == "GET" and _has_token(scope)):
            return None
        if session is None:
            return _sign_in_first(scope, headers)
        if is_write and headers.get(IDENTITY) != session.identity:
            return _OF_ANOTHER
        if is_write and headers.get(WRITE_TOKEN) != session.write_token:
            return 403, "The page is older than your session: load it again.", []
        return None


_OF_ANOTHER: tuple[int, str, list[tuple[str, str]]] = (
    403,
    "This was entered under another account, or for another buffer. It is kept in this tab: sign in with that account again to send it.",
    [],
)
_TOO_SLOW: tuple[int, str, list[tuple[str, str]]] = (
    408,
    "The request did not arrive in time: send it again.",
    [("connection", "close")],
)
_TOO_LARGE: tuple[int, str, list[tuple[str, str]]] = (413, "A request has at most 1 MB.", [])


def _without_port(host: str) -> str:
    name, separator, port = host.lower().rpartition(":")
    return name if separator and port.isdigit() else host.lower()


def _is_from_here(headers: Headers) -> bool:
    """Return whether the browser says that a page of this origin sends the request."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc.lower() == headers.get("host", "").lower()


def _has_token(scope: Scope) -> bool:
    return "token" in parse_qs(scope["query_string"].decode("latin-1"))


def _sign_in_first(scope: Scope, headers: Headers) -> tuple[int, str, list[tuple[str, str]]]:
    is_page = scope["method"] == "GET" and headers.get("sec-fetch-dest", "document") == "document"
    if not is_page or "hx-request" in headers:
        return 401, "You are not signed in any more. What you have entered is kept: sign in again in this tab.", []
    query = scope["query_string"].decode("latin-1")
    back = scope["path"] + (f"?{query}" if query else "")
    return 303, "", [("location", f"/sign-in?next={quote(back, safe='')}")]


class _LimitedBody:
    """The body of a request, which may come without its length, and slowly.

    Attributes:
        refusal: status, text and headers of the answer to a body that is refused.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive, self._size = receive, 0
        self._deadline = asyncio.get_running_loop().time() + BODY_S
        self._is_complete = False
        self.refusal: tuple[int, str, list[tuple[str, str]]] | None = None

    async def receive(self) -> Message:
        try:
            # What follows the body is the end of the connection, which may take as long as it likes.
            async with asyncio.timeout_at(None if self._is_complete else self._deadline):
                message = await self._receive()
        except TimeoutError:
            self.refusal = _TOO_SLOW
            raise _BodyRefusedError from None
        self._is_complete = not message.get("more_body", False)
        self._size += len(message.get("body", b""))
        if self._size > MAX_BODY:
            self.refusal = _TOO_LARGE
            raise _BodyRefusedError
        return message


async def _refuse(send: Send, status: int, text: str, headers: Iterable[tuple[str, str]]) -> None:
    raw = [(b"content-type", b"text/plain; charset=utf-8")]
    raw += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": text.encode()})
