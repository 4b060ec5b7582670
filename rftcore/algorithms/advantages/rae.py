"""Rewards minus a running mean of each role: role-conditioned advantage estimation (SPIRAL, Liu et al. 2025, arXiv 2506.24119).

    A = R - b                            b: the baseline of the rollout's taskset and role, before this rollout
    b := decay · b + (1 - decay) · R     after each rollout, in the order of the batch, from 0

In self-play the mean over a group says nothing: in a game of two roles with opposite rewards it is 0 whatever the policy does. The baseline is what the
role usually gets, so moving first is no credit. With one role it is REINFORCE with a running baseline. No groups are needed (`group_size: 1`).

The trainer keeps the baselines in `rft.role_baseline`, a row for each step that advanced one, so that a run that is resumed, taken back or forked
continues with those of its last step. R has the rewards of tokens, and in A the KL penalty of `kl.where: reward`, too. A rollout advances the baseline
each time that it is trained. A reward that is corrected before it is trained counts corrected in both. A later correction changes no baseline.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.advantages.rollouts import rollout_rewards
from rftcore.algorithms.base import Advantage, Credit, PartConfig, Signals, StepBatch


class RAEConfig(PartConfig):
    decay: float = Field(
        0.95,
        ge=0,
        lt=1,
        description="Weight of the baseline before a rollout; 1 - decay is that of the rollout's reward.",
    )


class RAE(Advantage):
    """A rollout's reward is that of its last turn. Metrics: `advantage_mean`, 0 where baselines have caught up with the rewards."""

    Config = RAEConfig
    config: RAEConfig
    columns = frozenset({"role_baselines"})

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        assert batch.role_baselines_B is not None
        advantages_B = rollout_rewards(batch) - batch.role_baselines_B.double()
        advantages_N = advantages_B.float()[batch.sequence_N]
        metrics = {"advantage_mean": advantages_N.mean().item() if len(advantages_N) else 0.0}
        return Credit(advantages_N=advantages_N, metrics=metrics)
