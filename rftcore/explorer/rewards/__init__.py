"""Rewards: functions of a turn and its task. One file each, named in this table.

A reward is `def reward(turn: Turn, task: Task) -> float | dict[str, float]`, sync or async. Several are summed; a mapping
counts by its sum and keeps its parts. What it raises becomes the rollout's recorded outcome.
"""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

from rftcore.explorer.task import Score, Scorer, Task, Turn
from rftdata import plugins
from rftdata.errors import RftError

REWARDS = {
    "exact_match": "rftcore.explorer.rewards.exact_match:exact_match",
    "reasoning_gym": "rftcore.explorer.rewards.reasoning_gym:verify",
}


def build_scorer(names: list[str], base_dir: Path) -> Scorer:
    """One scorer that sums the named rewards.

    A part is called by its function's name or its key in the function's mapping; where that name is taken already, by the
    name in the configuration as well (`./b.py:score`, `./b.py:score.accuracy`).

    Raises:
        PluginError: a name that is unknown or does not load.
    """
    functions = [(name, plugins.load("reward", name, REWARDS, base_dir)) for name in names]

    async def score(turn: Turn, task: Task) -> Score:
        parts: dict[str, float] = {}
        total = 0.0
        for name, function in functions:
            value: Any = function(turn, task)
            if inspect.isawaitable(value):
                value = await value
            if isinstance(value, dict):
                named = [(str(key), f"{name}.{key}", float(part)) for key, part in value.items()]
            else:
                named = [(name.rpartition(":")[2], name, float(value))]
            for short, qualified, part in named:
                parts[qualified if short in parts else short] = part
                total += part
        if not math.isfinite(total):
            raise RftError("a reward is not finite", value=parts, todo="mend the reward function")
        return Score(total, parts)

    return score
