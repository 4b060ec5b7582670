"""The example's reward: reasoning_gym's verifier on the text after the last equals sign, if the model ended its answer itself."""

from __future__ import annotations

from dataclasses import replace

from rftcore.rewards.reasoning_gym import verify
from rftcore.workflows.task import Task, Turn


def score(turn: Turn, task: Task) -> float:
    """Return 1 if the answer is right and the model ended it with its end token; else 0."""
    answer = turn.response.rpartition("=")[2]
    return float(turn.finish_reason == "stop" and verify(replace(turn, response=answer), task) == 1.0)
