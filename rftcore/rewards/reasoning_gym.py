"""The verifier that comes with each reasoning_gym generator."""

from __future__ import annotations

from functools import cache
from typing import Any

from rftcore.workflows.task import Task, Turn
from rftdata.errors import RftError


def verify(turn: Turn, task: Task) -> float:
    """Return the generator's own score of the response, 0 … 1 (`score_answer` of the task's dataset)."""
    generator = task.metadata.get("generator")
    if generator is None:
        raise RftError(
            f"task {task.task_key!r} of {task.taskset!r} does not come from reasoning_gym", todo="use another reward"
        )
    metadata = {key: value for key, value in task.metadata.items() if key != "generator"}
    entry = {"question": task.prompt, "answer": task.answer, "metadata": metadata}
    return float(_verifier(str(generator))(answer=turn.response.strip(), entry=entry))


@cache
def _verifier(generator: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(generator)
