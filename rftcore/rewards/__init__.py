"""Rewards: functions of a turn and its task. One file each, named in this table.

A reward is `def reward(turn: Turn, task: Task) -> float | dict[str, float]`, plain or async. Several are summed; a mapping
counts by its sum and keeps its parts. What it raises becomes the rollout's recorded outcome.

A plain function runs in a process of its own (`reward_processes`), an async one in the event loop of the workflows. A plain
function that returns at once may say `function.runs_in_explorer = True` and spare the way to another process.

A reward that compares with `task.answer` says so by `reward.needs_answer = True`: `rft check --deep` and loading then name the tasks that
have none, and refuse a set in which none has one.
"""

from __future__ import annotations

import inspect
import math
import numbers
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rftcore.explorer.reward_processes import RewardProcesses
from rftcore.workflows.task import Score, Task, Turn
from rftdata import plugins
from rftdata.errors import RftError

REWARDS = {
    "exact_match": "rftcore.rewards.exact_match:exact_match",
    "reasoning_gym": "rftcore.rewards.reasoning_gym:verify",
}
DEFAULT_TIMEOUT_S = 60.0


def load_rewards(names: list[str], base_dir: Path) -> dict[str, Callable[[Turn, Task], Any]]:
    """The named functions.

    Raises:
        PluginError: a name that is unknown or does not load.
    """
    return {name: plugins.load("reward", name, REWARDS, base_dir) for name in names}


class Scorer:
    """Scores a turn by the sum of the named rewards.

    A part is called by its function's name or its key in the function's mapping; where that name is taken already, by the
    name in the configuration as well (`./b.py:score`, `./b.py:score.accuracy`).

    Args:
        names: rewards as the configuration names them.
        base_dir: folder of the configuration file.
        timeout_s: a call of a plain function that takes longer fails.
        limit: the setting that it comes from, for people; explorer.reward_timeout_s by default.
        max_processes: most processes for plain functions.

    Raises:
        PluginError: a name that is unknown or does not load.
    """

    def __init__(
        self, names: list[str], base_dir: Path, *, timeout_s: float = DEFAULT_TIMEOUT_S, limit: str = "",
        max_processes: int = 8,
    ) -> None:  # fmt: skip
        limit = limit or f"explorer.reward_timeout_s = {timeout_s:g} s"
        self._functions = load_rewards(names, base_dir)
        outside = [name for name, function in self._functions.items() if not _runs_here(function)]
        self._processes = RewardProcesses(outside, base_dir, timeout_s, limit, max_processes) if outside else None

    async def __call__(self, turn: Turn, task: Task) -> Score:
        """The sum and its parts.

        Raises:
            RftError: a reward returned something else than finite numbers.
            FunctionFailedError: a plain function failed. An async one raises what it raises.
        """
        parts: dict[str, float] = {}
        total = 0.0
        for name in self._functions:
            value = await self._value(name, turn, task)
            if isinstance(value, dict):
                named = [(key, f"{name}.{key}", part) for key, part in value.items()]
            else:
                named = [(name.rpartition(":")[2], name, value)]
            for short, qualified, part in named:
                parts[qualified if short in parts else short] = part
                total += part
        return Score(total, parts)

    async def _value(self, name: str, turn: Turn, task: Task) -> float | dict[str, float]:
        function = self._functions[name]
        if self._processes is not None and not _runs_here(function):
            return await self._processes.call(name, turn, task)
        value = function(turn, task)
        return checked_value(name, await value if inspect.isawaitable(value) else value, task)

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()


def _runs_here(function: Any) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is an async function, too
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return asynchronous or bool(getattr(function, "runs_in_explorer", False))


def checked_value(name: str, value: Any, task: Task) -> float | dict[str, float]:
    """What a reward returned, as plain numbers.

    Raises:
        RftError: it is no finite number and no mapping of names to such; nothing is converted silently.
    """
    if isinstance(value, Mapping):
        return {str(key): _number(f"{name}, part {key!r},", part, task) for key, part in value.items()}
    return _number(name, value, task)


def _number(name: str, value: Any, task: Task) -> float:
    if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise RftError(
        # The value as text: it comes from another process, and not everything can be sent.
        f"the reward {name} returned {_what(value)} for the task {task.task_key!r} of {task.taskset!r}",
        allowed="a finite number, or a mapping of names to finite numbers", todo=_advice(value),
    )  # fmt: skip


def _what(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return f"{value}, which is not finite,"
    try:
        shown = reprlib.repr(value)
    except Exception:  # noqa: BLE001 - the user's own class
        shown = "(without a text form)"
    return f"{shown}, a value of type {type(value).__name__},"


def _advice(value: Any) -> str:
    if isinstance(value, bool):
        return "return float(…) of the condition"
    if value is None:
        return "return 0.0 where there is nothing to reward; a branch without `return` returns None"
    return "correct the reward function"
