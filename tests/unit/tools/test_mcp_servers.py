"""Tools of real MCP servers, over standard input and output and over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from rftcore.failures import InfrastructureError
from rftcore.tools.calls import ToolCall
from rftcore.tools.tool_box import ToolBox, ToolResult, ToolSession
from rftdata.errors import ConfigError
from tests.support.ports import closed_port
from tests.support.waiting import PATIENCE_S, until_it_happens

pytest.importorskip("mcp")

KIT = Path(__file__).parent / "mcp_kit.py"
T = TypeVar("T")


def with_box(use: Callable[[ToolBox], Awaitable[T]], *entries: dict[str, Any]) -> T:
    """What a coroutine function returns of an open box with these servers."""

    async def used() -> T:
        box = ToolBox([{"timeout_s": PATIENCE_S, **entry} for entry in entries], KIT.parent)
        await box.open()
        try:
            return await use(box)
        finally:
            await box.close_sessions()
            box.close()

    return asyncio.run(used())


async def one(session: ToolSession, name: str, **arguments: Any) -> ToolResult:
    [found] = await session.run([ToolCall(name, arguments)])
    return found


# Opens a session, and answers nothing else.
MUTE = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        found = {"protocolVersion": asked["params"]["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": {"name": "mute", "version": "1"}}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": found}), flush=True)
"""


def test_a_server_that_does_not_list_its_tools_is_named() -> None:
    async def open_it(box: ToolBox) -> None:
        raise AssertionError("not reached")

    with pytest.raises(
        ConfigError, match=r"cannot be used: it did not list its tools within timeout_s = 0.5 s; check that it starts"
    ):
        with_box(open_it, {"mcp": {"command": [sys.executable, "-c", MUTE]}, "timeout_s": 0.5})


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of a server over HTTP."""
    with closed_port() as port:
        pass
    process = subprocess.Popen([sys.executable, str(KIT), str(port)], stderr=subprocess.DEVNULL)

    def answers() -> bool | None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionError:
            return None
        return True

    until_it_happens(answers, "the start of the server")
    yield f"http://127.0.0.1:{port}/mcp"
    process.kill()
    process.wait()


def test_a_rollout_has_a_process_of_its_own_and_a_server_that_ends_fails_it() -> None:
    async def use(box: ToolBox) -> None:
        assert box.names == ["add", "remember", "write"]
        assert box.schemas[0]["function"]["description"] == "Add two numbers."
        async with box.session(None) as a, box.session(None) as b:
            first, second = await asyncio.gather(one(a, "remember", word="a"), one(b, "remember", word="b"))
            assert (first.text, second.text) == ("a", "b")
            assert (await one(a, "remember", word="c")).text == "a c"
            assert (await one(b, "add", a=1, b=2)).text == "3"
            assert "9995904 characters left out" in (await one(a, "write", chars=10_000_000)).text
            wrong = await one(b, "add", a="1", b=2)
            assert (wrong.error, json.loads(wrong.text)["error"]) == (
                "invalid_arguments",
                "a: '1' is not of type 'integer'",
            )

    entry = {"mcp": {"command": [sys.executable, KIT.name]}, "tools": ["add", "remember", "write"]}
    with_box(use, entry)


def test_a_server_over_http_is_used_by_all_rollouts_and_its_errors_are_observations(server: str) -> None:
    async def use(box: ToolBox) -> None:
        async with box.session(None) as session:
            assert (await one(session, "kit_add", a=1, b=2)).text == "3"
            failed = await one(session, "kit_fail")
            assert failed.error == "exception" and "Error executing tool fail" in failed.text
            assert (await one(session, "quick_sleep", seconds=1000)).error == "timeout"
            assert "characters left out" in (await one(session, "kit_write", chars=10_000_000)).text
        async with box.session(None) as other:
            assert (await one(other, "kit_add", a=2, b=2)).text == "4"

    entry = {"mcp": {"url": server}, "shared": True}
    quick = {**entry, "tools": ["sleep"], "prefix": "quick_", "timeout_s": 0.5}
    with_box(use, {**entry, "prefix": "kit_"}, quick)


def test_a_server_that_ends_fails_the_rollout_and_the_next_one_begins_anew() -> None:
    async def use(box: ToolBox) -> None:
        async with box.session(None) as session:
            with pytest.raises(InfrastructureError, match="cannot be used"):
                await one(session, "end")
        async with box.session(None) as other:
            assert (await one(other, "add", a=2, b=2)).text == "4"

    with_box(use, {"mcp": {"command": [sys.executable, str(KIT)]}, "shared": True})


def test_a_server_that_does_not_start_is_refused(tmp_path: Path) -> None:
    async def use(box: ToolBox) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match="cannot be used"):
        with_box(use, {"mcp": {"command": [str(tmp_path / "none")]}})
    with pytest.raises(ConfigError, match=r"environment variable of an MCP server is not set.*'NO_SUCH_VARIABLE'"):
        with_box(use, {"mcp": {"command": [sys.executable], "pass_env": ["NO_SUCH_VARIABLE"]}})
    with closed_port() as port, pytest.raises(ConfigError, match="cannot be used"):
        with_box(use, {"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}})


def test_a_tool_that_the_server_does_not_have_is_refused(server: str) -> None:
    async def use(box: ToolBox) -> None:
        raise AssertionError

    with pytest.raises(ConfigError, match=r"has no such tool.*'sub'.*add, remember"):
        with_box(use, {"mcp": {"url": server}, "tools": ["sub"]})
