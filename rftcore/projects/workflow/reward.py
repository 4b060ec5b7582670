"""The reward of a rollout: 1 if its last answer has the right number, else 0."""

from __future__ import annotations

import re

from rftcore.workflows.task import Task, Turn


def score(turn: Turn, task: Task) -> float:
    """Compare the last number of the answer with the task's."""
    numbers = re.findall(r"-?\d+", turn.response)
    return float(bool(numbers) and numbers[-1] == task.answer)
