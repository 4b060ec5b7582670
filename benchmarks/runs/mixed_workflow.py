"""Workflow for `mix`: some rollouts are demonstrations, written from the task's answer; the others are sampled."""

from __future__ import annotations

import random

from rftcore.workflows.single_turn import chat_messages
from rftcore.workflows.task import Model, Score, Scorer, Task


async def mixed(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    share: float = 0.125,
    sampled_tasksets: list[str] | None = None,
    system: str | None = None,
    examples: list[dict[str, str]] | None = None,
    template: str | None = None,
) -> Score:
    """Answer as `single_turn` does, or write the question and its right answer as the response.

    Args:
        share: probability of a demonstration.
        sampled_tasksets: tasksets without demonstrations, on which the policy is evaluated.
        system, examples, template: as for single_turn.
    """
    messages = chat_messages(task, system, examples, template)
    if task.taskset not in (sampled_tasksets or ()) and random.random() < share:
        return await score(model.write(messages, f"{messages[-1]['content']} {task.answer}"), task)
    return await score(await model.chat(messages), task)
