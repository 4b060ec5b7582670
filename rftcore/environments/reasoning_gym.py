"""Tasks of reasoning_gym with several attempts: each answer is scored by the package, and its score is the feedback.

The tasks come from the source `reasoning_gym:NAME`, so that selectors, features and the single-turn reward of the same name work on them, too.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

from rftcore.environments.base import Environment, Observation, Step
from rftdata.errors import ConfigError


class ReasoningGym(Environment):
    """The question, then the score of each answer until one is right. The rewards of an episode add up to the best score.

    Args:
        attempts: number of answers.
        retry_factor: by which a later answer counts less than the one before, at each attempt.
    """

    deterministic = True

    def __init__(self, attempts: int = 3, retry_factor: float = 1.0) -> None:
        if attempts < 1 or not 0 < retry_factor <= 1:
            raise ConfigError(
                "environment_args of reasoning_gym",
                value={"attempts": attempts, "retry_factor": retry_factor},
                allowed="attempts of 1 or more, a retry_factor above 0 and up to 1",
            )
        self.attempts, self.retry_factor = attempts, retry_factor
        self._num_answers, self._best = 0, 0.0

    def reset(self, task: Any, seed: int) -> Observation:
        metadata = dict(task.metadata)
        generator = metadata.pop("generator", None)
        if generator is None:
            raise ConfigError(
                f"task {task.task_key!r} of {task.taskset!r} does not come from reasoning_gym",
                todo="name a source reasoning_gym:NAME for the taskset, or use another environment",
            )
        self._score = reasoning_gym.get_score_answer_fn(str(generator))
        self._entry = {"question": task.prompt, "answer": task.answer, "metadata": metadata}
        return Observation(str(task.prompt), state="")

    def step(self, action: Any, role: str = "agent") -> Step:
        self._num_answers += 1
        answer = str(action).strip()
        score = float(self._score(answer=answer, entry=self._entry))
        reached = score * self.retry_factor ** (self._num_answers - 1)
        reward, self._best = max(0.0, reached - self._best), max(self._best, reached)
        left = self.attempts - self._num_answers
        if score >= 1:
            text = "That is right."
        else:
            text = f"That is not right: it scores {score:.2f} of 1."
            if left:
                text += f" Try again; you have {left} more attempt{'s' if left > 1 else ''}."
        seen = Observation(text, state=f"{self._num_answers}: {answer}")
        return Step(seen, reward, terminated=score >= 1 or left == 0, info={"score": score})
