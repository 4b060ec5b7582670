"""Connections of the studio: how many there are, and how long one may wait for its browser.

A browser sends the headers of a request within seconds, and reads what it is sent. A connection that does not is closed, so that no client can hold the
studio's connections by sending or reading a byte now and then. An event stream is a request at work, and lasts. The body of a request has a limit of its
own (`guards`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0
READING_S = 60.0
MOST = 800
# A browser has up to six; several people may share an address.
MOST_OF_ADDRESS = 100


class LimitedConnection(H11Protocol):
    """A connection that is closed when it waits too long. h11 also limits the size of headers; httptools, uvicorn's other parser, does not."""

    has_many_people = False  # whether one address stands for all people, as a proxy's does

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._pages, self.app = self.app, self._serve
        self._num_at_work = 0
        self._headers: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request; abort if there are too many connections."""
        super().connection_made(transport)
        address = self.client[0] if self.client else None
        num_of_address = sum(
            each.client is not None and each.client[0] == address
            for each in self.connections
            if isinstance(each, LimitedConnection)
        )
        if len(self.connections) > MOST or (num_of_address > MOST_OF_ADDRESS and not self.has_many_people):
            transport.abort()
        else:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        _cancel(self._headers)
        _cancel(self._reading)

    def pause_writing(self) -> None:
        """Wait for the browser to read."""
        super().pause_writing()
        self._reading = self.loop.call_later(READING_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Go on, since the browser has read."""
        super().resume_writing()
        _cancel(self._reading)

    def _wait_for_headers(self) -> None:
        self._headers = self.loop.call_later(HEADERS_S, self.transport.abort)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_at_work += 1
        _cancel(self._headers)
        try:
            await self._pages(scope, receive, send)
        finally:
            self._num_at_work -= 1
            # What is left of a request's body is waited for no longer than the next request.
            if self._num_at_work == 0 and not self.transport.is_closing():
                self._wait_for_headers()


class ConnectionOfProxy(LimitedConnection):
    """A connection of the proxy, behind which all people are."""

    has_many_people = True


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
