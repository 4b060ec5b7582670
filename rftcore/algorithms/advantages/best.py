"""The best rollouts of each group, all others left out: RAFT (Dong et al. 2023, arXiv 2304.06767).

    A_i = 1 for the `num` rollouts with the highest rewards of the group, and for those whose reward is equal to the last of them

With the loss -A log π this is supervised fine-tuning on the best responses. The other tokens count in no denominator. A group whose
rewards are all equal has no best rollout, and is left out. `above` additionally sets a bound on the reward.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import groups, rollout_means, rollout_rewards
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch


class BestConfig(PartConfig):
    num: int = Field(1, ge=1, description="Number of rollouts of a group that are imitated.")
    above: float | None = Field(None, description="Imitate only rollouts with a reward above this.")


class Best(Advantage):
    """A rollout's reward is that of its last turn, with the rewards of its tokens. Metrics: `imitated`, the share of tokens that are trained on."""

    Config = BestConfig
    config: BestConfig
    min_group_size = 2
    imitates = True

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        rewards_B = rollout_rewards(batch)
        kept_B = rewards_B.new_zeros(len(rewards_B)).bool()
        for members in groups(batch):
            own = rewards_B[members]
            ranked = rollout_means(own, batch.rollout_B[members]).sort(descending=True).values
            if bool(ranked[0] > ranked[-1]):
                kept_B[members] = own >= ranked[min(self.config.num, len(ranked)) - 1]
        if self.config.above is not None:
            kept_B &= rewards_B > self.config.above
        kept_N = kept_B[batch.sequence_N]
        metrics = {"imitated": kept_N.double().mean().item() if len(kept_N) else 0.0}
        return Credit(advantages_N=kept_N.float(), counted_N=kept_N, metrics=metrics)
