"""The reward: 1 for the right number, else 0."""

from __future__ import annotations

import re

from rftcore.workflows.task import Task, Turn


def score(turn: Turn, task: Task) -> float:
    """Compare the last number of the answer with the task's. `turn.finish_reason` and `task.metadata` are there, too (`rft docs write-a-reward`)."""
    numbers = re.findall(r"-?\d+", turn.response)
    return float(bool(numbers) and numbers[-1] == task.answer)
