"""The layout of a batch, and how it is cut into micro-batches that fit in memory.

Owns: `TrainBatch` (what the trainer loop hands to the learner) and `MicroBatch` (what one forward pass takes).

Invariants:
- Every token of the batch whose loss mask is True appears in exactly one micro-batch, which knows the token's place in the batch.
- Nothing is computed that no loss reads: experiences without such tokens, tokens after the last one, and the last one
  itself as an input.

A row of a micro-batch is a prompt and one or more continuations of it. With several, the continuations cannot see each
other and their positions all start after the prompt, so the result is the same as with one row each, while the prompt
is computed once: with 8 rollouts of 5 tokens after a prompt of 60 that is 100 tokens instead of 520. A row is filled
only until its continuations are as long as its prompt; beyond that masked attention would cost more than it saves.

Letters: B experiences, T tokens of the longest, R rows of a micro-batch, L tokens of its longest row, N tokens that
count in it. Padding is on the right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rftcore.algorithms.base import StepBatch

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
        behavior_logprobs_BT: float32, nats; 0 where the loss mask is False, NaN where it is True and nobody sampled.
        rewards_B: float32; the reward to train with.
        group_index_B: int64, 0..num_groups-1.
        rollout_index_B: int64; which rollout of its group; turns of one rollout share it.
        importance_weights_B: float32; the loss of each of its tokens is multiplied by it: the correction for the chance with
            which prioritised sampling drew it (arXiv 1511.05952, section 3.4), 1 otherwise.
        turn_index_B: int64; turn within the rollout.
        expert_B: bool; an expert wrote the response, and no policy sampled it.
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
    expert_B: Tensor
    paired: bool = False

    @property
    def num_experiences(self) -> int:
        return self.token_ids_BT.shape[0]

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask_BT.sum())

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
            step=step, rewards_B=self.rewards_B, group_B=self.group_index_B, rollout_B=self.rollout_index_B,
            turn_B=self.turn_index_B, sequence_N=counted.nonzero()[:, 0], behavior_N=self.behavior_logprobs_BT[counted],
            importance_weights_B=self.importance_weights_B, expert_B=self.expert_B,
        )  # fmt: skip

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
        expert: Array | Sequence[bool] | None = None,
        pad_token_id: int = 0,
        paired: bool = False,
    ) -> TrainBatch:
        """Pad packed columns.

        Args:
            token_ids, loss_mask, behavior_logprobs: (values, offsets); experience b is
                `values[offsets[b]:offsets[b + 1]]`, offsets has B + 1 entries and may start above 0. The three are
                aligned token by token. `behavior_logprobs` is NaN, or None as a whole, where nobody sampled. Instead of
                values a function `scatter(out_BT, fill=…)` may be given: it writes straight into the batch's memory.
            rewards, group_ids, rollout_index: B entries; group_ids may be any integers.
            importance_weights: B entries; None is 1 for all.
            turn_index, expert: B entries; None is 0, or False, for all.
            paired: the experiences are preference pairs, chosen and rejected in turn.

        Raises:
            ValueError: columns that do not fit each other, or a log-probability that counts and is infinite.
        """
        lengths = np.diff(token_ids[1])
        num_experiences = len(lengths)
        importance_weights = np.ones(num_experiences) if importance_weights is None else importance_weights
        turn_index = np.zeros(num_experiences) if turn_index is None else turn_index
        expert = np.zeros(num_experiences) if expert is None else expert
        _check_tokens(lengths, loss_mask=loss_mask, behavior_logprobs=behavior_logprobs)
        _check_entries(
            lengths, paired, rewards=rewards, group_ids=group_ids, rollout_index=rollout_index,
            importance_weights=importance_weights, turn_index=turn_index, expert=expert,
        )  # fmt: skip
        present_BT = np.arange(lengths.max(initial=1))[None, :] < lengths[:, None]
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
        _, group_index = np.unique(np.asarray(group_ids, np.int64), return_inverse=True)
        return cls(
            token_ids_BT=torch.from_numpy(_pad(token_ids, present_BT, np.int64, pad_token_id)),
            attention_mask_BT=torch.from_numpy(present_BT),
            loss_mask_BT=torch.from_numpy(loss_mask_BT),
            behavior_logprobs_BT=torch.from_numpy(behavior_BT),
            rewards_B=torch.tensor(np.asarray(rewards), dtype=torch.float32),
            group_index_B=torch.from_numpy(group_index.astype(np.int64)),
            rollout_index_B=torch.tensor(np.asarray(rollout_index), dtype=torch.int64),
            importance_weights_B=torch.tensor(np.asarray(importance_weights), dtype=torch.float32),
            turn_index_B=torch.tensor(np.asarray(turn_index), dtype=torch.int64),
            expert_B=torch.tensor(np.asarray(expert), dtype=torch.bool),
            paired=paired,
        )


def _check_tokens(lengths: Array, **columns: Packed | None) -> None:
    """Whether every column has as many values of each experience as it has tokens."""
    for name, column in columns.items():
        if column is not None and not np.array_equal(np.diff(column[1]), lengths):
            raise ValueError(f"{name} is not aligned with token_ids: its experiences have other lengths")


def _check_entries(lengths: Array, paired: bool, **columns: Array | Sequence[float]) -> None:
    """Whether every column has an entry per experience, and pairs are whole."""
    for name, values in columns.items():
        if len(values) != len(lengths):
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


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward pass, and where the N tokens that count are predicted.

    Attributes:
        token_ids_RL: int64.
        position_ids_RL: int64; continuations of a shared prompt all start after it.
        attention_R1LL: bool, True where row may look at column; None where every row holds one experience: plain
            causal attention is right then (padding is on the right, so nothing that counts sees it) and positions
            are 0, 1, 2, …
        source_N: int64; index into the flattened R·L positions whose output predicts the token.
        target_N: int64; the token.
        sequence_N: int64; the experience it belongs to, 0..B-1.
        index_N: int64; its place among the tokens of the batch that count, experience after experience.
        num_tokens: tokens computed, without padding.
    """

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    attention_R1LL: Tensor | None
    source_N: Tensor
    target_N: Tensor
    sequence_N: Tensor
    index_N: Tensor
    num_tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        """The same with its tensors on `device`."""
        # Any: a mapping cannot say which of its values is of which field.
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class _Row:
    """A prompt's length and the experiences that continue it; `ends` are the lengths that have to be computed."""

    prompt_length: int
    experiences: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt_length + sum(end - self.prompt_length for end in self.ends)


def split_batch(
    batch: TrainBatch, max_tokens: int, *, share_prompts: bool, members: Sequence[int] | None = None
) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `max_tokens` tokens, padding included, longest rows first.

    A row that is longer than `max_tokens` is a micro-batch of its own. Rows of similar length travel together, which
    keeps padding small; the first micro-batch is the largest, so a lack of memory shows at once. The rows of a pair stay
    together, whatever their size: its loss needs both.

    Args:
        share_prompts: compute a prompt once for the experiences that begin with it.
        members: the experiences to take, ascending and in whole pairs; all by default.
    """
    chosen = range(batch.num_experiences) if members is None else members
    together = (
        [list(_rows(batch, chosen[i : i + 2], max_tokens, share_prompts)) for i in range(0, len(chosen), 2)]
        if batch.paired
        else [[row] for row in _rows(batch, chosen, max_tokens, share_prompts)]
    )
    units = sorted(filter(None, together), key=lambda rows: (-max(row.length for row in rows), rows[0].experiences))
    place_BT = (batch.loss_mask_BT.flatten().cumsum(0) - 1).view_as(batch.loss_mask_BT)
    return [_micro_batch(batch, place_BT, chunk) for chunk in _chunks(units, max_tokens)]


def _chunks(units: list[list[_Row]], max_tokens: int) -> Iterator[list[_Row]]:
    chunk: list[_Row] = []
    width = 0
    for unit in units:
        # The unit with the longest row comes first: it makes the chunk as wide as it gets.
        if chunk and (len(chunk) + len(unit)) * width > max_tokens:
            yield chunk
            chunk = []
        if not chunk:
            width = max(row.length for row in unit)
        chunk = chunk + unit
    if chunk:
        yield chunk


def _rows(batch: TrainBatch, members: Sequence[int], max_tokens: int, share_prompts: bool) -> Iterator[_Row]:
    mask = batch.loss_mask_BT.numpy()
    token_ids = batch.token_ids_BT.numpy()
    open_rows: dict[bytes, _Row] = {}
    for b in members:
        counted = np.flatnonzero(mask[b])
        if not len(counted):
            continue
        # The prompt is what precedes the first token that counts; `end` leaves out the last, which predicts nothing.
        prompt_length, end = int(counted[0]), int(counted[-1])
        if not share_prompts:
            yield _Row(prompt_length, (b,), (end,))
            continue
        prompt = token_ids[b, :prompt_length].tobytes()
        row = open_rows.get(prompt)
        if row is not None:
            longer = _Row(prompt_length, (*row.experiences, b), (*row.ends, end))
            if longer.length <= min(2 * prompt_length, max(max_tokens, row.length)):
                open_rows[prompt] = longer
                continue
            yield row
        open_rows[prompt] = _Row(prompt_length, (b,), (end,))
    yield from open_rows.values()


def _micro_batch(batch: TrainBatch, place_BT: Tensor, rows: list[_Row]) -> MicroBatch:
    width = max(row.length for row in rows)
    token_ids = np.zeros((len(rows), width), np.int64)
    position_ids = np.tile(np.arange(width), (len(rows), 1))
    # Part of a row: 0 the prompt, 1, 2, … its continuations, -1 padding (which sees itself, so softmax has an entry).
    part = np.full_like(token_ids, -1)
    mask, ids = batch.loss_mask_BT.numpy(), batch.token_ids_BT.numpy()
    source: list[Array] = []
    experience: list[Array] = []
    token: list[Array] = []
    for r, row in enumerate(rows):
        prompt_length = row.prompt_length
        token_ids[r, :prompt_length] = ids[row.experiences[0], :prompt_length]
        part[r, :prompt_length] = 0
        start = prompt_length
        for number, (b, end) in enumerate(zip(row.experiences, row.ends), start=1):
            stop = start + end - prompt_length
            token_ids[r, start:stop] = ids[b, prompt_length:end]
            position_ids[r, start:stop] = np.arange(prompt_length, end)
            part[r, start:stop] = number
            counted = np.flatnonzero(mask[b])
            # The first is predicted by the prompt's last position, the others by the token before them.
            predictor = np.where(counted == prompt_length, prompt_length - 1, start + counted - prompt_length - 1)
            source.append(r * width + predictor)
            experience.append(np.full(len(counted), b))
            token.append(counted)
            start = stop
    b_N, t_N = (torch.from_numpy(np.concatenate(pieces)) for pieces in (experience, token))
    shared = any(len(row.experiences) > 1 for row in rows)
    return MicroBatch(
        token_ids_RL=torch.from_numpy(token_ids),
        position_ids_RL=torch.from_numpy(position_ids),
        attention_R1LL=_attention(torch.from_numpy(part)) if shared else None,
        source_N=torch.from_numpy(np.concatenate(source)),
        target_N=batch.token_ids_BT[b_N, t_N],
        sequence_N=b_N,
        index_N=place_BT[b_N, t_N],
        num_tokens=sum(row.length for row in rows),
    )


def _attention(part_RL: Tensor) -> Tensor:
    """A token sees, at or before itself, the prompt and its own continuation."""
    width = part_RL.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    same = part_RL[:, :, None] == part_RL[:, None, :]
    prompt = (part_RL == 0)[:, None, :]
    return (causal & (same | prompt))[:, None]
