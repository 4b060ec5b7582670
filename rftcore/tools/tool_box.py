"""`ToolBox`: the tools of one configuration in one explorer; `ToolSession`: their calls in one rollout.

Errors are observations: the model reads `{"error": …}`, without paths of this machine, and the rollout goes on. Only a failure outside the
rollout (`InfrastructureError`) ends it.

Plain functions run in separate processes, one call after the other, and are ended at their time limit. Async functions, functions that declare
`runs_in_explorer`, MCP servers and sandboxes run in the event loop of the workflows. The calls of one answer run concurrently, except those
of tools with `ctx`, which share the state of the rollout: they run one after the other, in the order of the answer.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rftcore.failures import FunctionFailedError, InfrastructureError, comes_from_outside
from rftcore.rollout_clock import clock_suspended
from rftcore.tools.calls import Call, CallError, ErrorKind, ToolCall
from rftcore.tools.mcp_servers import McpServer
from rftcore.tools.outcome import Outcome, failed, load_calls, load_tool, outcome_of_error, outcome_of_value
from rftcore.tools.rollout_sessions import RolloutSessions
from rftcore.tools.sandbox_tools import SandboxServer
from rftcore.tools.settings import FunctionEntry, McpEntry, SandboxEntry, ToolLimits, entries_of
from rftcore.tools.tool import Tool, ToolContext, refuse_equal_names
from rftcore.user_functions.function_process import Functions, Question, TimeLimit
from rftcore.user_functions.function_processes import FunctionProcesses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolResult:
    """What the model reads of one call.

    Attributes:
        name: of the tool; empty for a call that could not be read.
        error: None for a result.
    """

    call_id: str
    name: str
    text: str
    error: ErrorKind | None


class BoundTool(Protocol):
    """A tool where it runs."""

    @property
    def schema(self) -> dict[str, Any]:
        """As chat templates expect it."""

    @property
    def name(self) -> str:
        """By which the model calls it."""

    @property
    def takes_context(self) -> bool:
        """Whether its calls use the state of the rollout."""

    @property
    def limits(self) -> ToolLimits:
        """Of its calls."""

    async def call(self, arguments: dict[str, Any], context: ToolContext, sessions: RolloutSessions) -> Outcome:
        """Call it.

        Args:
            context: of the rollout.
            sessions: what the rollout's tools keep open.

        Raises:
            InfrastructureError: something outside the rollout failed.
        """


class ToolBox:
    """The tools of a configuration. For one event loop.

    Args:
        tools: entries of the configuration.
        base_dir: folder of the configuration file.
        limits: of entries that name none.
        max_calls_per_turn: the model reads errors for further calls of an answer.
        processes: maximum number of processes for plain functions.

    Raises:
        PluginError, ConfigError: a function does not load or cannot be a tool, or an entry is not valid.
    """

    def __init__(
        self,
        tools: Sequence[Any],
        base_dir: Path,
        *,
        limits: ToolLimits | None = None,
        max_calls_per_turn: int = 8,
        processes: int = 8,
    ) -> None:
        entries = entries_of(tools, limits or ToolLimits())
        functions = [
            (entry, load_tool(entry.tool, base_dir, entry.name))
            for entry in entries
            if isinstance(entry, FunctionEntry)
        ]
        outside = list(dict.fromkeys(entry.tool for entry, tool in functions if not tool.runs_in_explorer))
        self._processes = (
            FunctionProcesses(Functions("tool", load_calls, outside, base_dir), processes) if outside else None
        )
        self._servers = [McpServer(entry, base_dir) for entry in entries if isinstance(entry, McpEntry)]
        self._sandboxes = [SandboxServer(entry, base_dir) for entry in entries if isinstance(entry, SandboxEntry)]
        self.max_calls_per_turn, self.base_dir = max_calls_per_turn, base_dir
        self._tools: dict[str, BoundTool] = {}
        self._semaphores: dict[str, Any] = {}
        self._add([_bound(entry, tool, self._processes) for entry, tool in functions])
        for sandbox in self._sandboxes:
            self._add(sandbox.tools)
        self._logged: set[tuple[str, ErrorKind]] = set()

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates expect them."""
        return [tool.schema for tool in self._tools.values()]

    @property
    def names(self) -> list[str]:
        """By which the model calls the tools."""
        return list(self._tools)

    async def open(self) -> None:
        """Read the tools of the MCP servers; called once, before the first session.

        Raises:
            ConfigError: a server does not answer, or two tools have one name.
        """
        for tools in await asyncio.gather(*(server.tools() for server in self._servers)):
            self._add(tools)

    @asynccontextmanager
    async def session(self, task: Any) -> AsyncIterator[ToolSession]:
        """Open the tools for a rollout."""
        session = ToolSession(self, task)
        try:
            yield session
        finally:
            session.sessions.close()

    async def close_sessions(self) -> None:
        """Close the sessions of MCP servers; called in the event loop."""
        await asyncio.gather(*(server.close() for server in self._servers))

    def close(self) -> None:
        """End the processes and the sandboxes."""
        for sandbox in self._sandboxes:
            sandbox.close()
        if self._processes is not None:
            self._processes.close()

    def _add(self, tools: Sequence[BoundTool]) -> None:
        refuse_equal_names([*self._tools, *(tool.name for tool in tools)])
        self._tools |= {tool.name: tool for tool in tools}
        self._semaphores |= {tool.name: _semaphore(tool.limits) for tool in tools}

    async def call(self, call: ToolCall, session: ToolSession) -> Outcome:
        """Call a tool within its limits.

        Raises:
            InfrastructureError: something outside the rollout failed.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            return failed("unknown_tool", f"there is no tool {call.name[:64]!r}; tools: {', '.join(self._tools)}")
        async with self._semaphores[call.name]:
            outcome = await tool.call(call.arguments, session.context, session.sessions)
        if outcome.infrastructure is not None:
            raise InfrastructureError(f"the tool {call.name!r} failed: {outcome.infrastructure}")
        if outcome.error in ("exception", "timeout", "crash"):
            self._log(call.name, outcome.error, outcome)
        return outcome

    def takes_context(self, name: str) -> bool:
        """Whether calls of a tool use the state of the rollout."""
        tool = self._tools.get(name)
        return tool is not None and tool.takes_context

    def _log(self, name: str, kind: ErrorKind, outcome: Outcome) -> None:
        """Log the first error of each kind of a tool, which may be a mistake in it."""
        if (name, kind) not in self._logged:
            self._logged.add((name, kind))
            logger.warning("the tool %r gave an error (%s): %s", name, kind, outcome.stack or outcome.text)


@dataclass
class ToolSession:
    """The tools in one rollout.

    Attributes:
        context: what tools with `ctx` get.
        sessions: with MCP servers, and sandboxes.
        num_calls, num_errors, seconds: so far; errors by kind.
    """

    box: ToolBox
    task: Any
    sessions: RolloutSessions = field(default_factory=RolloutSessions)
    num_calls: int = 0
    num_errors: Counter[ErrorKind] = field(default_factory=Counter)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.context = ToolContext(self.task, getattr(self.task, "seed", 0))

    async def run(self, calls: Sequence[Call], *, num_left: int | None = None) -> list[ToolResult]:
        """Return what the model reads of the calls of one answer, in their order. Their time does not count as time of the rollout.

        Args:
            num_left: calls that the rollout may still make; None: any number.

        Raises:
            InfrastructureError: something outside the rollout failed.
        """
        started = time.monotonic()
        limit = self.box.max_calls_per_turn
        allowed = calls[: limit if num_left is None else min(limit, num_left)]
        with clock_suspended():
            outcomes = await self._outcomes(allowed)
        if len(calls) > len(allowed):
            refusal = (
                f"an answer may have {limit} calls" if len(allowed) == limit else "the calls of this task are used up"
            )
            outcomes += [failed("too_many_calls", refusal)] * (len(calls) - len(allowed))
        self.seconds += time.monotonic() - started
        self.num_calls += len(calls)
        self.num_errors.update(outcome.error for outcome in outcomes if outcome.error is not None)
        return [
            ToolResult(call.call_id, call.name if isinstance(call, ToolCall) else "", outcome.text, outcome.error)
            for call, outcome in zip(calls, outcomes, strict=True)
        ]

    def metrics(self) -> dict[str, float]:
        """Return the sums so far, for the metrics of a turn."""
        errors = {f"tool_errors.{kind}": float(number) for kind, number in sorted(self.num_errors.items())}
        total = float(self.num_errors.total())
        return {"tool_calls": float(self.num_calls), "tool_errors": total, "tool_seconds": self.seconds, **errors}

    async def _outcomes(self, calls: Sequence[Call]) -> list[Outcome]:
        found: dict[int, Outcome] = {}

        async def one_after_another(places: Sequence[int]) -> None:
            for place in places:
                found[place] = await self._outcome(calls[place])

        with_state = [
            n for n, call in enumerate(calls) if isinstance(call, ToolCall) and self.box.takes_context(call.name)
        ]
        groups = [with_state, *([n] for n in range(len(calls)) if n not in with_state)]
        running = [asyncio.create_task(one_after_another(places)) for places in groups if places]
        try:
            await asyncio.gather(*running)
        finally:
            for each in running:
                each.cancel()
        return [found[place] for place in range(len(calls))]

    async def _outcome(self, call: Call) -> Outcome:
        if isinstance(call, CallError):
            return failed(call.kind, call.text)
        return await self.box.call(call, self)


@dataclass(frozen=True)
class _InLoop:
    """A function that runs in the event loop."""

    tool: Tool
    limits: ToolLimits

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def schema(self) -> dict[str, Any]:
        return self.tool.schema

    @property
    def takes_context(self) -> bool:
        return self.tool.takes_context

    async def call(self, arguments: dict[str, Any], context: ToolContext, sessions: RolloutSessions) -> Outcome:
        limit = asyncio.timeout(self.limits.timeout_s)
        try:
            async with limit:
                value = self.tool.call(arguments, context)
                if inspect.isawaitable(value):
                    value = await value
        except TimeoutError as error:
            if not limit.expired():
                return outcome_of_error(error)
            return failed("timeout", _too_long(self.limits))
        except BaseException as error:  # the boundary: errors of a tool are data
            if comes_from_outside(error):
                raise
            return outcome_of_error(error)
        return outcome_of_value(value, self.limits.max_chars)


@dataclass(frozen=True)
class _InProcess:
    """A function that runs in separate processes.

    Attributes:
        source: its name in the configuration.
    """

    tool: Tool
    limits: ToolLimits
    source: str
    processes: FunctionProcesses

    @property
    def name(self) -> str:
        return self.tool.name

    @property
    def schema(self) -> dict[str, Any]:
        return self.tool.schema

    @property
    def takes_context(self) -> bool:
        return self.tool.takes_context

    async def call(self, arguments: dict[str, Any], context: ToolContext, sessions: RolloutSessions) -> Outcome:
        limit = TimeLimit(self.limits.timeout_s, f"timeout_s = {self.limits.timeout_s:g} s of the tool")
        given = context if self.takes_context else None
        what = f"the tool {self.name!r}"
        try:
            question = Question.of(self.source, what, limit, arguments, given, self.limits.max_chars)
        except Exception as error:  # noqa: BLE001 - the state may hold anything
            return failed("exception", f"the state of the rollout cannot be sent to the tool: {type(error).__name__}")
        try:
            outcome: Outcome = await self.processes.call(question)
        except FunctionFailedError as error:
            if error.timed_out:
                return failed("timeout", _too_long(self.limits), error.stack)
            return failed("crash", "the tool ended its process", error.stack)
        if outcome.state is not None:
            context.state.clear()
            context.state.update(pickle.loads(outcome.state))
        return outcome


def _bound(entry: FunctionEntry, tool: Tool, processes: FunctionProcesses | None) -> BoundTool:
    if tool.runs_in_explorer or processes is None:
        return _InLoop(tool, entry)
    return _InProcess(tool, entry, entry.tool, processes)


def _semaphore(limits: ToolLimits) -> Any:
    return nullcontext() if limits.concurrency is None else asyncio.Semaphore(limits.concurrency)


def _too_long(limits: ToolLimits) -> str:
    return f"the tool took longer than {limits.timeout_s:g} s"
