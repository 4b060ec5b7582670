"""Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16) from a critic's values.

    δ_t = r_t + γ V_{t+1} - V_t         V after the last token is 0
    A_t = δ_t + γ λ A_{t+1}
    R_t = A_t + V_t                     the critic's target, before A is whitened over the batch's tokens

r_t is the token's own reward (the KL penalty of `kl.where: reward`), plus the rollout's reward at its last token. The token after
the last of a turn is the first of the next turn, whether the turns are one sequence or several.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import accumulated, outcomes, rewards_in_time, tokens_in_time, whitened
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch


class GAEConfig(PartConfig):
    gamma: float = Field(1.0, gt=0, le=1, description="γ: discount per token.")
    lam: float = Field(1.0, ge=0, le=1, description="λ: 0 trusts the critic, 1 the rewards.")
    whiten: bool = Field(True, description="Scale to mean 0 and standard deviation 1 over the batch's tokens.")


class GAE(Advantage):
    """A rollout's reward is that of its last turn. Metrics: `explained_variance` of the returns by the values."""

    Config = GAEConfig
    config: GAEConfig
    needs = frozenset({"values"})

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        assert signals.values_N is not None
        gamma = self.config.gamma
        place_N, last_N = tokens_in_time(batch)
        values_N = signals.values_N.double()[place_N]
        delta_N = rewards_in_time(batch, outcomes(batch), place_N, last_N) - values_N
        delta_N[:-1] += gamma * values_N[1:] * ~last_N[:-1]
        in_time_N = accumulated(delta_N, last_N, gamma * self.config.lam)
        advantages_N, returns_N = in_time_N.new_zeros(len(in_time_N)), in_time_N.new_zeros(len(in_time_N))
        advantages_N[place_N] = whitened(in_time_N) if self.config.whiten else in_time_N
        returns_N[place_N] = in_time_N + values_N
        metrics = {}
        if len(returns_N) > 1:
            variance = float(returns_N.var())
            metrics["explained_variance"] = 1.0 - float(in_time_N.var()) / variance if variance > 0 else 0.0
        return Credit(advantages_N=advantages_N.float(), returns_N=returns_N.float(), metrics=metrics)
