"""Plain reward functions as they are called in a process of their own (`rftcore.user_functions`)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from rftcore.config.reward import RewardConfig
from rftcore.explorer.reward_value import CheckedValue, checked_value, checked_values
from rftcore.rewards import LoadedReward, load_rewards
from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.workflows.task import Task, Turn


def load_checked(rewards: list[RewardConfig], base_dir: Path) -> dict[str, Callable[[Any, Task], Any]]:
    """Return rewards that check their own values.

    Raises:
        PluginError, ConfigError: a reward cannot be loaded.
    """
    return {key: partial(_checked, key, reward) for key, reward in load_rewards(rewards, base_dir).items()}


def _checked(
    key: str, reward: LoadedReward, scored: Turn | list[AnsweredRollout], task: Task
) -> CheckedValue | list[CheckedValue]:
    value = reward(scored, task)
    if inspect.isawaitable(value):
        value = asyncio.run(_awaited(value))
    return (
        checked_value(key, value, task) if isinstance(scored, Turn) else checked_values(key, value, task, len(scored))
    )


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
