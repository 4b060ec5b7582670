"""An environment for two roles, and programs that play one of them."""

from __future__ import annotations

from typing import Any

from rftcore.environments import Environment, Observation, Step
from rftcore.workflows.task import Task


class Takes(Environment):
    """Players take one or two of a heap of four in turn; taking the last wins 1, and the other gets -1."""

    roles = ("x", "o")
    deterministic = True

    async def reset(self, task: Any, seed: int) -> Observation:
        self.left = 4
        return self._seen("x")

    async def step(self, action: str, role: str = "agent") -> Step:
        self.left -= int(action)
        other = {"x": "o", "o": "x"}[role]
        if self.left > 0:
            return Step(self._seen(other), reward=-0.125 if action == "2" else 0.0)
        return Step(self._seen(other), rewards={role: 1.0, other: -1.0}, terminated=True)

    def _seen(self, role: str) -> Observation:
        return Observation(f"{self.left} left", role=role, state=str(self.left))


def one(seen: Observation, chat: list[dict[str, Any]], task: Task) -> str:
    assert chat[-1] == {"role": "user", "content": seen.text}
    return "1"


async def nothing(seen: Observation, chat: list[dict[str, Any]], task: Task) -> Any:
    return None
