"""Tools of MCP servers (https://modelcontextprotocol.io), over standard input and output or streamable HTTP.

The schemas are read at the start of an explorer and stay as they are. A rollout has a session of its own, unless the entry says `shared`. Each
session is opened and closed by one task of its own, because its scopes may only be left by the task that entered them, and because a server that
fails must not cancel the rollout that waits for it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rftcore.failures import InfrastructureError, innermost
from rftcore.tools.line_codec import UTF_8_LINES
from rftcore.tools.observations import cut_in_the_middle, raised_text
from rftcore.tools.outcome import Outcome, failed
from rftcore.tools.rollout_sessions import RolloutSessions
from rftcore.tools.settings import HttpServer, McpEntry, StdioServer, ToolLimits
from rftcore.tools.tool import ToolContext, function_schema, valid_name
from rftdata.errors import ConfigError
from rftdata.uri import redacted

if TYPE_CHECKING:
    from mcp import Client

_CONNECT_S = 60.0
_CLOSE_S = 10.0
_MOST_PAGES = 100


class McpSession:
    """A session with a server, opened and closed by a task of its own.

    Args:
        base_dir: folder of the configuration file.
        log: whether what a started server writes to its standard error goes to that of this process.
    """

    def __init__(self, server: StdioServer | HttpServer, base_dir: Path, *, log: bool = False) -> None:
        self._server, self._base_dir, self._log = server, base_dir, log
        self._close = asyncio.Event()
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._serve(), name=f"mcp {name_of(server)}")

    async def client(self) -> Client:
        """Return the client of the session, once it is open.

        Raises:
            InfrastructureError: the session cannot be opened.
        """
        try:
            async with asyncio.timeout(_CONNECT_S):
                return await asyncio.shield(self._opened)
        except TimeoutError:
            raise self.failure(f"it did not answer within {_CONNECT_S:g} s") from None

    def close_soon(self) -> None:
        """Let the session be closed, and the process of a server that was started for it be ended."""
        self._close.set()

    async def close(self) -> None:
        """Close the session, and wait for its end."""
        self.close_soon()
        done, _ = await asyncio.wait([self._task], timeout=_CLOSE_S)
        if not done:
            self._task.cancel()

    def at_end(self, function: Callable[[], None]) -> None:
        """Call a function when the session has ended."""
        self._task.add_done_callback(lambda _: function())

    @property
    def is_usable(self) -> bool:
        """Whether it is open, or still being opened."""
        return not self._close.is_set() and not self._task.done()

    def failure(self, what: str) -> InfrastructureError:
        """Return the error for a session that cannot be used, and let it be closed."""
        self.close_soon()
        return InfrastructureError(f"the MCP server {name_of(self._server)} cannot be used: {what}")

    async def _serve(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                client = await stack.enter_async_context(await self._made(stack))
                self._opened.set_result(client)
                await self._close.wait()
        except Exception as error:  # noqa: BLE001 - it is raised by those who use the session
            if not self._opened.done():
                cause = innermost(error)
                self._opened.set_exception(self.failure(raised_text(cause)))
        finally:
            if not self._opened.done():
                self._opened.cancel()
            elif not self._opened.cancelled():
                self._opened.exception()  # it may be that nothing waits for it

    async def _made(self, stack: AsyncExitStack) -> Client:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if isinstance(server, HttpServer):
            limits = httpx2.Timeout(_CONNECT_S, read=None)  # each call has its own
            headers = server.headers | {name: _variable(variable) for name, variable in server.headers_env.items()}
            http = await stack.enter_async_context(httpx2.AsyncClient(headers=headers, timeout=limits))
            return Client(streamable_http_client(server.url, http_client=http))
        errors = sys.stderr
        if not self._log:
            errors = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - closed at the end of the session
            stack.callback(errors.close)
        program, *arguments = server.command
        env = server.env | {name: _variable(name) for name in server.pass_env}
        cwd = self._base_dir / (server.cwd or ".")
        parameters = StdioServerParameters(command=program, args=arguments, env=env, cwd=cwd, encoding=UTF_8_LINES)
        return Client(stdio_client(parameters, errlog=errors))


class McpServer:
    """The server of an entry, in one explorer. For one event loop.

    Args:
        base_dir: folder of the configuration file.
    """

    def __init__(self, entry: McpEntry, base_dir: Path) -> None:
        self.entry, self._base_dir = entry, base_dir
        self._places = asyncio.Semaphore(entry.max_sessions)
        self._shared: McpSession | None = None
        self._open: set[McpSession] = set()

    @property
    def is_shared(self) -> bool:
        """Whether all rollouts share a session."""
        return self.entry.shared

    async def tools(self) -> list[McpTool]:
        """Return the tools that the server has now.

        Raises:
            ConfigError: the package `mcp` is missing, the server does not answer, or an entry names a tool that it does not have.
        """
        try:
            import mcp  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                "tools of MCP servers need the package mcp", todo="install it: pip install 'rftdata[agents]'"
            ) from error
        session = McpSession(self.entry.mcp, self._base_dir, log=True)
        try:
            client = await session.client()
            async with asyncio.timeout(self.entry.timeout_s):
                listed = await _listed(client)
        except Exception as error:  # what the package raises depends on the transport
            what = (
                f"it did not list its tools within timeout_s = {self.entry.timeout_s:g} s"
                if isinstance(error, TimeoutError)
                else raised_text(innermost(error))
            )
            failure = error if isinstance(error, InfrastructureError) else session.failure(what)
            raise ConfigError(str(failure), todo="check that it starts, and its command or url") from error
        finally:
            await session.close()
        chosen = self.entry.tools
        missing = [name for name in chosen or () if name not in listed]
        if missing:
            raise ConfigError(
                f"the MCP server {name_of(self.entry.mcp)} has no such tool",
                value=missing[0],
                allowed=", ".join(listed),
            )
        return [McpTool(self, listed[name]) for name in (listed if chosen is None else chosen)]

    async def session(self) -> McpSession:
        """Return a session for a rollout, which closes it unless the entry says `shared`."""
        if self.entry.shared:
            if self._shared is None or not self._shared.is_usable:
                self._shared = self._begin()
            return self._shared
        await self._places.acquire()
        session = self._begin()
        session.at_end(self._places.release)
        return session

    async def close(self) -> None:
        """Close all sessions."""
        await asyncio.gather(*(session.close() for session in list(self._open)))

    def _begin(self) -> McpSession:
        session = McpSession(self.entry.mcp, self._base_dir)
        self._open.add(session)
        session.at_end(lambda: self._open.discard(session))
        return session


async def _listed(client: Client) -> dict[str, Any]:
    found: dict[str, Any] = {}
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found |= {tool.name: tool for tool in page.tools}
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


class McpTool:
    """A tool of a server.

    Args:
        listed: the tool as the server lists it.

    Raises:
        ConfigError: its name is not valid.
    """

    takes_context = False

    def __init__(self, server: McpServer, listed: Any) -> None:
        from jsonschema.validators import validator_for

        self._server, self._remote_name = server, listed.name
        self.limits: ToolLimits = server.entry
        self.name = valid_name(server.entry.prefix + listed.name)
        self.schema = function_schema(self.name, listed.description or "", listed.input_schema)
        self._validator = validator_for(listed.input_schema)(listed.input_schema)

    async def call(self, arguments: dict[str, Any], context: ToolContext, sessions: RolloutSessions) -> Outcome:
        """Call the tool; see `BoundTool.call`."""
        wrong = next(iter(self._validator.iter_errors(arguments)), None)
        if wrong is not None:
            place = ".".join(map(str, wrong.absolute_path))
            return failed("invalid_arguments", f"{place}: {wrong.message}" if place else wrong.message)
        session: McpSession = await sessions.of(self._server)
        client = await session.client()
        limit = asyncio.timeout(self.limits.timeout_s)
        try:
            async with limit:
                result = await client.call_tool(self._remote_name, arguments)
        except TimeoutError:
            return failed("timeout", f"the tool took longer than {self.limits.timeout_s:g} s")
        except Exception as error:  # noqa: BLE001 - what the package raises depends on the transport
            return self._failed(error, session)
        text = _text(result)
        if result.is_error:
            return failed("exception", text)
        return Outcome(cut_in_the_middle(text, self.limits.max_chars))

    def _failed(self, error: Exception, session: McpSession) -> Outcome:
        """Return the error that the server answered.

        Raises:
            InfrastructureError: the server did not answer.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED and session.is_usable:
            return failed("exception", error.message)
        raise session.failure(raised_text(error)) from error


def name_of(server: StdioServer | HttpServer) -> str:
    """Return how messages call a server."""
    return redacted(server.url).partition("?")[0] if isinstance(server, HttpServer) else repr(" ".join(server.command))


def _variable(name: str) -> str:
    """Return an environment variable of the explorer.

    Raises:
        ConfigError: it is not set.
    """
    if name not in os.environ:
        raise ConfigError("an environment variable of an MCP server is not set", value=name, todo=f"export {name}")
    return os.environ[name]


def _text(result: Any) -> str:
    if not result.content and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(block.text if block.type == "text" else f"[{block.type}]" for block in result.content)
