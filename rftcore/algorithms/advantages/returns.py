"""Each turn by what follows it: returns over turns, compared within the group.

    G_t = r_t + γ G_{t+1}               r_t: the reward of the turn alone
    A_t = (G_t - m) / (s + eps)         m and s over all turns of the group's rollouts, each rollout with weight 1:

    m   = 1/R Σ_i 1/T_i Σ_t G_it                      R rollouts, of T_i turns each
    s²  = 1/(R - 1) Σ_i 1/T_i Σ_t (G_it - m)²         A is 0 where s < 1e-8, and in a group of one rollout

Rollouts of one turn have the advantages of `group`. If every turn had weight 1, long rollouts would decide the mean. The spread is that of
turns and not of rollouts, because rollouts with rewards (0, 1) and (1, 0) have equal sums and different turns. `norm: none` divides by nothing.

The rollout's own reward takes no part unless it is added to that of the last turn (`outcome: last`): a workflow whose reward is
the sum of its turns' would count it twice. Without it, a label on the reward of a rollout has no effect on the advantages. Turns are in the order in
which they were recorded, also those of branches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import TurnsInTime, accumulated, of_turns, sums, turn_rewards, turns_in_time
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch

if TYPE_CHECKING:
    from torch import Tensor

# Returns that differ by less are equal: rewards are float32, and what is left is rounding.
_SMALLEST_SPREAD = 1e-8


class ReturnsConfig(PartConfig):
    gamma: float = Field(1.0, gt=0, le=1, description="γ: discount per turn.")
    norm: Literal["none", "std"] = Field("std", description="Divide by s, or by nothing.")
    eps: float = Field(1.0e-6, gt=0, description="Added to s.")
    outcome: Literal["none", "last"] = Field(
        "none", description="Where the rollout's reward counts besides those of turns: nowhere, or at its last turn."
    )


class Returns(Advantage):
    """Metrics: `groups_without_gradient`, the share of groups whose returns are equal or of one rollout."""

    Config = ReturnsConfig
    config: ReturnsConfig
    columns = frozenset({"step_rewards"})
    min_group_size = 2

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        turns, returns_K = self._returns(batch)
        group_K = batch.group_B[turns.sequence_K].unique(return_inverse=True)[1]
        num_rollouts_G = group_K[turns.last_K].bincount()
        weight_K = 1.0 / turns.rollout_K.bincount()[turns.rollout_K].double()
        mean_G = sums(weight_K * returns_K, group_K) / num_rollouts_G
        centred_K = returns_K - mean_G[group_K]
        spread_G = (sums(weight_K * centred_K.square(), group_K) / (num_rollouts_G - 1).clamp(min=1)).sqrt()
        compared_G = (num_rollouts_G > 1) & (spread_G >= _SMALLEST_SPREAD)
        scaled_K = centred_K if self.config.norm == "none" else centred_K / (spread_G + self.config.eps)[group_K]
        skipped = 1.0 - compared_G.double().mean().item() if len(compared_G) else 0.0
        return Credit(
            advantages_N=of_turns(batch, turns, scaled_K * compared_G[group_K]),
            metrics={"groups_without_gradient": skipped},
        )

    def _returns(self, batch: StepBatch) -> tuple[TurnsInTime, Tensor]:
        """Return all turns, and G of each, float64 [K]."""
        turns = turns_in_time(batch)
        rewards_K = turn_rewards(batch, turns, with_outcome=self.config.outcome == "last")
        return turns, accumulated(rewards_K, turns.last_K, self.config.gamma)
