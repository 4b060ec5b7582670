"""Each turn by what follows it, compared with the same turn of the group's other rollouts.

    G_t = r_t + γ G_{t+1}                 r_t: the reward of the turn alone
    A_t = (G_t - mean_t) / (std_t + eps)  over the group's rollouts that have a turn of number t, std with n - 1

In `returns`, early turns compete with late ones, whose returns have fewer rewards ahead of them. Here a turn competes with those of its own number,
which suits rollouts that take the same steps. A turn that no other rollout reaches, and one whose returns are equal to the others', has A = 0.
`outcome` and labels are as in `returns`.
"""

from __future__ import annotations

from rftcore.algorithms.advantages.returns import Returns
from rftcore.algorithms.advantages.rollouts import normalised, of_turns
from rftcore.algorithms.base import Credit, Signals, StepBatch


class TurnRank(Returns):
    """All keys of `returns` apply. Metrics: `turns_compared`, the share of turns that another rollout has, too."""

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        import torch

        config = self.config
        turns, returns_K = self._returns(batch)
        number_K = batch.turn_BA[turns.sequence_K, turns.column_K]
        rank_K = torch.stack([batch.group_B[turns.sequence_K], number_K], dim=1).unique(dim=0, return_inverse=True)[1]
        advantages_K = normalised(returns_K, rank_K, scale=config.norm == "std", eps=config.eps)
        compared_K = (rank_K.bincount() > 1)[rank_K]
        metrics = {"turns_compared": compared_K.double().mean().item() if len(compared_K) else 0.0}
        return Credit(advantages_N=of_turns(batch, turns, advantages_K), metrics=metrics)
