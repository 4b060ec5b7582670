"""Drop groups whose rollouts all have the same reward.

GRPO's advantage is (r_i − mean(r)) / std(r) over the group (arXiv 2402.03300, section 4.1.2): where all rewards are
equal every advantage is 0, so the group costs a forward and a backward pass and teaches nothing. DAPO's dynamic sampling
(arXiv 2503.14476, eq. 11) drops the same groups and draws others in their place; here the planner refills them.

    - drop_zero_variance_groups: {}
    - drop_zero_variance_groups: {tolerance: 0.01}
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome


class DropZeroVarianceGroups(Operator):
    """Drops each group in which max(reward) − min(reward) ≤ `tolerance`, so groups of one too.

    Rows without a finite reward (null, NaN, ±inf) are not compared; a group with no finite reward at all is dropped.
    """

    class Config(StageConfig):
        """What counts as equal."""

        tolerance: float = Field(1e-6, ge=0, description="Rewards that lie no further apart count as equal.")

    reads = frozenset({"group_id", "rollout_index", "reward"})

    def apply(self, table: pa.Table) -> StageOutcome:
        reward = table["reward"].combine_chunks()
        finite = pc.if_else(pc.is_finite(reward), reward, pa.scalar(None, reward.type))
        groups = (
            pa.table({"group_id": table["group_id"], "rollout_index": table["rollout_index"], "reward": finite})
            .group_by("group_id", use_threads=False)
            .aggregate([("reward", "min"), ("reward", "max"), ("rollout_index", "count_distinct")])
        )
        texts = pa.array(
            [
                self._reason(*group)
                for group in zip(
                    groups["reward_min"].to_pylist(),
                    groups["reward_max"].to_pylist(),
                    groups["rollout_index_count_distinct"].to_pylist(),
                )
            ],
            pa.string(),
        )
        return StageOutcome(texts.take(pc.index_in(table["group_id"].combine_chunks(), value_set=groups["group_id"])))

    def _reason(self, lowest: float | None, highest: float | None, num_rollouts: int) -> str | None:
        if lowest is None or highest is None:
            return "no rollout of the group has a reward"
        if highest - lowest > self.config.tolerance:
            return None
        if num_rollouts == 1:
            return f"the group has one rollout (reward {lowest:g}), which has nothing to be compared with"
        if lowest == highest:
            return f"reward is {lowest:g} in all {num_rollouts} rollouts of the group"
        return (
            f"rewards of the {num_rollouts} rollouts of the group lie between {lowest:g} and {highest:g}, "
            f"no more than {self.config.tolerance:g} apart"
        )
