"""Scoring of turns: calls every reward function under its time limit, here or in a separate process, and checks the values."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from pathlib import Path

from rftcore.explorer.reward_functions import load_checked
from rftcore.explorer.reward_value import CheckedValue, checked_value
from rftcore.rewards import Reward
from rftcore.rollout_clock import clock_suspended
from rftcore.user_functions.function_process import Functions, Question, TimeLimit
from rftcore.user_functions.function_processes import FunctionProcesses
from rftcore.workflows.task import Score, Task, TokenRewards, Turn
from rftdata.errors import RftError

DEFAULT_TIMEOUT_S = 60.0


class Scorer:
    """Scores a turn by the sum of the named rewards.

    The name of a part is that of its function, or its key in the function's mapping. If that name is taken, the
    name in the configuration is added (`./b.py:score`, `./b.py:score.accuracy`).

    `TokenRewards` go to the turn's `token_rewards`. Their sum is a part, but not in the total, because algorithms add the rewards of
    tokens to the reward of the rollout.

    Args:
        rewards: functions by their names in the configuration.
        base_dir: folder of the configuration file; separate processes load functions by name.
        timeout_s: a call of a plain function that takes longer fails.
        limit: the setting with that value, for messages; explorer.reward_timeout_s by default.
        max_processes: maximum number of processes for plain functions.
    """

    def __init__(
        self,
        rewards: Mapping[str, Reward],
        base_dir: Path,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        limit: str = "",
        max_processes: int = 8,
    ) -> None:
        self._limit = TimeLimit(timeout_s, limit or f"explorer.reward_timeout_s = {timeout_s:g} s")
        self._functions = rewards
        outside = [name for name, function in self._functions.items() if not _runs_here(function)]
        functions = Functions("reward", load_checked, outside, base_dir)
        self._processes = FunctionProcesses(functions, max_processes) if outside else None

    async def __call__(self, turn: Turn, task: Task) -> Score:
        """Return the sum and its parts.

        Raises:
            RftError: a reward returned something other than finite numbers, or another number of `TokenRewards` than the response has tokens.
            FunctionFailedError: a plain function failed. An async function's error is raised unchanged.
        """
        parts: dict[str, float] = {}
        total, token_rewards = 0.0, list[TokenRewards]()
        for name in self._functions:
            value = await self._value(name, turn, task)
            if isinstance(value, dict):
                named = [(key, f"{name}.{key}", part) for key, part in value.items()]
            else:
                named = [(name.rpartition(":")[2], name, value)]
            for short, qualified, part in named:
                part_name = qualified if short in parts else short
                if isinstance(part, TokenRewards):
                    parts[part_name] = math.fsum(part.values)
                    token_rewards.append(part)
                else:
                    parts[part_name] = part
                    total += part
        if token_rewards:
            _record(turn, token_rewards, task)
        return Score(total, parts)

    async def _value(self, name: str, turn: Turn, task: Task) -> CheckedValue:
        function = self._functions[name]
        if self._processes is not None and not _runs_here(function):
            what = f"the reward {name!r} on task {task.task_key!r}"
            with clock_suspended():  # the call has its own limit, and may wait for others
                found: CheckedValue = await self._processes.call(Question.of(name, what, self._limit, turn, task))
            return found
        value = function(turn, task)
        return checked_value(name, await value if inspect.isawaitable(value) else value, task)

    def close(self) -> None:
        """End the processes."""
        if self._processes is not None:
            self._processes.close()


def _record(turn: Turn, token_rewards: list[TokenRewards], task: Task) -> None:
    num_tokens = len(turn.response_token_ids)
    for rewards in token_rewards:
        if len(rewards.values) != num_tokens:
            raise RftError(
                f"a reward returned TokenRewards of {len(rewards.values)} numbers for the task {task.task_key!r} of {task.taskset!r}, whose response has "
                f"{num_tokens} tokens",
                todo="return one number for each of turn.response_token_ids, which include the end token",
            )
    turn.record(
        token_rewards=[math.fsum(values) for values in zip(*(rewards.values for rewards in token_rewards), strict=True)]
    )


def _runs_here(function: Reward) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is also an async function
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return asynchronous or bool(getattr(function, "runs_in_explorer", False))
