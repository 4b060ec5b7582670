"""The part of the reward that a program computes; the judge's part is added in the pipeline."""

from __future__ import annotations

from rftcore.workflows.task import Task, Turn


def right_at_the_end(turn: Turn, task: Task) -> float:
    """Return 1 if the text after the last equals sign is the answer, else 0."""
    return float(turn.response.rpartition("=")[2].strip() == task.answer)
