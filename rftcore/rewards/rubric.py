"""The share of criteria that an answer meets, by a model: the stage `rubric`, asked while the rollout runs.

    - name: rubric
      endpoint: {url: "http://127.0.0.1:8000/v1", model: judge}
      criteria: [{description: Names the source of every figure.}, {description: Has no more than five sentences., weight: 0.5}]

The reward is the weighted share of criteria met, 0 … 1 (arXiv 2507.17746, eq. 1). Criteria may also stand in the metadata of each task, under `rubric`. See the
reward `judge` for what rewards and stages by a model have in common.
"""

from __future__ import annotations

from operators.experience.rubric import Rubric
from rftcore.rewards.judging_stage import JudgingReward, row_of
from rftcore.workflows.task import Task, Turn


class RubricReward(JudgingReward):
    """See the module header."""

    stage = Rubric
    Config = Rubric.Config

    async def __call__(self, turn: Turn, task: Task) -> float:
        """Return the share of criteria met.

        Raises:
            RftError: the judge gave no grades, or the task has no criteria.
        """
        (share,) = await self.scored([row_of(turn, task)])
        assert share is not None, "a row without a share has an error"
        return share
