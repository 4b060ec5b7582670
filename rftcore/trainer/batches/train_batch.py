"""`TrainBatch`: the padded batch that the trainer loop hands to the learner.

Letters: B experiences, T tokens of the longest, A turns of the one with the most. Padding is on the right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rftcore.algorithms.base import StepBatch
from rftdata.errors import RftError


@dataclass(frozen=True)
class TrainBatch:
    """Whole experiences of one trainer step, padded right, on the CPU. Index t always refers to token t itself.

    Attributes:
        token_ids_BT: int64; `pad_token_id` after the end.
        attention_mask_BT: bool; True on tokens of the experience, False on padding.
        loss_mask_BT: bool; True on the response tokens that count. Never True at t = 0: nothing predicts it.
        behavior_logprobs_BT: float32, nats; 0 where the loss mask is False, NaN where it is True and no policy sampled.
        rewards_B: float32; the reward to train with.
        group_index_B: int64, 0..num_groups-1.
        rollout_index_B: int64; which rollout of its group; branches of one rollout share it.
        importance_weights_B: float32; the loss of each of its tokens is multiplied by it: the correction for the chance with
            which prioritised sampling drew it (arXiv 1511.05952, section 3.4), 1 otherwise.
        turn_BA: int64; number of each turn in its rollout, ascending; -1 after the last.
        turn_start_BA: int64; first token of each turn; T after the last.
        token_rewards_BT, teacher_logprobs_BT: float32; None where no experience has such an array. An experience without the first has 0,
            without the second NaN.
        step_rewards_BA, state_BA: one number per turn, None where no experience has any; see `StepBatch`.
        role_baselines_B: one number per experience, None where no part reads it; see `StepBatch`.
        baseline_rewards_B: one number per experience, None where no experience has one; see `StepBatch`.
        reward_parts_B, reward_names: rewards by name; see `StepBatch`.
        paired: whether experiences 2p and 2p + 1 are the chosen and the rejected one of a preference pair.
    """

    token_ids_BT: Tensor
    attention_mask_BT: Tensor
    loss_mask_BT: Tensor
    behavior_logprobs_BT: Tensor
    rewards_B: Tensor
    group_index_B: Tensor
    rollout_index_B: Tensor
    importance_weights_B: Tensor
    turn_BA: Tensor
    turn_start_BA: Tensor
    token_rewards_BT: Tensor | None = None
    teacher_logprobs_BT: Tensor | None = None
    step_rewards_BA: Tensor | None = None
    state_BA: Tensor | None = None
    baseline_rewards_B: Tensor | None = None
    role_baselines_B: Tensor | None = None
    reward_parts_B: Tensor | None = None
    reward_names: tuple[str, ...] = ()
    paired: bool = False

    @property
    def num_experiences(self) -> int:
        return self.token_ids_BT.shape[0]

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask_BT.sum())

    def in_pairs(self, rows: Sequence[int]) -> TrainBatch:
        """Return the preference pairs of these experiences, chosen and rejected in turn; an experience may be in several pairs."""
        index = torch.tensor(rows, dtype=torch.int64)
        per_experience = {
            name: values[index]
            for name, values in vars(self).items()
            if name.endswith(("_B", "_BA", "_BT")) and values is not None
        }
        return replace(self, **per_experience, paired=True)

    def deal(self, parts: int, seed: int) -> list[list[int]]:
        """Deal whole groups, or whole pairs, to parts of nearly the same number of them; return the experiences of each part.

        Args:
            parts: number of parts; fewer where there are fewer groups.
            seed: of the order in which groups are dealt.
        """
        units_B = torch.arange(self.num_experiences) // 2 if self.paired else self.group_index_B
        units = units_B.unique()
        order = units[torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))]
        return [
            torch.isin(units_B, dealt).nonzero().flatten().tolist()
            for dealt in order.chunk(min(parts, max(1, len(units))))
        ]

    def for_algorithm(self, step: int) -> StepBatch:
        """Return what algorithms read: the tokens that count, flat, and the entries per experience.

        Args:
            step: number of the trainer step, from 1.
        """
        counted = self.loss_mask_BT
        sequence_N, place_N = counted.nonzero(as_tuple=True)
        return StepBatch(
            step=step,
            rewards_B=self.rewards_B,
            group_B=self.group_index_B,
            rollout_B=self.rollout_index_B,
            turn_BA=self.turn_BA,
            turn_N=self._turn_N(sequence_N, place_N),
            sequence_N=sequence_N,
            behavior_N=self.behavior_logprobs_BT[counted],
            importance_weights_B=self.importance_weights_B,
            expert_B=self.expert_B,
            token_rewards_N=None if self.token_rewards_BT is None else self.token_rewards_BT[counted],
            step_rewards_BA=self.step_rewards_BA,
            state_BA=self.state_BA,
            baseline_rewards_B=self.baseline_rewards_B,
            role_baselines_B=self.role_baselines_B,
            reward_parts_B=self.reward_parts_B,
            reward_names=self.reward_names,
        )

    def _turn_N(self, sequence_N: Tensor, place_N: Tensor) -> Tensor:
        """Return the column of the turn of each token, from its place: the last turn that begins there or before."""
        turn_N = torch.zeros_like(sequence_N)
        for starts_B in self.turn_start_BA.T[1:]:
            turn_N += place_N >= starts_B[sequence_N]
        return turn_N

    @property
    def expert_B(self) -> Tensor:
        """True where no policy sampled any of the tokens that count: a person, a stronger model or a data set wrote them."""
        unsampled_BT = self.behavior_logprobs_BT.isnan() | ~self.loss_mask_BT
        return unsampled_BT.all(dim=1) & self.loss_mask_BT.any(dim=1)


def refuse_missing_behavior(batch: TrainBatch, *, may_be_expert: bool) -> None:
    """Refuse experiences without the log-probabilities that the policy recorded when it sampled them.

    Args:
        may_be_expert: whether experiences without any sampled token have a loss of their own, and so need none.

    Raises:
        RftError: an experience has none.
    """
    missing_B = batch.behavior_logprobs_BT.isnan().any(dim=1)
    if may_be_expert:
        missing_B &= ~batch.for_algorithm(1).expert_B
    wrong = missing_B.nonzero().flatten().tolist()
    if wrong:
        raise RftError(
            f"{len(wrong)} of {batch.num_experiences} experiences of the batch have no behaviour log-probabilities, which this "
            f"algorithm needs; the first is experience {wrong[0]} of the batch",
            todo="give behavior_logprobs when experiences are written, or train with an algorithm that needs none, like sft",
        )
