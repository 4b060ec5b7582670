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

from typing import Literal

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import (
    accumulated,
    normalised,
    of_turns,
    sums,
    turn_rewards,
    turns_in_time,
)
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch


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

        assert batch.state_BA is not None
        config = self.config
        turns = turns_in_time(batch)
        place_K = (turns.sequence_K, turns.column_K)
        group_K = batch.group_B[turns.sequence_K]
        rewards_K = turn_rewards(batch, turns)
        returns_R = sums(rewards_K, turns.rollout_K)
        group_R = group_K[turns.last_K].unique(return_inverse=True)[1]
        episode_R = normalised(returns_R, group_R, scale=config.norm == "std", eps=config.eps)

        returns_K = accumulated(rewards_K, turns.last_K, config.gamma)
        _, state_K = torch.stack([group_K, batch.state_BA[place_K]], dim=1).unique(dim=0, return_inverse=True)
        state_advantages_K = normalised(returns_K, state_K, scale=config.norm == "std", eps=config.eps)
        advantages_K = episode_R[turns.rollout_K] + config.omega * state_advantages_K
        shared_K = (state_K.bincount() > 1)[state_K]
        metrics = {"states_shared": shared_K.double().mean().item() if len(shared_K) else 0.0}
        return Credit(advantages_N=of_turns(batch, turns, advantages_K), metrics=metrics)
