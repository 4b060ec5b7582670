"""Workflows: how a task is tried. One file each, named in this table.

A workflow is `async def workflow(task: Task, model: Model, score: Scorer, **args) -> Score`: it talks to the model as often
as it likes (each answer is recorded as a turn) and returns the reward of the whole rollout. What it raises becomes the
rollout's recorded outcome.

A workflow may declare what it needs of tasks, and `rft check --deep` and loading refuse tasks that lack it: `workflow.needs_answer = True`, and
`workflow.check_task = f` with `f(task, tokenizer=None, **args)`, which raises an RftError. The tokenizer is given for the first chats.
"""

from __future__ import annotations

from rftcore.workflows.task import Workflow
from rftdata.plugins import Registry

WORKFLOWS = Registry[Workflow]("workflow", {
    "single_turn": "rftcore.workflows.single_turn:single_turn",
    "demonstration": "rftcore.workflows.demonstration:demonstration",
})  # fmt: skip
