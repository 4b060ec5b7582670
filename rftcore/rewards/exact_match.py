"""Reward 1 for exactly the right answer."""

from __future__ import annotations

from rftcore.workflows.task import Task, Turn


def exact_match(turn: Turn, task: Task) -> float:
    """Return 1 if the response, stripped, is the task's answer and the model ended it itself; else 0."""
    return float(turn.finish_reason == "stop" and turn.response.strip() == task.answer)


exact_match.runs_in_explorer = True  # type: ignore[attr-defined]  # functions declare no attributes; it returns at once
exact_match.needs_answer = True  # type: ignore[attr-defined]  # as above
