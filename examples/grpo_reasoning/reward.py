"""The example's own reward: the generator's verifier, and the model must stop by itself."""

from __future__ import annotations

from rftcore.explorer.rewards.reasoning_gym import verify
from rftcore.explorer.task import Task, Turn


def score(turn: Turn, task: Task) -> float:
    """1 when reasoning_gym's verifier accepts the whole response and the model ended it with its end token; else 0."""
    return float(turn.finish_reason == "stop" and verify(turn, task) == 1.0)
