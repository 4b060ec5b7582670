"""`ToolBoxes`: the tool boxes of one explorer; `open_tools`, with which workflows open them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcore.rollout_clock import clock_suspended
from rftcore.tools.settings import ToolLimits
from rftcore.tools.tool_box import ToolBox, ToolSession


@dataclass(frozen=True)
class ToolSettings:
    """What determines a tool box.

    Attributes:
        tools: entries of the configuration.
        limits: of entries that name none.
        max_calls_per_turn, processes: see `ToolBox`.
    """

    tools: Sequence[Any]
    limits: ToolLimits = ToolLimits()  # noqa: RUF009 - it is frozen
    max_calls_per_turn: int = 8
    processes: int = 8

    def box(self, base_dir: Path) -> ToolBox:
        """Return the tool box, without the tools of MCP servers.

        Raises:
            PluginError, ConfigError: see `ToolBox`.
        """
        return ToolBox(
            self.tools,
            base_dir,
            limits=self.limits,
            max_calls_per_turn=self.max_calls_per_turn,
            processes=self.processes,
        )


class ToolBoxes:
    """The tool boxes of one explorer, one for equal settings. For one event loop.

    Args:
        base_dir: folder that paths are relative to, that of the configuration file.
    """

    def __init__(self, base_dir: Path) -> None:
        self._base_dir = base_dir
        self._opening: dict[str, asyncio.Task[ToolBox]] = {}
        self._made: list[ToolBox] = []

    async def box(self, settings: ToolSettings) -> ToolBox:
        """Return the open tool box of these settings.

        Raises:
            PluginError, ConfigError: a tool does not load, or an MCP server does not answer.
        """
        key = repr(settings)
        if key not in self._opening:
            self._opening[key] = asyncio.create_task(self._open(settings))
        return await asyncio.shield(self._opening[key])

    async def close_sessions(self) -> None:
        """Close the sessions of MCP servers; called in the event loop."""
        await asyncio.gather(*(box.close_sessions() for box in self._made))

    def close(self) -> None:
        """End the processes of all boxes."""
        for box in self._made:
            box.close()

    async def _open(self, settings: ToolSettings) -> ToolBox:
        box = await asyncio.to_thread(settings.box, self._base_dir)  # it imports code of the user
        self._made.append(box)
        await box.open()
        return box


_current: ContextVar[ToolBoxes | None] = ContextVar("tool_boxes", default=None)


@contextmanager
def tools_of_rollout(boxes: ToolBoxes) -> Iterator[None]:
    """Let `open_tools` use these boxes within the block."""
    token = _current.set(boxes)
    try:
        yield
    finally:
        _current.reset(token)


@asynccontextmanager
async def open_tools(settings: ToolSettings, task: Any, *, base_dir: Path | None = None) -> AsyncIterator[ToolSession]:
    """Open tools for a rollout.

    Within a rollout, those of its explorer are used. Elsewhere (a test, a notebook), they are opened and closed here.

    Args:
        task: the rollout's task.
        base_dir: outside rollouts, the folder that paths are relative to; None: the current folder.

    Raises:
        PluginError, ConfigError: a tool does not load, or an MCP server does not answer.
    """
    boxes = _current.get()
    if boxes is not None:
        with clock_suspended():
            box = await boxes.box(settings)
        async with box.session(task) as session:
            yield session
        return
    boxes = ToolBoxes(base_dir or Path.cwd())
    try:
        box = await boxes.box(settings)
        async with box.session(task) as session:
            yield session
        await boxes.close_sessions()
    finally:
        await asyncio.shield(asyncio.to_thread(boxes.close))
