"""GRPO over rollouts of several turns (Trinity-RFT's step-wise GRPO, arXiv 2505.17826).

The reward of a rollout is that of its last turn. Rollouts are compared within the group, and all turns of a rollout have its advantage:

    A_i = (r_i(last) - mean) / (std + eps)          `step_norm` divides it by the number of the rollout's turns

The turns may be in one sequence or in several. `group` averages the rewards of a rollout's sequences instead, which differs where one of
them alone was relabelled.
"""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from rftcore.algorithms.advantages.group import Group, GroupConfig
from rftcore.algorithms.advantages.rollouts import rollout_rewards, rollout_sums
from rftcore.algorithms.base import Credit, Signals, StepBatch


class TurnsConfig(GroupConfig):
    step_norm: bool = Field(False, description="Divide the advantage by the number of the rollout's turns.")


class Turns(Group):
    """All keys of `group` apply."""

    Config = TurnsConfig
    config: TurnsConfig

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        rewards_B = rollout_rewards(batch).float()
        credit = super().__call__(replace(batch, rewards_B=rewards_B, token_rewards_N=None), signals)
        if not self.config.step_norm:
            return credit
        num_turns_B = rollout_sums(batch, (batch.turn_BA >= 0).sum(dim=1))
        return replace(credit, advantages_N=(credit.advantages_N / num_turns_B[batch.sequence_N]).float())
