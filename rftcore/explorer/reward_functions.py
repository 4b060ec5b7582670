"""Plain reward functions as they are called in a process of their own (`rftcore.user_functions`)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from rftcore.explorer.reward_value import CheckedValue, checked_value
from rftcore.rewards import Reward, load_rewards
from rftcore.workflows.task import Task, Turn


def load_checked(names: list[str], base_dir: Path) -> dict[str, Callable[[Turn, Task], CheckedValue]]:
    """Return rewards that check their own values.

    Raises:
        PluginError: a reward cannot be loaded.
    """
    return {name: partial(_checked, name, function) for name, function in load_rewards(names, base_dir).items()}


def _checked(name: str, function: Reward, turn: Turn, task: Task) -> CheckedValue:
    value = function(turn, task)
    return checked_value(name, asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value, task)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
