"""A model's mark as a reward: the stage `llm_judge`, asked while the rollout runs.

    - {name: judge, weight: 0.5, endpoint: {url: "http://127.0.0.1:8000/v1", model: judge}, scale: [1, 5]}

    reward = (mark − lowest) / (highest − lowest) of `scale`, 0 … 1

The arguments are those of the stage (`rft docs judge-with-a-model`): prompt, scale, pattern, budget, and how the server is called. A call that fails after its
retries fails the rollout.

Against the stage: the reward is known before the group is stored, counts in evaluations and may be one of several rewards; the stage delays no rollout, keeps
its scores for replays, and a failed call is a row with an error.
"""

from __future__ import annotations

from operators.experience.llm_judge import LlmJudge
from rftcore.rewards.judging_stage import JudgingReward, row_of
from rftcore.workflows.task import Task, Turn


class JudgeReward(JudgingReward):
    """See the module header."""

    stage = LlmJudge
    Config = LlmJudge.Config

    def __init__(self, config: LlmJudge.Config) -> None:
        super().__init__(config)
        self._low, self._high = config.scale

    async def __call__(self, turn: Turn, task: Task) -> float:
        """Return the mark, 0 … 1.

        Raises:
            RftError: the judge gave no mark.
        """
        (mark,) = await self.scored([row_of(turn, task)])
        assert mark is not None, "a row without a mark has an error"
        return (mark - self._low) / (self._high - self._low)
