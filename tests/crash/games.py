"""Rollouts of several turns of the crash tests' run: an environment and a tool, each in processes of its own, which the tests kill, too.

The environment is deterministic, and its observations are functions of the actions, so that a reader of a row can check its reward.
"""

from __future__ import annotations

from typing import Any

from rftcore.environments import Environment, Observation, Step, open_environment
from rftcore.tools.calls import ToolCall
from rftcore.tools.tool_boxes import ToolSettings, open_tools
from rftcore.workflows.task import Model, Score, Scorer, Task

TURNS = 3


def reward_of(text: str) -> float:
    """0 to 1 in quarters, from the text alone."""
    return (sum(text.encode()) % 5) / 4


class Game(Environment):
    """Rewards each of some actions."""

    deterministic = True

    def reset(self, task: Any, seed: int) -> Observation:
        self.count = 0
        return Observation(f"game {seed}")

    def step(self, action: Any, role: str = "agent") -> Step:
        self.count += 1
        return Step(Observation(f"step {self.count}"), reward_of(action), terminated=self.count == TURNS)


def turn_round(text: str) -> str:
    """Write a text backwards.

    Args:
        text: any.
    """
    return text[::-1]


async def play(task: Task, model: Model, score: Scorer) -> Score:
    """Give the environment what a tool makes of each answer, or the answer where the tool fails."""
    messages, total = [], 0.0
    async with (
        open_environment("./games.py:Game") as game,
        open_tools(ToolSettings(("./games.py:turn_round",), processes=1), task) as tools,
    ):
        seen = await game.reset(task, task.seed)
        while True:
            messages.append({"role": "user", "content": seen.text})
            turn = await model.chat(messages)
            messages.append(turn.message)
            [result] = await tools.run([ToolCall("turn_round", {"text": turn.response})])
            step = await game.step(turn.response if result.error else result.text)
            turn.record(step_reward=step.reward)
            total += step.reward
            if step.ended:
                return Score(total)
            seen = step.observation
