"""Workflow of one prompt, one answer and one reward."""

from __future__ import annotations

from rftcore.workflows.chat_encoding import Message
from rftcore.workflows.task import Model, Score, Scorer, Task
from rftdata.errors import ConfigError


async def single_turn(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    system: str | None = None,
    examples: list[dict[str, str]] | None = None,
    template: str | None = None,
) -> Score:
    """Prompt the model once with the task.

    Args:
        system: system message; an empty one keeps a chat template from adding its own.
        examples: solved examples before the question: mappings with `prompt` and `answer`.
        template: the question, with `{prompt}`, `{answer}` and `{metadata[…]}` filled in from the task.
    """
    turn = await model.chat(chat_messages(task, system, examples, template))
    return await score(turn, task)


def chat_messages(
    task: Task, system: str | None, examples: list[dict[str, str]] | None, template: str | None
) -> list[Message]:
    """Return the chat up to the question."""
    messages: list[Message] = [{"role": "system", "content": system}] if system is not None else []
    for example in examples or []:
        messages += [
            {"role": "user", "content": str(example["prompt"])},
            {"role": "assistant", "content": str(example["answer"])},
        ]
    if template is None and isinstance(task.prompt, list):
        return [*messages, *task.prompt]
    try:
        question = (template or "{prompt}").format(prompt=task.prompt, answer=task.answer, metadata=task.metadata)
    except (KeyError, IndexError) as error:
        raise ConfigError(
            f"the template of explorer.workflow_args names {error}, which task {task.task_key!r} of {task.taskset!r} does not have",
            value=template,
            allowed="{prompt}, {answer}, " + ", ".join(f"{{metadata[{key}]}}" for key in task.metadata),
            todo="correct the template",
        ) from error
    return [*messages, {"role": "user", "content": question}]
