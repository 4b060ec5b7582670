"""What each rollout adds to the best reward of k rollouts, instead of to the mean (Walder and Karkhanis 2025, arXiv 2505.15201, eq. 33).

For rollout i of a group of n, over all sets I of k rollouts with i in I:

    A_i = mean_I (max of the rewards of I - max of those of I without i)

k / n · A_i is the paper's leave-one-out weight: Σ_i k / n · A_i ∇log π(rollout i) estimates the gradient of the expected best reward of k
rollouts (pass@k where rewards are 0 and 1) without bias. With k = n only the best rollout has a weight, its distance from the second best
(Tang et al. 2025, arXiv 2503.19595; verl's grpo_passk divides that by the group's standard deviation). In a group of fewer than k rollouts, k is n.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import groups, rollout_means, rollout_rewards
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch

if TYPE_CHECKING:
    from torch import Tensor


class PassAtKConfig(PartConfig):
    k: int = Field(
        4, ge=2, description="Size of the subsets of a group. The reward of a subset is that of its best rollout."
    )


class PassAtK(Advantage):
    """A rollout's reward is that of its last turn, with the rewards of its tokens."""

    Config = PassAtKConfig
    config: PassAtKConfig
    min_group_size = 2

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        rewards_B = rollout_rewards(batch)
        advantages_B = rewards_B.new_zeros(len(rewards_B))
        for members in groups(batch):
            rollout = batch.rollout_B[members]
            gains = _gains(rollout_means(rewards_B[members], rollout), self.config.k)
            advantages_B[members] = gains[rollout.unique(return_inverse=True)[1]]
        return Credit(advantages_N=advantages_B[batch.sequence_N].float())


def _gains(rewards: Tensor, k: int) -> Tensor:
    """Return A of each rollout of a group, [n]."""
    import torch

    num = len(rewards)
    k = min(k, num)
    if k < 2:
        return torch.zeros_like(rewards)
    ascending, order = rewards.sort()
    # The best of the others is the m-th smallest in C(m - 1, k - 2) of the C(n - 1, k - 1) sets, m from 1; a better one leaves no gain.
    num_sets = math.comb(num - 1, k - 1)
    weights = rewards.new_tensor([math.comb(m, k - 2) / num_sets for m in range(num)])
    below, sums = (values.cumsum(0) - values for values in (weights, weights * ascending))
    gains = torch.empty_like(rewards)
    gains[order] = ascending * below - sums
    return gains
