"""Rewards: functions of a turn and its task. One file each, listed in this table.

A reward is `def reward(turn: Turn, task: Task, *, arguments…) -> float | TokenRewards | dict[str, …]`, plain or async, or a class whose instances are
called so and whose constructor takes the arguments. If the class has a pydantic model `Config`, the constructor takes one of it, and the folder of the
configuration file if it has a parameter `base_dir`. Several rewards combine
(`rftcore.rewards.combination`). A mapping counts with its sum, and its parts are stored. `TokenRewards` have one number per token of the response. An exception
becomes the rollout's recorded outcome.

A plain function runs in a separate process (`rftcore.user_functions.function_processes`), an async one in the event loop of the workflows. A plain
function that returns immediately may set `function.runs_in_explorer = True` to avoid the other process.

`reward_model:FOLDER` is the score of a model that a run with `algorithm: reward_model` trained.

A function with `function.of_group = True` is a reward over a whole group: `def reward(rollouts: list[AnsweredRollout], task: Task) -> list[float | dict]`
is called once when all rollouts of a group were scored alone, and returns a value for each.

A reward that compares with `task.answer` sets `reward.needs_answer = True`. `rft check --deep` and loading then name the tasks without
an answer, and refuse a set in which no task has one.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rftcore.config.reward import RewardConfig
from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.rewards.arguments import checked_arguments
from rftcore.rewards.reward_model import PREFIX, RewardModel
from rftcore.workflows.task import Task, TokenRewards, Turn
from rftdata.config_errors import parse_section
from rftdata.errors import PluginError, RftError, refuse
from rftdata.plugins import Registry

RewardPart = float | TokenRewards
RewardValue = RewardPart | Mapping[str, RewardPart]
GroupValue = Sequence[float | Mapping[str, float]]
Reward = Callable[..., RewardValue | GroupValue | Awaitable[RewardValue | GroupValue]]

REWARDS = Registry[Any](
    "reward",
    {
        "countdown": "rftcore.rewards.countdown:countdown",
        "exact_match": "rftcore.rewards.exact_match:exact_match",
        "format": "rftcore.rewards.format:Format",
        "judge": "rftcore.rewards.judge:JudgeReward",
        "length": "rftcore.rewards.length:Length",
        "math_verify": "rftcore.rewards.math_verify:MathVerify",
        "overlong": "rftcore.rewards.overlong:Overlong",
        "reasoning_gym": "rftcore.rewards.reasoning_gym:verify",
        "repetition": "rftcore.rewards.repetition:repetition",
        "rubric": "rftcore.rewards.rubric:RubricReward",
        "ruler": "rftcore.rewards.ruler:RulerReward",
        "shortest_correct": "rftcore.rewards.shortest_correct:shortest_correct",
        "unit_tests": "rftcore.rewards.unit_tests:UnitTests",
    },
)


@dataclass(frozen=True)
class LoadedReward:
    """An entry of `explorer.reward` with its function.

    Attributes:
        function: the function, a `Reward`, or the instance of a class.
        arguments: those of each call of the function.
    """

    config: RewardConfig
    function: Any
    arguments: Mapping[str, Any]

    @property
    def of_group(self) -> bool:
        """Whether it scores whole groups."""
        return bool(getattr(self.function, "of_group", False))

    def __call__(self, scored: Turn | list[AnsweredRollout], task: Task) -> Any:
        """Call the function for a turn, or for the rollouts of a group."""
        return self.function(scored, task, **self.arguments)


def load_rewards(entries: Sequence[RewardConfig | str], base_dir: Path) -> dict[str, LoadedReward]:
    """Load the functions of `explorer.reward`, by `RewardConfig.key`.

    Raises:
        PluginError: a name is unknown or does not load.
        ConfigError: a function does not accept its arguments.
        SeveralErrors: several entries are wrong.
    """
    found, errors = {}, []
    for entry in entries:
        config = RewardConfig.model_validate(entry)
        try:
            found[config.key] = _load(config, base_dir)
        except RftError as error:
            errors.append(error)
    refuse(errors)
    return found


def _load(config: RewardConfig, base_dir: Path) -> LoadedReward:
    origin, within = f"the reward {config.name!r}", "explorer.reward"
    if config.name.startswith(PREFIX):
        checked_arguments(RewardModel, 1, config.arguments, origin, within=within)
        return LoadedReward(
            config, RewardModel(base_dir / Path(config.name.removeprefix(PREFIX)).expanduser()), config.arguments
        )
    loaded = REWARDS.load(config.name, base_dir)
    section = getattr(loaded, "Config", None)
    if isinstance(loaded, type) and isinstance(section, type) and issubclass(section, BaseModel):
        try:
            values: dict[str, Any] = {"config": parse_section(section, config.arguments, within=within)}
        except RftError as error:
            raise error.about(origin) from error
        if "base_dir" in inspect.signature(loaded).parameters:
            values["base_dir"] = base_dir
        return LoadedReward(config, _made(loaded, values, origin), {})
    if isinstance(loaded, type):
        arguments = checked_arguments(loaded, 0, config.arguments, origin, within=within)
        return LoadedReward(config, _made(loaded, arguments, origin), {})
    if not callable(loaded):
        raise PluginError(
            f"{origin} is not a function",
            value=loaded,
            allowed="a function of (turn, task), or a class whose instances are called with them",
            todo="correct the name after the colon",
        )
    return LoadedReward(config, loaded, checked_arguments(loaded, 2, config.arguments, origin, within=within))


def _made(kind: type, arguments: Mapping[str, Any], origin: str) -> Reward:
    try:
        return kind(**arguments)  # type: ignore[no-any-return]  # called to find out
    except RftError as error:
        raise error.about(origin) from error
    except Exception as error:
        raise PluginError(
            f"{origin} cannot be made: {type(error).__name__}: {error}", todo="correct its arguments, or its class"
        ) from error
