"""The HTTP server of the gateway: routes, limits and keys. uvicorn speaks HTTP; the rest needs no framework."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import uvicorn

from rftcore.gateway.answering import Answered, Answering
from rftcore.gateway.errors import ApiError, session_closed
from rftcore.gateway.parts import Parts
from rftcore.gateway.session import GatewaySession
from rftcore.gateway.stream import Stream

MAX_BODY_BYTES = 32 << 20
_BACKLOG = 4096
_KEEP_ALIVE_S = 600
_NUM_ENDED = 65536
_HOSTS = ("127.0.0.1", "localhost")
_LAST_S = 5.0

_Receive = Callable[[], Awaitable[Mapping[str, Any]]]
_Send = Callable[[dict[str, Any]], Awaitable[None]]


class _Server(uvicorn.Server):
    """Leaves signals to the process in whose event loop it runs."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Gateway:
    """The server of one event loop, on a free port of this host alone."""

    def __init__(self) -> None:
        self._sessions: dict[str, GatewaySession] = {}
        self._ended: dict[str, None] = {}  # the keys of the last sessions, in their order
        # With this protocol asyncio sends small packets at once. Otherwise an answer waits 40 ms for the acknowledgement of its headers.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen(_BACKLOG)
        self._port = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                self._app,
                interface="asgi3",
                proxy_headers=False,
                loop="none",
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="warning",
                access_log=False,
                backlog=_BACKLOG,
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving = asyncio.get_running_loop().create_task(self._serve())

    def open(self, session: GatewaySession) -> str:
        """Serve a session; return its base URL."""
        self._sessions[session.key] = session
        return f"http://127.0.0.1:{self._port}/s/{session.key}/v1"

    def end(self, session: GatewaySession) -> None:
        """Close a session and refuse its key."""
        session.close()
        if self._sessions.pop(session.key, None) is not None:
            self._ended[session.key] = None
            if len(self._ended) > _NUM_ENDED:
                del self._ended[next(iter(self._ended))]

    async def close(self) -> None:
        """End the server; called in its event loop."""
        for session in list(self._sessions.values()):
            self.end(session)
        self._server.should_exit = True
        await asyncio.wait([self._serving], timeout=_LAST_S)

    async def _serve(self) -> None:
        try:
            await self._server.serve([self._socket])
        finally:  # the event loop may be closed with it
            for connection in list(self._server.server_state.connections):
                connection.shutdown()
            for server in self._server.servers:
                server.close()
            self._socket.close()

    async def _app(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        try:
            if sum(name == b"host" for name, _ in scope["headers"]) != 1:
                raise ApiError(400, "a request needs one header Host", code="forbidden_host")
            session, route = self._routed(scope["path"], headers)
            if route == "/chat/completions":
                _refuse_method(scope["method"], "POST")
                await _complete(session, headers, receive, send)
                return
            _refuse_method(scope["method"], "GET")
            await _send_json(send, 200, json.dumps(_models(session, route)).encode())
        except ApiError as error:
            await _send_json(send, error.status, json.dumps(error.body).encode(), error.headers)

    def _routed(self, path: str, headers: Mapping[str, str]) -> tuple[GatewaySession, str]:
        """Return the session of a request, and its path below /v1.

        Raises:
            ApiError: the key is not known, or there is no such path.
        """
        host = headers["host"]
        if (
            host.removesuffix(f":{self._port}") not in _HOSTS
        ):  # a page in a browser may resolve a name of its own to this address
            raise ApiError(403, f"the host {host!r} is not served here", code="forbidden_host")
        key = headers.get("authorization", "").removeprefix("Bearer ").strip()
        if path.startswith("/s/"):
            key, _, path = path.removeprefix("/s/").partition("/")
            path = f"/{path}"
        session = self._sessions.get(key)
        if session is None:
            if key in self._ended:
                raise session_closed()
            what = "Incorrect API key provided; it is that of OPENAI_API_KEY, or a part of OPENAI_BASE_URL"
            raise ApiError(401, what, code="invalid_api_key", kind="authentication_error")
        route = path.removeprefix("/v1")
        if route == path or not (route == "/chat/completions" or route == "/models" or route.startswith("/models/")):
            what = f"Unknown request URL: {path}; this endpoint has /v1/models and /v1/chat/completions"
            raise ApiError(404, what, code="unknown_url")
        return session, route


def _models(session: GatewaySession, route: str) -> dict[str, Any]:
    asked = route.removeprefix("/models").removeprefix("/")
    if not asked:
        return {"object": "list", "data": [_model(name) for name in session.settings.models]}
    if not session.settings.has(asked):
        raise ApiError(404, f"The model {asked!r} does not exist", param="model", code="model_not_found")
    return _model(asked)


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "rft"}


async def _complete(session: GatewaySession, headers: Mapping[str, str], receive: _Receive, send: _Send) -> None:
    """Answer a request for a chat completion, unless its client disconnects before."""
    body = await _body(headers, receive)
    if body is None:
        return
    answering = session.submit(
        body, key=headers.get("idempotency-key"), num_retries=_number(headers.get("x-stainless-retry-count", "0"))
    )
    answering.attach()
    disconnected = asyncio.ensure_future(receive())  # after the body, this ends with the connection
    delivered = False
    try:
        if answering.parts is not None:
            delivered = await _send_stream(answering, answering.parts, disconnected, send)
        elif (answered := await _answered(answering, disconnected)) is not None:
            await _send_json(send, 200, answered.completion.body())
            delivered = not disconnected.done()
    finally:
        disconnected.cancel()
        answering.detach(delivered=delivered)


async def _send_stream(answering: Answering, parts: Parts, disconnected: asyncio.Future[Any], send: _Send) -> bool:
    """Send an answer while it is sampled; return whether its client has all of it. After the first event, an error is an event, the last one.

    Raises:
        ApiError: it failed before its first event.
    """
    stream = Stream(parts.model, len(parts.shown))
    try:
        while not answering.task.done():
            changed = parts.changed
            await _send_events(stream, stream.parts(parts.shown), send)
            await asyncio.wait((answering.task, disconnected, changed), return_when=asyncio.FIRST_COMPLETED)
            if disconnected.done():
                return False
        answered = await _answered(answering, disconnected)
        if answered is None:
            return False
        await _send_events(stream, stream.rest(answered.completion, with_usage=answered.with_usage), send)
        delivered = not disconnected.done()
    except (ApiError, asyncio.CancelledError) as error:
        failure = error if isinstance(error, ApiError) else session_closed()
        if not stream.has_begun:
            raise failure from None
        await send({"type": "http.response.body", "body": stream.error(failure), "more_body": True})
        delivered = False
    await send({"type": "http.response.body", "body": b""})
    return delivered


async def _send_events(stream: Stream, events: Iterator[bytes], send: _Send) -> None:
    is_first = not stream.has_begun
    for event in events:
        if is_first:  # not before: a client that waits for it may send its request again
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            is_first = False
        await send({"type": "http.response.body", "body": event, "more_body": True})


async def _answered(answering: Answering, disconnected: asyncio.Future[Any]) -> Answered | None:
    """Return what was sampled; None if the client has gone.

    Raises:
        ApiError: it failed, or the rollout has ended, the event loop with it.
    """
    try:
        await asyncio.wait((answering.task, disconnected), return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        raise session_closed() from None
    if disconnected.done():
        return None
    if answering.task.cancelled():
        raise session_closed()
    return answering.task.result()


async def _body(headers: Mapping[str, str], receive: _Receive) -> bytes | None:
    """Return the body of a request; None if its client has gone.

    Raises:
        ApiError: it is too long.
    """
    too_long = ApiError(413, f"the body has more than {MAX_BODY_BYTES} bytes", code="request_too_large")
    if _number(headers.get("content-length", "0")) > MAX_BODY_BYTES:
        raise too_long
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > MAX_BODY_BYTES:
            raise too_long
        if not message.get("more_body", False):
            return b"".join(parts)


def _number(text: str) -> int:
    """Return the number of a header; 0 if it is none."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0


def _refuse_method(method: str, allowed: str) -> None:
    if method != allowed:
        raise ApiError(405, f"{method} is not allowed here; use {allowed}", code="method_not_allowed")


async def _send_json(send: _Send, status: int, body: bytes, headers: list[tuple[bytes, bytes]] | None = None) -> None:
    common = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*common, *(headers or ())]})
    await send({"type": "http.response.body", "body": body})
