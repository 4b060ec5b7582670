"""The part of the reward that a program can give; the judge's part comes in the pipeline."""

from __future__ import annotations

from rftcore.workflows.task import Task, Turn


def right_at_the_end(turn: Turn, task: Task) -> float:
    """1 when what stands after the last equals sign is the answer, else 0."""
    return float(turn.response.rpartition("=")[2].strip() == task.answer)
