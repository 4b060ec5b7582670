"""A verifier that takes its time, as a sandbox or a judge does: a quarter of a second on average, and now and then much longer."""

from __future__ import annotations

import asyncio
import random

from rftcore.workflows.task import Task, Turn

_MEAN_S, _LONGEST_S = 0.25, 1.5


async def score(turn: Turn, task: Task) -> float:
    """1 for the right answer, after a time that is exponentially distributed up to a limit."""
    await asyncio.sleep(min(random.expovariate(1 / _MEAN_S), _LONGEST_S))
    return float(turn.finish_reason == "stop" and turn.response == task.answer)
