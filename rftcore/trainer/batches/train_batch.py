"""The layout of a batch: what the trainer loop hands to the learner.

Letters: B experiences, T tokens of the longest. Padding is on the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rftcore.algorithms.base import StepBatch
from rftdata.errors import RftError

Scalar = TypeVar("Scalar", bound=np.generic)
Array = npt.NDArray[np.generic]
# Values of all experiences one after the other, or who writes them, padded, into an array of [B, T]; and offsets of B + 1 entries.
Scatter = Callable[..., object]
Packed = tuple[Array | Scatter, Array]


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
        rollout_index_B: int64; which rollout of its group; turns of one rollout share it.
        importance_weights_B: float32; the loss of each of its tokens is multiplied by it: the correction for the chance with
            which prioritised sampling drew it (arXiv 1511.05952, section 3.4), 1 otherwise.
        turn_index_B: int64; turn within the rollout.
        token_rewards_BT, teacher_logprobs_BT: float32; arrays that the experiences brought, None where none did. An experience without the
            first has 0 and without the second NaN.
        step_rewards_B, state_B, baseline_rewards_B: the same, one number per experience; see `StepBatch`.
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
    turn_index_B: Tensor
    token_rewards_BT: Tensor | None = None
    teacher_logprobs_BT: Tensor | None = None
    step_rewards_B: Tensor | None = None
    state_B: Tensor | None = None
    baseline_rewards_B: Tensor | None = None
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
        """The preference pairs of these experiences, chosen and rejected in turn; an experience may be in several pairs."""
        index = torch.tensor(rows, dtype=torch.int64)
        per_experience = {
            name: values[index]
            for name, values in vars(self).items()
            if name.endswith(("_B", "_BT")) and values is not None
        }
        return replace(self, **per_experience, paired=True)

    def deal(self, parts: int, seed: int) -> list[list[int]]:
        """Whole groups, or whole pairs, in so many parts of nearly the same number of them; fewer where there are fewer groups.

        Args:
            seed: of the order in which they are dealt.
        """
        units_B = torch.arange(self.num_experiences) // 2 if self.paired else self.group_index_B
        units = units_B.unique()
        order = units[torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))]
        return [
            torch.isin(units_B, dealt).nonzero().flatten().tolist()
            for dealt in order.chunk(min(parts, max(1, len(units))))
        ]

    def for_algorithm(self, step: int) -> StepBatch:
        """The tokens that count, flat, and the entries per experience: what algorithms see of it.

        Args:
            step: number of the trainer step, from 1.
        """
        counted = self.loss_mask_BT
        return StepBatch(
            step=step,
            rewards_B=self.rewards_B,
            group_B=self.group_index_B,
            rollout_B=self.rollout_index_B,
            turn_B=self.turn_index_B,
            sequence_N=counted.nonzero()[:, 0],
            behavior_N=self.behavior_logprobs_BT[counted],
            importance_weights_B=self.importance_weights_B,
            expert_B=self.expert_B,
            token_rewards_N=None if self.token_rewards_BT is None else self.token_rewards_BT[counted],
            step_rewards_B=self.step_rewards_B,
            state_B=self.state_B,
            baseline_rewards_B=self.baseline_rewards_B,
            reward_parts_B=self.reward_parts_B,
            reward_names=self.reward_names,
        )

    @property
    def expert_B(self) -> Tensor:
        """Where no policy sampled any of the tokens that count: what a person, a stronger model or a data set wrote."""
        unsampled_BT = self.behavior_logprobs_BT.isnan() | ~self.loss_mask_BT
        return unsampled_BT.all(dim=1) & self.loss_mask_BT.any(dim=1)

    @classmethod
    def from_packed(
        cls,
        *,
        token_ids: Packed,
        loss_mask: Packed,
        behavior_logprobs: Packed | None,
        rewards: Array | Sequence[float],
        group_ids: Array | Sequence[int],
        rollout_index: Array | Sequence[int],
        importance_weights: Array | Sequence[float] | None = None,
        turn_index: Array | Sequence[int] | None = None,
        token_rewards: Packed | None = None,
        teacher_logprobs: Packed | None = None,
        step_rewards: Array | None = None,
        state: Array | None = None,
        baseline_rewards: Array | None = None,
        reward_parts: Array | None = None,
        reward_names: tuple[str, ...] = (),
        pad_token_id: int = 0,
        paired: bool = False,
    ) -> TrainBatch:
        """Pad packed columns.

        Args:
            token_ids, loss_mask, behavior_logprobs: (values, offsets); experience b is
                `values[offsets[b]:offsets[b + 1]]`, offsets has B + 1 entries and may start above 0. The three are
                aligned token by token. `behavior_logprobs` is NaN, or None as a whole, where no policy sampled. Instead of
                values a function `scatter(out_BT, fill=…)` may be given: it writes straight into the batch's memory.
            rewards, group_ids, rollout_index: B entries; group_ids may be any integers.
            importance_weights: B entries; None is 1 for all.
            turn_index: B entries; None is 0 for all.
            token_rewards, teacher_logprobs: as token_ids; step_rewards, state, baseline_rewards, reward_parts: B entries, the last of one
                number for each of `reward_names`. None where there are none.
            paired: the experiences are preference pairs, chosen and rejected in turn.

        Raises:
            ValueError: columns that do not fit each other, or a log-probability that counts and is infinite.
        """
        lengths = np.diff(token_ids[1])
        _check_tokens(
            lengths,
            loss_mask=loss_mask,
            behavior_logprobs=behavior_logprobs,
            token_rewards=token_rewards,
            teacher_logprobs=teacher_logprobs,
        )
        _check_entries(
            lengths,
            paired,
            rewards=rewards,
            group_ids=group_ids,
            rollout_index=rollout_index,
            importance_weights=importance_weights,
            turn_index=turn_index,
            step_rewards=step_rewards,
            state=state,
            baseline_rewards=baseline_rewards,
            reward_parts=reward_parts,
        )
        present_BT = np.arange(lengths.max(initial=1))[None, :] < lengths[:, None]
        loss_mask_BT, behavior_BT = _counted(loss_mask, behavior_logprobs, present_BT)
        _, group_index = np.unique(np.asarray(group_ids, np.int64), return_inverse=True)
        ones, zeros = np.ones(len(lengths)), np.zeros(len(lengths))
        return cls(
            token_ids_BT=torch.from_numpy(_pad(token_ids, present_BT, np.int64, pad_token_id)),
            attention_mask_BT=torch.from_numpy(present_BT),
            loss_mask_BT=loss_mask_BT,
            behavior_logprobs_BT=behavior_BT,
            rewards_B=_tensor(rewards, torch.float32),
            group_index_B=_tensor(group_index, torch.int64),
            rollout_index_B=_tensor(rollout_index, torch.int64),
            importance_weights_B=_tensor(ones if importance_weights is None else importance_weights, torch.float32),
            turn_index_B=_tensor(zeros if turn_index is None else turn_index, torch.int64),
            token_rewards_BT=_optional_tokens(token_rewards, present_BT),
            teacher_logprobs_BT=_optional_tokens(teacher_logprobs, present_BT, fill=math.nan),
            step_rewards_B=_optional(step_rewards, torch.float32),
            state_B=_optional(state, torch.int64),
            baseline_rewards_B=_optional(baseline_rewards, torch.float32),
            paired=paired,
            reward_parts_B=_optional(reward_parts, torch.float32),
            reward_names=reward_names,
        )


def _counted(
    loss_mask: Packed, behavior_logprobs: Packed | None, present_BT: npt.NDArray[np.bool_]
) -> tuple[Tensor, Tensor]:
    """The tokens that count, and their behaviour log-probabilities.

    Raises:
        ValueError: a log-probability is infinite.
    """
    loss_mask_BT = _pad(loss_mask, present_BT, np.bool_, False)
    loss_mask_BT[:, 0] = False
    if behavior_logprobs is None:
        behavior_BT = np.where(loss_mask_BT, np.float32(np.nan), np.float32(0.0))
    else:
        behavior_BT = _pad(behavior_logprobs, present_BT, np.float32, 0.0)
        np.copyto(behavior_BT, np.float32(0.0), where=~loss_mask_BT)
    wrong = np.flatnonzero(np.isinf(behavior_BT).any(axis=1))
    if len(wrong):
        raise ValueError(f"behavior_logprobs of experience {wrong[0]} of the batch are infinite")
    return torch.from_numpy(loss_mask_BT), torch.from_numpy(behavior_BT)


def _check_tokens(lengths: Array, **columns: Packed | None) -> None:
    """Whether every column has as many values of each experience as it has tokens."""
    for name, column in columns.items():
        if column is not None and not np.array_equal(np.diff(column[1]), lengths):
            raise ValueError(f"{name} is not aligned with token_ids: its experiences have other lengths")


def _check_entries(lengths: Array, paired: bool, **columns: Array | Sequence[float] | None) -> None:
    """Whether every column has an entry per experience, and pairs are whole."""
    for name, values in columns.items():
        if values is not None and len(values) != len(lengths):
            raise ValueError(f"{name} has {len(values)} entries for {len(lengths)} experiences")
    if paired and len(lengths) % 2:
        raise ValueError(f"{len(lengths)} experiences are no whole number of pairs")


def _pad(column: Packed, present_BT: npt.NDArray[np.bool_], dtype: type[Scalar], fill: float) -> npt.NDArray[Scalar]:
    values, offsets = column
    # torch's memory: pinned where a GPU reads it.
    kind = torch.from_numpy(np.empty(0, dtype)).dtype
    padded = torch.empty(present_BT.shape, dtype=kind, pin_memory=torch.cuda.is_available()).numpy()
    if callable(values):
        values(padded, fill=fill)
        return padded
    padded.fill(fill)
    # Both sides run through experiences in order and tokens in order, so one copy fills everything.
    padded[present_BT] = values[offsets[0] : offsets[-1]]
    return padded


def _optional_tokens(column: Packed | None, present_BT: npt.NDArray[np.bool_], fill: float = 0.0) -> Tensor | None:
    return None if column is None else torch.from_numpy(_pad(column, present_BT, np.float32, fill))


def _tensor(values: Array | Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype)


def _optional(values: Array | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else _tensor(values, dtype)


def refuse_missing_behavior(batch: TrainBatch, *, may_be_expert: bool) -> None:
    """Stop before tokens that no policy sampled are weighed by the policy that sampled them.

    Args:
        may_be_expert: a loss of its own applies to experiences of which no token was sampled.
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
