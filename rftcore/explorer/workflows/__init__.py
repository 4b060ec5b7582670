"""Workflows: how a task is tried. One file each, named in this table.

A workflow is `async def workflow(task: Task, model: Model, score: Scorer, **args) -> Score`: it talks to the model as often
as it likes (each answer is recorded as a turn) and returns the reward of the whole rollout. What it raises becomes the
rollout's recorded outcome.
"""

WORKFLOWS = {
    "single_turn": "rftcore.explorer.workflows.single_turn:single_turn",
    "demonstration": "rftcore.explorer.workflows.demonstration:demonstration",
}
