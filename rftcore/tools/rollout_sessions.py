"""`RolloutSessions`: what the tools of one rollout keep open, such as sessions with MCP servers and sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol


class ToolServer(Protocol):
    """Opens sessions for tools."""

    @property
    def is_shared(self) -> bool:
        """Whether all rollouts of an explorer share one session, which the server closes itself."""

    def session(self) -> Coroutine[Any, Any, Any]:
        """Open a session, which has `close_soon()`."""


class RolloutSessions:
    """The sessions of one rollout, opened when a tool of their server is first called."""

    def __init__(self) -> None:
        self._sessions: dict[ToolServer, asyncio.Task[Any]] = {}

    async def of(self, server: ToolServer) -> Any:
        """Return the session with a server."""
        if server not in self._sessions:
            self._sessions[server] = asyncio.create_task(server.session())
        return await asyncio.shield(self._sessions[server])

    def close(self) -> None:
        """Let the sessions be closed, without waiting for it."""
        for server, opening in self._sessions.items():
            if not server.is_shared:
                opening.add_done_callback(_close_opened)


def _close_opened(opening: asyncio.Task[Any]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close_soon()
