"""Rewards to go minus the reward of the greedy response: ReMax (Li et al. 2023, arXiv 2310.10505).

    A_t = Σ_{s ≥ t} r_s - r(greedy response to the same task)

r_t is the token's own reward (the KL penalty of `kl.where: reward`), plus the rollout's reward at its last token.
"""

from __future__ import annotations

from rftcore.algorithms.advantages.rollouts import accumulated, outcomes, rewards_in_time, tokens_in_time
from rftcore.algorithms.base import Advantage, Credit, Signals, StepBatch


class ReMax(Advantage):
    """A rollout's reward is that of its last turn."""

    columns = frozenset({"baseline_rewards"})

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        assert batch.baseline_rewards_B is not None
        place_N, last_N = tokens_in_time(batch)
        returns_N = accumulated(rewards_in_time(batch, outcomes(batch), place_N, last_N), last_N, 1.0)
        advantages_N = -batch.baseline_rewards_B.double()[batch.sequence_N]
        advantages_N[place_N] += returns_N
        return Credit(advantages_N=advantages_N.float())
