"""Workflows, which perform rollouts of a task. One file each, listed in this table.

A workflow is `async def workflow(task: Task, model: Model, score: Scorer, **args) -> Score`. It calls the model any number of
times (each answer is recorded as a turn) and returns the reward of the whole rollout. An exception becomes the rollout's
recorded outcome.

A workflow may declare what it needs of tasks: `workflow.needs_answer = True`, and `workflow.check_task = f` with
`f(task, tokenizer=None, **args)`, which raises an RftError. `rft check --deep` and loading then refuse tasks that lack it. The tokenizer
is passed for the first chats. `workflow.check_args = f` with `f(base_dir, **args)`, which raises a ConfigError, checks the workflow's own
settings before a run; `workflow.check_model = f` with `f(tokenizer, **args)` does so for the model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rftcore.workflows.task import Workflow
from rftdata.errors import ConfigError
from rftdata.plugins import Registry

WORKFLOWS = Registry[Workflow](
    "workflow",
    {
        "agent": "rftcore.programs.agent:agent",
        "single_turn": "rftcore.workflows.single_turn:single_turn",
        "demonstration": "rftcore.workflows.demonstration:demonstration",
        "environment": "rftcore.workflows.environment:environment",
        "multi_agent": "rftcore.workflows.multi_agent:multi_agent",
        "tools": "rftcore.workflows.tools:tools",
        "verifiers": "rftcore.programs.verifiers:verifiers",
    },
)


def check_workflow_args(
    name: str, function: Callable[..., object], num_preceding: int, args: Mapping[str, Any]
) -> None:
    """Refuse arguments with which every call would fail.

    Args:
        name: name of the workflow in the configuration.
        function: the workflow or its `check_task`.
        num_preceding: number of arguments that precede `args`: 3 of the workflow, 2 of `check_task`.
        args: explorer.workflow_args.

    Raises:
        ConfigError: the function does not accept them, or requires another.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*[None] * num_preceding, **args)
    except TypeError as error:
        parameters = list(signature.parameters.values())[num_preceding:]
        names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        raise ConfigError(
            f"the workflow {name!r} does not accept its explorer.workflow_args: {error}",
            value=dict(args),
            allowed=", ".join(names) or "none",
            todo="correct explorer.workflow_args",
        ) from error
