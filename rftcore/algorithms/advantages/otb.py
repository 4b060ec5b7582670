"""The optimal token baseline: at each position, the mean return of the group, weighted by the noise of the gradients up to there (verl's otb).

    G_t  = Σ_{s ≥ t} r_s                         r_s: the token's own reward, at the last token the rollout's reward besides
    w_t  = 1 - 2 π(o_t) + Σ_v π(v)²              squared length of the gradient of log π(o_t) by the logits
    W_t  = Σ_{s ≤ t} w_s
    A_t  = G_t - Σ_i W_t G_t / Σ_i W_t           sums over the rollouts i of the group that have a t-th token

π is the policy before the step. The variance of the gradient is smallest with this baseline, if the gradients of different tokens are orthogonal and
as long as at the logits (compute_optimal_token_baseline_advantage and compute_multi_turn_optimal_token_baseline_advantage in
verl/trainer/ppo/core_algos.py at b178a3c, and its page on OTB). t counts the tokens with a loss over all turns.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import accumulated, outcomes, rewards_in_time, sums, tokens_in_time
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch


class OTBConfig(PartConfig):
    keep_tail: bool = Field(
        False,
        description="Give tokens beyond the end of all other rollouts the return as their advantage, instead of 0.",
    )


class OTB(Advantage):
    """A rollout's reward is that of its last turn. A rollout alone in its group is a tail from its first token on."""

    Config = OTBConfig
    config: OTBConfig
    needs = frozenset({"old", "collision"})
    min_group_size = 2

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        import torch

        assert signals.old_N is not None and signals.collision_N is not None
        place_N, last_N = tokens_in_time(batch)
        returns_N = accumulated(rewards_in_time(batch, outcomes(batch), place_N, last_N), last_N, 1.0)
        energy_N = 1.0 - 2.0 * signals.old_N.double().exp() + signals.collision_N.double()
        energy_N = energy_N[place_N].cumsum(0)
        rollout_N = last_N.long().cumsum(0) - last_N.long()
        # Subtract the sum before each rollout, and number its tokens.
        ends = last_N.nonzero().flatten()
        starts_N = torch.cat([ends.new_zeros(1), ends[:-1] + 1])[rollout_N] if len(ends) else ends
        before_N = torch.cat([energy_N.new_zeros(1), energy_N])[starts_N]
        weight_N, step_N = energy_N - before_N, torch.arange(len(place_N)) - starts_N
        group_N = batch.group_B[batch.sequence_N[place_N]]
        _, key_N = torch.stack([group_N, step_N]).unique(dim=1, return_inverse=True)
        alone_N = key_N.bincount()[key_N] == 1
        baseline_N = (sums(returns_N * weight_N, key_N) / sums(weight_N, key_N).clamp(min=1e-8))[key_N]
        in_time_N = (returns_N - baseline_N).where(~alone_N, returns_N if self.config.keep_tail else 0.0)
        advantages_N = in_time_N.new_zeros(len(in_time_N))
        advantages_N[place_N] = in_time_N
        return Credit(advantages_N=advantages_N.float())
