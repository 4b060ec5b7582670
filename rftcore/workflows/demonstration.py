"""Workflow that writes given answers into the buffer, as demonstrations to imitate (supervised fine-tuning)."""

from __future__ import annotations

from typing import Any

from rftcore.workflows.chats import TURNS, assistant_turns, chat_sequence
from rftcore.workflows.single_turn import chat_messages
from rftcore.workflows.task import Model, Score, Scorer, Task
from rftdata.errors import ConfigError


async def demonstration(
    task: Task,
    model: Model,
    score: Scorer,
    *,
    column: str = "demonstration",
    system: str | None = None,
    examples: list[dict[str, str]] | None = None,
    template: str | None = None,
    turns: str = "all",
) -> Score:
    """Record the task's demonstration as the answer, without sampling.

    The demonstration is the metadata column `column`; else, if the prompt is a chat that ends with an assistant's turn, that chat;
    else the task's answer; else the assistant's turns within the chat.

    Args:
        column: metadata column with the demonstration.
        system, examples, template: as for single_turn; a template has no effect on a chat to imitate.
        turns: for a chat, `all` trains on all of the assistant's turns, `last` only on the last one.
    """
    response = _response(task, column, template, turns)
    messages = chat_messages(task, system, examples, template)
    if response is not None:
        return await score(model.write(messages, response), task)
    return await score(model.write_chat(messages, start=len(messages) - len(task.prompt), turns=turns), task)


def check_task(
    task: Task,
    tokenizer: Any = None,
    *,
    column: str = "demonstration",
    system: str | None = None,
    examples: list[dict[str, str]] | None = None,
    template: str | None = None,
    turns: str = "all",
) -> None:
    """Refuse a task without a demonstration and, given the model's tokenizer, a chat that its template cannot render.

    Raises:
        ConfigError: the reason.
    """
    response = _response(task, column, template, turns)
    if response is None and tokenizer is not None:
        messages = chat_messages(task, system, examples, template)
        chat_sequence(tokenizer, messages, start=len(messages) - len(task.prompt), turns=turns)


demonstration.check_task = check_task  # type: ignore[attr-defined]  # functions declare no attributes


def _response(task: Task, column: str, template: str | None, turns: str) -> str | None:
    """Return the answer to imitate; None if the turns of the task's own chat are imitated.

    Raises:
        ConfigError: there is neither.
    """
    if turns not in TURNS:
        raise ConfigError("explorer.workflow_args: unknown value of turns", value=turns, allowed=", ".join(TURNS))
    chat = task.prompt if isinstance(task.prompt, list) else []
    turn_indices = assistant_turns(chat)
    is_answered = bool(turn_indices) and turn_indices[-1] == len(chat) - 1
    response = task.metadata.get(column)
    if response is None and not is_answered:
        response = task.answer
    if response is not None:
        return str(response)
    if not turn_indices:
        what = "a chat without a turn of the assistant" if chat else f"neither {column!r} nor an answer to imitate"
        raise ConfigError(
            f"task {task.task_key!r} of {task.taskset!r} has {what}",
            todo="add a message with the role assistant, or remove the row"
            if chat
            else "name the column: `answer: …` in the taskset, or explorer.workflow_args: {column: …}; or remove the row",
        )
    if template is not None:
        raise ConfigError(
            f"explorer.workflow_args: template has no effect on task {task.task_key!r} of {task.taskset!r}, a chat to imitate",
            value=template,
            todo="remove it",
        )
    return None
