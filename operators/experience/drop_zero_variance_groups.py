"""Drop groups whose rollouts all have the same reward.

GRPO's advantage is (r_i − mean(r)) / std(r) over the group (arXiv 2402.03300, section 4.1.2). Where all rewards are equal every
advantage is 0, so the group costs a forward and a backward pass without any gradient. DAPO's dynamic sampling
(arXiv 2503.14476, eq. 11) drops the same groups and draws others in their place; here the planner plans the replacements.

    - drop_zero_variance_groups: {}
    - drop_zero_variance_groups: {tolerance: 0.01}
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig, StageOutcome
from operators.groups import Groups, extremes, finite


class DropZeroVarianceGroups(Operator, revision=1):
    """Drops each group in which max(reward) − min(reward) over its rollouts is ≤ `tolerance`; this includes groups of one.

    A rollout of several rows counts once, with their mean, as in advantages. Rows without a finite reward (null, NaN, ±inf)
    are not counted; a group with no finite reward at all is dropped.
    """

    class Config(StageConfig):
        """Which rewards count as equal."""

        tolerance: float = Field(1e-6, ge=0, description="Rewards count as equal up to this difference.")

    reads = frozenset({"group_id", "rollout_index", "role", "reward"})
    remedy = "take tasks that the model solves at times (selector.type: difficulty), or raise algorithm.group_size"

    def apply(self, table: pa.Table) -> StageOutcome:
        groups = Groups.by_role(table)
        reward_R = groups.rollout_means(finite(table["reward"].combine_chunks()))
        known_R = ~np.isnan(reward_R)
        lowest_G, highest_G = extremes(reward_R[known_R], groups.group_R[known_R], groups.num_groups)
        size_G = np.bincount(groups.group_R, minlength=groups.num_groups)
        texts = [self._reason(*group) for group in zip(lowest_G.tolist(), highest_G.tolist(), size_G.tolist())]
        return StageOutcome(pa.array(texts, pa.string()).take(pa.array(groups.group_N)))

    def _reason(self, lowest: float, highest: float, num_rollouts: int) -> str | None:
        if lowest > highest:
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
