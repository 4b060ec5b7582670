"""An environment in which the policy counts."""

from __future__ import annotations

from typing import Any

from rftcore.environments import Environment, Observation, Step
from rftcore.tools import ToolCall


class Counts(Environment):
    """Rewards each number; ends with the last one."""

    def __init__(self, last: int = 3) -> None:
        self.last = last

    async def reset(self, task: Any, seed: int) -> Observation:
        return Observation(f"seed {seed}", state="start")

    async def step(self, action: str, role: str = "agent") -> Step:
        return Step(
            Observation(f"after {action}", state=action), reward=float(action), terminated=int(action) == self.last
        )


class CountsByTool(Counts):
    """The same, with a tool for counting."""

    tools = (
        {
            "type": "function",
            "function": {
                "name": "count",
                "description": "Say a number.",
                "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
            },
        },
    )

    async def step(self, action: Any, role: str = "agent") -> Step:
        return await super().step(str(action.arguments["n"]) if isinstance(action, ToolCall) else "0", role)
