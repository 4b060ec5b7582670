"""Padding: from the columns of a batch, experience after experience, to a `TrainBatch` of rows of one length.

Letters: B experiences, T tokens of the longest, A turns of the one with the most. Padding is on the right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rftcore.trainer.batches.train_batch import TrainBatch

Scalar = TypeVar("Scalar", bound=np.generic)
Array = npt.NDArray[np.generic]
# Writes the values of all experiences, padded, into an array of [B, T].
Scatter = Callable[..., object]
# Values of all experiences one after the other, and offsets of B + 1 entries.
Packed = tuple[Array | Scatter, Array]


@dataclass(frozen=True, kw_only=True)
class PackedColumns:
    """The columns of a batch, without padding.

    Attributes:
        token_ids, loss_mask, behavior_logprobs: (values, offsets); experience b is `values[offsets[b]:offsets[b + 1]]`, offsets has B + 1
            entries and may start above 0. The three are aligned token by token. `behavior_logprobs` is NaN, or None as a whole, where no
            policy sampled. A function `scatter(out_BT, fill=…)` may stand in place of the values: it writes straight into the batch's
            memory.
        rewards, group_ids, rollout_index: B entries; group_ids may be any integers.
        importance_weights: B entries; None is 1 for all.
        turns: for each experience its turns, [K, 3] as in `rftdata.Sequence`; None is one turn of the number 0 for all.
        token_rewards, teacher_logprobs: like token_ids; None where no experience has them.
        step_rewards, state: for each experience one number per turn; None where no experience has them.
        baseline_rewards, reward_parts: B entries, the last of one number for each of `reward_names`; None where no experience has them.
        paired: whether the experiences are preference pairs, chosen and rejected in turn.
    """

    token_ids: Packed
    loss_mask: Packed
    behavior_logprobs: Packed | None
    rewards: Array | Sequence[float]
    group_ids: Array | Sequence[int]
    rollout_index: Array | Sequence[int]
    importance_weights: Array | Sequence[float] | None = None
    turns: Sequence[Array] | None = None
    token_rewards: Packed | None = None
    teacher_logprobs: Packed | None = None
    step_rewards: Sequence[Array] | None = None
    state: Sequence[Array] | None = None
    baseline_rewards: Array | None = None
    reward_parts: Array | None = None
    reward_names: tuple[str, ...] = ()
    pad_token_id: int = 0
    paired: bool = False


_ONE_TURN = np.zeros((1, 3), np.int32)
_PER_TOKEN = ("loss_mask", "behavior_logprobs", "token_rewards", "teacher_logprobs")
_PER_EXPERIENCE = (
    "rewards",
    "group_ids",
    "rollout_index",
    "importance_weights",
    "turns",
    "step_rewards",
    "state",
    "baseline_rewards",
    "reward_parts",
)


def pad_batch(columns: PackedColumns) -> TrainBatch:
    """Pad columns to the longest experience.

    Raises:
        ValueError: columns that do not fit each other, or an infinite log-probability of a token that counts.
    """
    lengths = np.diff(columns.token_ids[1])
    _refuse_misaligned(columns, lengths)
    present_BT = np.arange(lengths.max(initial=1))[None, :] < lengths[:, None]
    loss_mask_BT, behavior_BT = _counted(columns.loss_mask, columns.behavior_logprobs, present_BT)
    _, group_index = np.unique(np.asarray(columns.group_ids, np.int64), return_inverse=True)
    drawn_with = np.ones(len(lengths)) if columns.importance_weights is None else columns.importance_weights
    turns = [_ONE_TURN] * len(lengths) if columns.turns is None else columns.turns
    return TrainBatch(
        token_ids_BT=torch.from_numpy(_pad(columns.token_ids, present_BT, np.int64, columns.pad_token_id)),
        attention_mask_BT=torch.from_numpy(present_BT),
        loss_mask_BT=loss_mask_BT,
        behavior_logprobs_BT=behavior_BT,
        rewards_B=_tensor(columns.rewards, torch.float32),
        group_index_B=_tensor(group_index, torch.int64),
        rollout_index_B=_tensor(columns.rollout_index, torch.int64),
        importance_weights_B=_tensor(drawn_with, torch.float32),
        turn_BA=_per_turn([of[:, 2] for of in turns], turns, torch.int64, fill=-1),
        turn_start_BA=_per_turn([of[:, 0] for of in turns], turns, torch.int64, fill=present_BT.shape[1]),
        token_rewards_BT=_optional_tokens(columns.token_rewards, present_BT),
        teacher_logprobs_BT=_optional_tokens(columns.teacher_logprobs, present_BT, fill=math.nan),
        step_rewards_BA=_optional_turns(columns.step_rewards, turns, torch.float32),
        state_BA=_optional_turns(columns.state, turns, torch.int64),
        baseline_rewards_B=_optional(columns.baseline_rewards, torch.float32),
        reward_parts_B=_optional(columns.reward_parts, torch.float32),
        reward_names=columns.reward_names,
        paired=columns.paired,
    )


def _counted(
    loss_mask: Packed, behavior_logprobs: Packed | None, present_BT: npt.NDArray[np.bool_]
) -> tuple[Tensor, Tensor]:
    """Return the mask of the tokens that count, and their behaviour log-probabilities.

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


def _refuse_misaligned(columns: PackedColumns, lengths: Array) -> None:
    """Raise a ValueError if a column has other lengths than the tokens, or a pair is not whole."""
    for name in _PER_TOKEN:
        column: Packed | None = getattr(columns, name)
        if column is not None and not np.array_equal(np.diff(column[1]), lengths):
            raise ValueError(f"{name} is not aligned with token_ids: its experiences have other lengths")
    for name in _PER_EXPERIENCE:
        values: Array | Sequence[float] | Sequence[Array] | None = getattr(columns, name)
        if values is not None and len(values) != len(lengths):
            raise ValueError(f"{name} has {len(values)} entries for {len(lengths)} experiences")
    if columns.paired and len(lengths) % 2:
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


def _optional_turns(values: Sequence[Array] | None, turns: Sequence[Array], dtype: torch.dtype) -> Tensor | None:
    return None if values is None else _per_turn(values, turns, dtype, fill=0)


def _per_turn(values: Sequence[Array], turns: Sequence[Array], dtype: torch.dtype, *, fill: int) -> Tensor:
    """Return [B, A]: the values of each experience's turns, then `fill`.

    Raises:
        ValueError: an experience has not one value for each of its turns.
    """
    num_turns = [len(of) for of in turns]
    padded_BA = torch.full((len(turns), max(num_turns, default=1)), fill, dtype=dtype)
    for b, (of, num) in enumerate(zip(values, num_turns, strict=True)):
        if len(of) != num:
            raise ValueError(f"experience {b} of the batch has {len(of)} values for {num} turns")
        padded_BA[b, :num] = _tensor(of, dtype)
    return padded_BA


def _tensor(values: Array | Sequence[float], dtype: torch.dtype) -> Tensor:
    return torch.tensor(np.asarray(values), dtype=dtype)


def _optional(values: Array | None, dtype: torch.dtype) -> Tensor | None:
    return None if values is None else _tensor(values, dtype)
