"""Rollouts compared within the group, and turns with others in the same state: GiGPO (Feng et al. 2025, arXiv 2505.10978).

    A_E(i)    = (Σ_t r_it - mean) / std          the return of a rollout, over the rollouts of the group
    R_it      = r_it + γ R_i,t+1
    A_S(i, t) = (R_it - mean) / std              over all turns of the group that began in the same state
    A         = A_E + ω A_S

r_it is the reward of the turn alone. Where workflows recorded none, it is 0 and the last turn has the rollout's reward. States are
compared within the group, so that two tasks whose environments look alike are kept apart. A turn in a state that no other turn shares has A_S = 0.
`norm: none` leaves both divisions out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import accumulated, normalised, rollouts, sums, turns_in_time
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch

if TYPE_CHECKING:
    from torch import Tensor


class GiGPOConfig(PartConfig):
    omega: float = Field(1.0, ge=0, description="ω: weight of the comparison within a state.")
    gamma: float = Field(0.95, gt=0, le=1, description="γ: discount per turn.")
    norm: Literal["none", "std"] = Field("std", description="Divide by the standard deviation, or by nothing.")
    eps: float = Field(1.0e-6, gt=0, description="Added to the standard deviation.")


class GiGPO(Advantage):
    """Metrics: `states_shared`, the share of turns that another turn is compared with."""

    Config = GiGPOConfig
    config: GiGPOConfig
    columns = frozenset({"state"})
    optional_columns = frozenset({"step_rewards"})
    min_group_size = 2

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        import torch

        assert batch.state_B is not None
        config = self.config
        order_B, last_B = turns_in_time(batch)
        rewards_B = _turn_rewards(batch)
        rollout_B = rollouts(batch)
        returns_R = sums(rewards_B, rollout_B)
        group_R = batch.group_B[order_B[last_B]].unique(return_inverse=True)[1]
        episode_R = normalised(returns_R, group_R, scale=config.norm == "std", eps=config.eps)

        returns_B = rewards_B.new_zeros(len(rewards_B))
        returns_B[order_B] = accumulated(rewards_B[order_B], last_B, config.gamma)
        _, state_B = torch.stack([batch.group_B, batch.state_B], dim=1).unique(dim=0, return_inverse=True)
        state_advantages_B = normalised(returns_B, state_B, scale=config.norm == "std", eps=config.eps)
        advantages_B = episode_R[rollout_B] + config.omega * state_advantages_B
        shared_B = (state_B.bincount() > 1)[state_B]
        metrics = {"states_shared": shared_B.double().mean().item() if len(shared_B) else 0.0}
        return Credit(advantages_N=advantages_B.float()[batch.sequence_N], metrics=metrics)


def _turn_rewards(batch: StepBatch) -> Tensor:
    """Return the reward of each turn with those of its tokens, float64 [B]."""
    if batch.step_rewards_B is not None:
        rewards_B = batch.step_rewards_B.double()
    else:
        order_B, last_B = turns_in_time(batch)
        rewards_B = batch.rewards_B.new_zeros(batch.num_sequences).double()
        rewards_B[order_B[last_B]] = batch.rewards_B.double()[order_B[last_B]]
    if batch.token_rewards_N is not None:
        rewards_B = rewards_B + batch.sum_per_sequence(batch.token_rewards_N.double())
    return rewards_B
