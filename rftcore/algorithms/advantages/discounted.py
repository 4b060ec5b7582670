"""Rewards to go, whitened over the tokens of the batch: REINFORCE++ (Hu et al. 2025, arXiv 2501.03262).

    R_t = r_t + γ R_{t+1}               r_t: the token's own reward, at the last token the rollout's reward besides
    A_t = (R_t - mean(R)) / std(R)      over all tokens of the batch

`baseline: mean` subtracts the group's mean reward from the rollout's reward first: the paper's form for several responses to a prompt.
The KL penalty of `kl.where: reward` is a reward of each token.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import (
    accumulated,
    groups,
    outcomes,
    rewards_in_time,
    rollout_means,
    tokens_in_time,
    whitened,
)
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch


class DiscountedConfig(PartConfig):
    gamma: float = Field(1.0, gt=0, le=1, description="γ: weight of the next token's return.")
    baseline: Literal["none", "mean"] = Field(
        "none", description="Subtracted from a rollout's reward: the group's mean."
    )
    whiten: bool = Field(True, description="Scale to mean 0 and standard deviation 1 over the batch's tokens.")


class Discounted(Advantage):
    """A rollout's reward is that of its last turn."""

    Config = DiscountedConfig
    config: DiscountedConfig

    @property
    def min_group_size(self) -> int:  # type: ignore[override]  # a class attribute where it is the same for all configurations
        return 2 if self.config.baseline == "mean" else 1

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        outcomes_B = outcomes(batch)
        if self.config.baseline == "mean":
            for members in groups(batch):
                own = outcomes_B[members]
                outcomes_B[members] = own - rollout_means(own, batch.rollout_B[members]).mean()
        place_N, last_N = tokens_in_time(batch)
        returns_N = accumulated(rewards_in_time(batch, outcomes_B, place_N, last_N), last_N, self.config.gamma)
        advantages_N = returns_N.new_zeros(len(returns_N))
        advantages_N[place_N] = whitened(returns_N) if self.config.whiten else returns_N
        return Credit(advantages_N=advantages_N.float())
