"""Calls of tools become observations, whatever the tools do; only a failure outside the rollout ends it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcore.failures import InfrastructureError
from rftcore.tools.calls import Call, CallError, ToolCall
from rftcore.tools.settings import ToolLimits
from rftcore.tools.tool_box import ToolBox, ToolResult, ToolSession
from rftcore.workflows.task import Task
from rftdata.errors import ConfigError
from tests.support.waiting import PATIENCE_S

TASK = Task(1, "sums", "one", "1+1=", "2")

TOOLS = '''
"""Tools that tests call."""

import asyncio
import os
import sys
import time
from pathlib import Path

from rftcore.tools import InfrastructureError


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def remember(word: str, ctx) -> list[str]:
    """Remember a word."""
    ctx.state.setdefault("words", []).append(word)
    if word == "bad":
        raise ValueError(word)
    return [ctx.task.task_key, *ctx.state["words"]]


async def recall(ctx) -> dict:
    """Recall the words."""
    await asyncio.sleep(0)
    return ctx.state


def write(chars: int) -> str:
    """Write a long text."""
    return "a" * (chars // 2) + "b" * (chars // 2)


def show(chars: int) -> str:
    """Print a long text."""
    print("printed" + "." * chars)
    return "shown"


def fail(path: str) -> str:
    """Open a file."""
    return Path(path).read_text()


def give(what: str) -> object:
    """Return something."""
    return {"set": {3}, "object": object(), "none": None, "half": "\\ud800", "nan": float("nan")}[what]


def hang() -> None:
    """Never return, in C code."""
    sys.stdin and time.sleep(1000)


def end() -> None:
    """End the process."""
    os._exit(3)


def lose() -> None:
    """Lose a connection."""
    raise InfrastructureError("the index is gone")


async def sleep(seconds: float) -> str:
    """Sleep."""
    await asyncio.sleep(seconds)
    return "slept"


class Panic(BaseException):
    """As extensions written in Rust raise it."""


def panic() -> str:
    """Raise what is no Exception."""
    raise Panic("unreachable")


async def panic_in_loop() -> str:
    """Raise what is no Exception."""
    raise Panic("unreachable")


async def cancel() -> str:
    """Raise what a task that was cancelled raises."""
    raise asyncio.CancelledError("a scope ended")


async def lose_two() -> str:
    """Lose two connections at once."""
    raise ExceptionGroup("two", [InfrastructureError("the index is gone"), ValueError("and this")])


running = []


async def count() -> int:
    """Count the calls at a time."""
    running.append(1)
    await asyncio.sleep(0.02)
    found = len(running)
    running.pop()
    return found
'''

Make = Callable[..., ToolBox]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """A box of the named tools, ended after the test."""
    (tmp_path / "kit.py").write_text(TOOLS)
    made: list[ToolBox] = []

    def build(*tools: Any, **options: Any) -> ToolBox:
        entries = [f"./kit.py:{tool}" if isinstance(tool, str) else tool for tool in tools]
        made.append(
            ToolBox(entries, tmp_path, **{"limits": ToolLimits(timeout_s=PATIENCE_S), "processes": 1, **options})
        )
        return made[-1]

    yield build
    for box in made:
        box.close()


def run(box: ToolBox, *turns: list[Call], **options: Any) -> list[list[ToolResult]]:
    """The results of several answers of one rollout."""

    async def rollout() -> list[list[ToolResult]]:
        async with box.session(TASK) as session:
            return [await session.run(calls, **options) for calls in turns]

    return asyncio.run(rollout())


def call(name: str, number: int = 0, /, **arguments: Any) -> ToolCall:
    return ToolCall(name, arguments, number)


def error_of(result: ToolResult) -> tuple[str | None, str]:
    return result.error, json.loads(result.text)["error"]


def test_results_come_in_the_order_of_the_calls(make: Make) -> None:
    calls: list[Call] = [call("sleep", 0, seconds=0.05), call("add", 1, a=1, b=2), call("sleep", 2, seconds=0)]
    [found] = run(make("add", "sleep"), calls)
    assert [(each.call_id, each.name, each.text, each.error) for each in found] == [
        ("call00000", "sleep", "slept", None),
        ("call00001", "add", "3", None),
        ("call00002", "sleep", "slept", None),
    ]


def test_wrong_calls_are_observations(make: Make, tmp_path: Path) -> None:
    box = make("add", "fail", "give")
    calls: list[Call] = [
        call("sub"),
        call("add", a="1"),
        CallError("invalid_call", "invalid JSON: Expecting value"),
        call("fail", path=f"{tmp_path}/secret/file.txt"),
        call("give", what="object"),
    ]
    [[unknown, invalid, malformed, raised, returned]] = run(box, calls)
    assert error_of(unknown) == ("unknown_tool", "there is no tool 'sub'; tools: add, fail, give")
    assert error_of(invalid) == (
        "invalid_arguments",
        "a: Input should be a valid integer; b: Field required",
    )
    assert error_of(malformed) == ("invalid_call", "invalid JSON: Expecting value")
    assert error_of(raised) == (
        "exception",
        "FileNotFoundError: [Errno 2] No such file or directory: '…/file.txt'",
    )
    assert error_of(returned) == ("exception", "the tool returned a value of type object, which JSON cannot express")


def test_results_are_json_or_text(make: Make) -> None:
    calls: list[Call] = [call("give", number, what=what) for number, what in enumerate(("none", "set", "half", "nan"))]
    [found] = run(make("give"), calls)
    assert [each.text for each in found] == ["null", "[3]", "?", "NaN"]


def test_a_long_result_is_cut_in_the_middle(make: Make) -> None:
    [[found]] = run(make("write"), [call("write", chars=10_000_000)])
    assert found.text == "a" * 2048 + "\n[9995904 characters left out]\n" + "b" * 2048


def test_what_a_tool_prints_does_not_fill_the_log(make: Make, capfd: pytest.CaptureFixture[str]) -> None:
    [[found]] = run(make("show"), [call("show", chars=10_000_000)])
    printed = capfd.readouterr().out
    assert found.text == "shown"
    assert printed.startswith("printed...") and "which is left out" in printed and len(printed) < 5000


def test_a_tool_that_never_returns_is_ended_and_the_next_call_answers(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    box = make({"tool": "./kit.py:hang", "timeout_s": 0.3}, {"tool": "./kit.py:sleep", "timeout_s": 0.05}, "add")
    with caplog.at_level(logging.WARNING):
        [[hung], [slept], [added]] = run(
            box, [call("hang")], [call("sleep", seconds=PATIENCE_S)], [call("add", a=1, b=2)]
        )
    assert error_of(hung) == ("timeout", "the tool took longer than 0.3 s")
    assert error_of(slept) == ("timeout", "the tool took longer than 0.05 s")
    assert added.text == "3"
    assert "time.sleep(1000)" in caplog.text, "the log has the stack"


def test_a_tool_that_ends_its_process_is_an_observation(make: Make) -> None:
    [[ended, added]] = run(make("end", "add"), [call("end", 0), call("add", 1, a=1, b=2)])
    assert error_of(ended) == ("crash", "the tool ended its process")
    assert added.text == "3"


@pytest.mark.parametrize(
    ("tool", "says"),
    [
        ("panic", "Panic: unreachable"),
        ("panic_in_loop", "Panic: unreachable"),
        ("cancel", "CancelledError: a scope ended"),
    ],
)
def test_what_is_no_exception_is_an_observation_too(make: Make, tool: str, says: str) -> None:
    [[failed, added]] = run(make(tool, "add"), [call(tool, 0), call("add", 1, a=1, b=2)])
    assert error_of(failed) == ("exception", says)
    assert added.text == "3"


@pytest.mark.parametrize("tool", ["lose", "lose_two"])
def test_a_failure_outside_fails_the_rollout(make: Make, tool: str) -> None:
    with pytest.raises(InfrastructureError, match=rf"'{tool}' failed: InfrastructureError: the index is gone"):
        run(make(tool), [call(tool)])


def test_the_state_of_a_rollout_goes_from_call_to_call_and_to_no_other_rollout(make: Make) -> None:
    box = make("remember", "recall")
    words: list[Call] = [call("remember", n, word=word) for n, word in enumerate(("a", "bad", "b"))]
    [[a, bad, b], [recalled]] = run(box, words, [call("recall")])
    assert json.loads(a.text) == ["one", "a"]
    assert error_of(bad) == ("exception", "ValueError: bad")
    assert json.loads(b.text) == ["one", "a", "b"], "in their order, and without the failed call"
    assert json.loads(recalled.text) == {"words": ["a", "b"]}
    [[other]] = run(box, [call("recall")])
    assert json.loads(other.text) == {}


def test_calls_beyond_the_limits_are_not_made(make: Make) -> None:
    box = make("add", max_calls_per_turn=2)
    calls: list[Call] = [call("add", number, a=number, b=0) for number in range(3)]
    [found] = run(box, calls)
    assert [each.error for each in found] == [None, None, "too_many_calls"]
    assert error_of(found[2])[1] == "an answer may have 2 calls"
    [found] = run(box, calls, num_left=1)
    assert [each.error for each in found] == [None, "too_many_calls", "too_many_calls"]


def test_a_tool_has_its_own_concurrency(make: Make) -> None:
    calls: list[Call] = [call("count", number) for number in range(6)]
    [found] = run(make({"tool": "./kit.py:count", "concurrency": 2}), calls)
    assert max(int(each.text) for each in found) == 2


def test_calls_are_counted(make: Make) -> None:
    async def rollout() -> tuple[dict[str, float], ToolSession]:
        async with make("add").session(TASK) as session:
            await session.run([call("add", 0, a=1, b=1), call("sub", 1), call("add", 2, a="1", b=1)])
            await session.run([call("sub")])
            return session.metrics(), session

    found, _ = asyncio.run(rollout())
    assert found.pop("tool_seconds") > 0
    assert found == {
        "tool_calls": 4,
        "tool_errors": 3,
        "tool_errors.unknown_tool": 2,
        "tool_errors.invalid_arguments": 1,
    }


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([], "at least one tool"),
        ("./kit.py:add", "must be a list"),
        ([{"timeout_s": 3}], "neither a function nor an MCP server"),
        ([{"tool": "./kit.py:add", "timeout_s": 0}], "timeout_s: Input should be greater than 0"),
        ([{"tool": "./kit.py:add", "timeout_s": float("inf")}], "timeout_s: Input should be a finite number"),
        ([{"tool": "./kit.py:add", "time": 1}], "time: Extra inputs are not permitted"),
        (["./kit.py:add", "./kit.py:add"], "two tools have one name"),
        (["./kit.py:sum"], "has no 'sum'"),
        ([{"mcp": {"url": "ftp://a"}}], "mcp"),
        ([{"mcp": {"url": "http://a", "headers": {"authorization": "x"}}}], "must not contain keys.*headers_env"),
    ],
)
def test_entries_that_are_not_valid_are_refused(tools: Any, says: str, tmp_path: Path) -> None:
    (tmp_path / "kit.py").write_text(TOOLS)
    with pytest.raises(ConfigError, match=says):
        ToolBox(tools, tmp_path)


def test_a_limit_of_months_is_one(make: Make) -> None:
    [[added]] = run(make({"tool": "./kit.py:add", "timeout_s": 1e8}), [call("add", a=1, b=2)])
    assert added.text == "3"


def test_two_names_make_two_tools_of_one_function(make: Make) -> None:
    box = make("add", {"tool": "./kit.py:add", "name": "plus"})
    assert box.names == ["add", "plus"]
    assert run(box, [call("plus", a=1, b=1)])[0][0].text == "2"
