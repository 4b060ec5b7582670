"""An environment: a sum to guess, with a hint after each wrong number."""

from __future__ import annotations

import re

from rftcore.environments import Environment, Observation, Step
from rftcore.workflows.task import Task


class Sums(Environment):
    """Ends with the right number, or after some tries.

    Args:
        tries: numbers that may be tried.
    """

    deterministic = True  # an interrupted rollout continues where it stopped

    def __init__(self, tries: int = 3) -> None:
        self.tries = tries

    def reset(self, task: Task, seed: int) -> Observation:
        self.right = int(str(task.answer))
        return Observation(str(task.prompt), state=str(task.prompt))

    def step(self, action: str, role: str = "agent") -> Step:
        self.tries -= 1
        numbers = re.findall(r"-?\d+", action)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.right:
            return Step(Observation("Right."), reward=1.0, terminated=True)
        hint = "Write a number." if guess is None else f"{guess} is too {'low' if guess < self.right else 'high'}."
        return Step(Observation(hint, state=hint), truncated=self.tries == 0)
