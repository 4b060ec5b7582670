"""How a batch is cut into micro-batches that fit in memory: `MicroBatch` is what one forward pass takes.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rftcore.trainer.batches import Array, TrainBatch


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
