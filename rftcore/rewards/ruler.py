"""The answers of a group, scored relative to each other by a model in one call: the stage `ruler`, asked when all rollouts of the group have answered.

    - {name: ruler, endpoint: {url: "http://127.0.0.1:8000/v1", model: judge}}

It is a reward over a whole group, 0 … 1 for each rollout. The judge sees the task's prompt and the last answer of each rollout; equal answers get equal scores.
If the answers of a group are all equal, or all but one rollout failed, nothing is compared, and the reward is 0.
"""

from __future__ import annotations

from operators.experience.ruler import Ruler
from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.rewards.judging_stage import JudgingReward, row_of
from rftcore.workflows.task import Task


class RulerReward(JudgingReward):
    """See the module header."""

    stage = Ruler
    Config = Ruler.Config
    of_group = True

    async def __call__(self, rollouts: list[AnsweredRollout], task: Task) -> list[float]:
        """Return the score of each rollout.

        Raises:
            RftError: the judge gave no scores.
        """
        rows = [row_of(one.turn, task, place, with_chat=False) for place, one in enumerate(rollouts)]
        return [0.0 if score is None else score for score in await self.scored(rows)]
