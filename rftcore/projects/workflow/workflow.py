"""A rollout of several turns: the model may call a calculator, reads what it returns, and answers."""

from __future__ import annotations

import re

from rftcore.workflows.chat_encoding import Message
from rftcore.workflows.task import Model, Score, Scorer, Task

CALL = re.compile(r"calc\(\s*(-?\d+)\s*([+*-])\s*(-?\d+)\s*\)")
EXAMPLE: list[Message] = [
    {"role": "user", "content": "2 + 3 ="},
    {"role": "assistant", "content": "calc(2 + 3)"},
    {"role": "user", "content": "calc: 5"},
    {"role": "assistant", "content": "5"},
]


async def solve(task: Task, model: Model, score: Scorer, *, max_turns: int = 3) -> Score:
    """Let the model call the tool until it answers without a call.

    Args:
        max_turns: answers at most; the last one is scored whatever it is.
    """
    messages: list[Message] = [*EXAMPLE, {"role": "user", "content": str(task.prompt)}]
    for _ in range(max_turns - 1):
        turn = await model.chat(messages)
        call = CALL.search(turn.response)
        if call is None:
            return await score(turn, task)
        messages += [
            {"role": "assistant", "content": turn.response},
            {"role": "user", "content": f"calc: {calculated(*call.groups())}"},
        ]
    return await score(await model.chat(messages), task)


def calculated(left: str, operation: str, right: str) -> int:
    """Return what the calculator answers."""
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b}[operation]
