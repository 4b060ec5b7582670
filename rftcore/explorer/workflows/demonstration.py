"""Answers that somebody else gave, written into the buffer to be imitated (supervised fine-tuning)."""

from __future__ import annotations

from rftcore.explorer.task import Model, Score, Scorer, Task
from rftcore.explorer.workflows.single_turn import chat_messages
from rftdata.errors import RftError


async def demonstration(
    task: Task, model: Model, score: Scorer, *, column: str = "demonstration", system: str | None = None,
    examples: list[dict[str, str]] | None = None, template: str | None = None,
) -> Score:  # fmt: skip
    """Write the task's demonstration as the answer; nothing is sampled.

    Args:
        column: metadata column that holds the demonstration; the task's answer where it has none.
        system, examples, template: as for single_turn.
    """
    response = task.metadata.get(column, task.answer)
    if response is None:
        raise RftError(f"task {task.task_key!r} of {task.taskset!r} has neither {column!r} nor an answer to imitate")
    turn = model.write(chat_messages(task, system, examples, template), str(response))
    return await score(turn, task)
