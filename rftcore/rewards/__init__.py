"""Rewards: functions of a turn and its task. One file each, listed in this table.

A reward is `def reward(turn: Turn, task: Task) -> float | TokenRewards | dict[str, …]`, plain or async. Several rewards are summed. A mapping
counts with its sum, and its parts are stored. `TokenRewards` have one number per token of the response. An exception becomes the rollout's recorded
outcome.

A plain function runs in a separate process (`rftcore.user_functions.function_processes`), an async one in the event loop of the workflows. A plain
function that returns immediately may set `function.runs_in_explorer = True` to avoid the other process.

`reward_model:FOLDER` is the score of a model that a run with `algorithm: reward_model` trained.

A reward that compares with `task.answer` sets `reward.needs_answer = True`. `rft check --deep` and loading then name the tasks without
an answer, and refuse a set in which no task has one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from rftcore.rewards.reward_model import PREFIX, RewardModel
from rftcore.workflows.task import Task, TokenRewards, Turn
from rftdata.errors import RftError, refuse
from rftdata.plugins import Registry

RewardPart = float | TokenRewards
RewardValue = RewardPart | Mapping[str, RewardPart]
Reward = Callable[[Turn, Task], RewardValue | Awaitable[RewardValue]]

REWARDS = Registry[Reward](
    "reward",
    {
        "exact_match": "rftcore.rewards.exact_match:exact_match",
        "reasoning_gym": "rftcore.rewards.reasoning_gym:verify",
    },
)


def load_rewards(names: list[str], base_dir: Path) -> dict[str, Reward]:
    """Load the named functions.

    Raises:
        PluginError: a name is unknown or does not load.
        SeveralErrors: several names are or do.
    """
    found, errors = {}, []
    for name in names:
        try:
            found[name] = _load(name, base_dir)
        except RftError as error:
            errors.append(error)
    refuse(errors)
    return found


def _load(name: str, base_dir: Path) -> Reward:
    if name.startswith(PREFIX):
        return RewardModel(base_dir / Path(name.removeprefix(PREFIX)).expanduser())
    return REWARDS.load(name, base_dir)
