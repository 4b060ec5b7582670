"""Scoring of turns: calls every reward function under its time limit, here or in a separate process, and checks the values."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import math
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rftcore.config.reward import Combination, RewardConfig
from rftcore.explorer.reward_functions import load_checked
from rftcore.explorer.reward_value import CheckedPart, CheckedValue, checked_value, checked_values
from rftcore.failures import FunctionFailedError, waited_at
from rftcore.rewards import LoadedReward
from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.rewards.combination import RewardTotal
from rftcore.rewards.judging_stage import JudgingReward
from rftcore.rollout_clock import clock_suspended
from rftcore.user_functions.function_process import Functions, Question, TimeLimit
from rftcore.user_functions.function_processes import FunctionProcesses
from rftcore.workflows.task import Score, Task, TokenRewards, Turn
from rftdata.errors import RftError
from rftdata.pipeline.budget import MemoryUsage, UsageLedger

DEFAULT_TIMEOUT_S = 60.0


@dataclass
class GroupScore:
    """What rewards over whole groups add to a rollout.

    Attributes:
        parts: their values by name, without weights.
        values: the value of each reward, in their order.
    """

    combination: Combination
    parts: dict[str, float] = field(default_factory=dict)
    values: list[tuple[RewardConfig, float]] = field(default_factory=list)

    def added_to(self, reward: float) -> float:
        """Return a reward with these."""
        total = RewardTotal(self.combination, reward)
        for config, value in self.values:
            total.add(config, value)
        return total.value


class Scorer:
    """Scores a turn by the combination of the rewards.

    The name of a part is that of its function, or its key in the function's mapping. If that name is taken, the
    name in the configuration is added (`./b.py:score`, `./b.py:score.accuracy`). A name of its own (`as`) takes the function's place, and is
    added to the keys of a mapping (`NAME.accuracy`). Parts are the values without their weights.

    `TokenRewards`, times the weight, go to the turn's `token_rewards`. Their sum is a part, but not in the total, because algorithms add the
    rewards of tokens to the reward of the rollout.

    Args:
        rewards: the loaded rewards.
        base_dir: folder of the configuration file; separate processes load functions by name.
        combination: how the values of several rewards become one.
        timeout_s: a call of a plain function that takes longer fails.
        limit: the setting with that value, for messages; explorer.reward_timeout_s by default.
        max_processes: maximum number of processes for plain functions.
        usage: counts what rewards spend on calls of models, by the name of the reward; in this process without it.
    """

    def __init__(
        self,
        rewards: Mapping[str, LoadedReward],
        base_dir: Path,
        *,
        combination: Combination = "sum",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        limit: str = "",
        max_processes: int = 8,
        usage: UsageLedger | None = None,
    ) -> None:
        self._limit = TimeLimit(timeout_s, limit or f"explorer.reward_timeout_s = {timeout_s:g} s")
        self._of_turns = [reward for reward in rewards.values() if not reward.of_group]
        self._of_groups = [reward for reward in rewards.values() if reward.of_group]
        self._combination: Combination = combination
        self._judges = [reward.function for reward in rewards.values() if isinstance(reward.function, JudgingReward)]
        for key, reward in rewards.items():
            if isinstance(reward.function, JudgingReward):
                reward.function.count_usage(key, usage or MemoryUsage())
        outside = [reward.config for reward in rewards.values() if not _runs_here(reward.function)]
        functions = Functions("reward", load_checked, outside, base_dir)
        self._processes = FunctionProcesses(functions, max_processes) if outside else None

    @property
    def scores_groups(self) -> bool:
        """Whether there are rewards over whole groups."""
        return bool(self._of_groups)

    @property
    def sandbox_tiers(self) -> list[str]:
        """What confines the code that rewards run, for each that runs any."""
        tiers = (getattr(reward.function, "sandbox_tier", None) for reward in (*self._of_turns, *self._of_groups))
        return [tier for tier in tiers if tier is not None]

    async def __call__(self, turn: Turn, task: Task) -> Score:
        """Return the total and its parts, without rewards over whole groups.

        Raises:
            RftError: a reward returned something other than finite numbers, another number of `TokenRewards` than the response has tokens, or
                a negative value for a product.
            FunctionFailedError: a plain function failed. An async function's error is raised unchanged.
        """
        if not self._of_turns and not self._of_groups:
            return Score(0.0, {})
        parts: dict[str, float] = {}
        total, token_rewards = RewardTotal(self._combination), list[TokenRewards]()
        for reward in self._of_turns:
            value: CheckedValue = await self._value(reward, turn, task)
            numbers = []
            for name, part in _named_parts(reward.config, value, parts.keys()):
                if isinstance(part, TokenRewards):
                    parts[name] = math.fsum(part.values)
                    token_rewards.append(TokenRewards([reward.config.weight * number for number in part.values]))
                else:
                    parts[name] = part
                    numbers.append(part)
            if numbers:
                _add(total, reward.config, math.fsum(numbers), task)
            if total.has_failed:
                break
        if token_rewards:
            _record(turn, token_rewards, task)
        return Score(total.value, parts)

    async def score_group(self, rollouts: list[AnsweredRollout], task: Task) -> list[GroupScore]:
        """Return what the rewards over whole groups add to each rollout.

        Raises:
            RftError: a reward returned something other than one finite number, or mapping of these, for each rollout, or a negative value for
                a product.
            FunctionFailedError: a function failed or took too long. An async function's error is raised unchanged.
        """
        scores = [GroupScore(self._combination) for _ in rollouts]
        totals = [RewardTotal(self._combination, rollout.reward) for rollout in rollouts]
        for reward in self._of_groups:
            values: list[CheckedValue] = await self._value(reward, rollouts, task)
            for rollout, score, total, value in zip(rollouts, scores, totals, values, strict=True):
                taken = rollout.parts.keys() | score.parts.keys()
                named = {
                    name: part for name, part in _named_parts(reward.config, value, taken) if isinstance(part, float)
                }
                score.parts.update(named)
                score.values.append((reward.config, math.fsum(named.values())))
                _add(total, *score.values[-1], task)
        return scores

    async def _value(self, reward: LoadedReward, scored: Turn | list[AnsweredRollout], task: Task) -> Any:
        key = reward.config.key
        if self._processes is not None and not _runs_here(reward.function):
            what = f"the reward {key!r} on task {task.task_key!r}"
            with clock_suspended():  # the call has its own limit, and may wait for others
                return await self._processes.call(Question.of(key, what, self._limit, scored, task))
        value = reward(scored, task)
        if isinstance(scored, Turn):
            return checked_value(key, await value if inspect.isawaitable(value) else value, task)
        if inspect.isawaitable(value):
            value = await self._in_time(value, key, task)
        return checked_values(key, value, task, len(scored))

    async def _in_time(self, value: Awaitable[Any], key: str, task: Task) -> Any:
        """Await a reward over a whole group, which the time limit of no rollout includes.

        Raises:
            FunctionFailedError: it took too long.
        """
        try:
            async with asyncio.timeout(self._limit.seconds) as limit:
                return await value
        except TimeoutError as error:
            if not limit.expired():
                raise
            text = f"the reward {key!r} on the group of task {task.task_key!r} took longer than {self._limit.setting}"
            raise FunctionFailedError(f"{text}{waited_at(error)}", text, timed_out=True) from error

    def close(self) -> None:
        """End the processes and the connections to judges."""
        for judge in self._judges:
            judge.close()
        if self._processes is not None:
            self._processes.close()


def _named_parts(reward: RewardConfig, value: CheckedValue, taken: Collection[str]) -> list[tuple[str, CheckedPart]]:
    """Return the parts of a value by the names under which they are stored."""
    if not isinstance(value, dict):
        short = reward.as_ or reward.name.rpartition(":")[2]
        return [(_free(reward.key, taken) if short in taken else short, value)]
    names = {name: f"{reward.key}.{name}" if reward.as_ or name in taken else name for name in value}
    return [(_free(names[name], taken), part) for name, part in value.items()]


def _free(name: str, taken: Collection[str]) -> str:
    """Return a name that no other part has: with a number if necessary."""
    return next(
        each for number in itertools.count(1) if (each := name if number == 1 else f"{name}#{number}") not in taken
    )


def _add(total: RewardTotal, reward: RewardConfig, value: float, task: Task) -> None:
    try:
        total.add(reward, value)
    except OverflowError:
        total.value = math.inf
    except ValueError as error:
        raise RftError(
            f"the reward {reward.key} returned {value:g} for the task {task.task_key!r} of {task.taskset!r}, and rewards are multiplied",
            allowed="0 or more with explorer.reward_combination: product",
            todo="shift its values, set its weight to 0 so that it is stored and does not count, or combine by sum",
        ) from error
    if not math.isfinite(total.value):
        raise RftError(
            f"the rewards of the task {task.task_key!r} of {task.taskset!r} combine to {total.value}, with {value:g} of {reward.key}",
            allowed="a finite number",
            todo="return smaller values, or lower the weights",
        )


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


def _runs_here(function: object) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__ is also an async function
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return asynchronous or bool(getattr(function, "runs_in_explorer", False))
