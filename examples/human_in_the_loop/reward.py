"""The automatic reward of the example, which forgets something."""

from __future__ import annotations

from typing import Any


def in_order(turn: Any, task: Any) -> float:
    """Return 1 if as many digits as asked come back in ascending order. It forgets to check that they are the same digits."""
    response = turn.response.strip()
    is_complete = response.isdecimal() and len(response) == len(task.answer)
    return float(turn.finish_reason == "stop" and is_complete and list(response) == sorted(response))
