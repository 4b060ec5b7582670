"""How a batch is cut into micro-batches that fit in memory, one list for each data-parallel rank.

Invariants:
- Every token of the batch whose loss mask is True appears in exactly one micro-batch, which records the token's place in the batch.
- Inputs that no loss reads are left out: experiences without such tokens, tokens after the last one, and the last one itself.
- Every rank has as many micro-batches as the others: their forward and backward passes are collective.

A micro-batch is one packed row of sequences without padding. A prompt that several experiences share is computed once: they are its
continuations, cannot see each other, and have positions that start after it. With 8 rollouts of 5 tokens after a prompt of 60 that is 100
tokens instead of 520.

Letters: B experiences, T tokens of the longest, L tokens of a packed row, N tokens that count in it, R rows for attention, W their width.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rftcore.algorithms.device_copy import copy_to_device
from rftcore.algorithms.sequences import Sequences
from rftcore.trainer.batches.packed_rows import Packing, PaddedRows, Rows, Segments, to_device
from rftcore.trainer.batches.train_batch import TrainBatch

# Which shared prompts are computed once: none, those where a masked row costs less than separate rows, or all.
Sharing = Literal["never", "rows", "always"]
Kernel = Literal["segments", "rows"]
# The packed places of a row's tokens, and for a masked row the part of each: 0 the prompt, 1, 2, … its continuations.
_Placed = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | None]

# Largest share of padding among rows that are padded together.
_PADDED_AT_MOST = 0.3
# Most keys of a row for each token of a micro-batch: copies of a long prompt's keys for many short continuations take memory.
_KEYS_OF_A_TOKEN = 8


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one forward pass, and where the N tokens that count are predicted.

    Attributes:
        token_ids_L: int64.
        position_ids_L: int64; a continuation's start after its prompt.
        packing: where sequences begin and end.
        source_N: int64; the place in the row whose output predicts the token.
        target_N: int64; the token.
        sequences: the experiences that the tokens belong to.
        index_N: int64; the place of each token among the tokens of the batch that count, experience after experience.
        longest: places of the longest sequence, with a prompt that it shares.
        num_tokens: tokens computed.
    """

    token_ids_L: Tensor
    position_ids_L: Tensor
    packing: Packing
    source_N: Tensor
    target_N: Tensor
    sequences: Sequences
    index_N: Tensor
    longest: int
    num_tokens: int

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with its tensors on `device`."""
        token_ids_L, position_ids_L, source_N, target_N, index_N = (
            copy_to_device(tensor, device)
            for tensor in (self.token_ids_L, self.position_ids_L, self.source_N, self.target_N, self.index_N)
        )
        return replace(
            self,
            token_ids_L=token_ids_L,
            position_ids_L=position_ids_L,
            packing=to_device(self.packing, device),
            source_N=source_N,
            target_N=target_N,
            sequences=self.sequences.to(device),
            index_N=index_N,
        )


@dataclass(frozen=True, kw_only=True)
class Cutting:
    """How a batch is cut, by the needs of the model, the device and the ranks.

    Attributes:
        max_tokens: of one micro-batch; a longer sequence is a micro-batch of its own.
        sharing: which prompts are computed once.
        kernel: layout for attention: segments of the packed row, or padded rows.
        num_ranks: data-parallel ranks.
        quadratic_at: length in tokens at which attention costs as much as the rest of the model; 12 · hidden size for a usual transformer.
    """

    max_tokens: int
    sharing: Sharing = "always"
    kernel: Kernel = "segments"
    num_ranks: int = 1
    quadratic_at: float = math.inf


class _Counted(NamedTuple):
    """The M tokens of a batch that count, experience after experience.

    Attributes:
        first_B: [B + 1]; the place of each experience's first token among them, and M.
        experience_M, token_M: experience, and place within it.
        target_M: token id.
    """

    first_B: list[int]
    experience_M: npt.NDArray[np.int64]
    token_M: npt.NDArray[np.int64]
    target_M: npt.NDArray[np.int64]

    def places(self, b: int) -> npt.NDArray[np.int64]:
        """Return the places of an experience's tokens among the M."""
        return np.arange(self.first_B[b], self.first_B[b + 1])


@dataclass(frozen=True)
class _Row:
    """A prompt's length and the experiences that continue it; `ends` are the lengths that have to be computed."""

    prompt_length: int
    experiences: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.prompt_length + sum(end - self.prompt_length for end in self.ends)

    @property
    def num_keys(self) -> int:
        """Keys of its segments, the prompt's copied for each continuation."""
        return self.prompt_length + sum(self.ends)

    @property
    def is_shared(self) -> bool:
        return len(self.experiences) > 1

    def cost(self, quadratic_at: float) -> float:
        """Relative time to compute it, in tokens."""
        own = sum((end - self.prompt_length) * (end + self.prompt_length) for end in self.ends)
        return self.length + (self.prompt_length**2 + own) / quadratic_at


def split_batch(batch: TrainBatch, cutting: Cutting, members: Sequence[int] | None = None) -> list[list[MicroBatch]]:
    """Cut a batch into as few micro-batches as its tokens need, of nearly equal cost, the most expensive first; one list per rank.

    The rows of a pair stay together, whatever their size: its loss needs both. Where there are fewer rows than ranks, some get a
    micro-batch without a token that counts.

    Args:
        members: the experiences to take, ascending and in whole pairs; all by default.
    """
    chosen = range(batch.num_experiences) if members is None else members
    counted = _counted(batch)
    together = (
        [list(_rows(batch, counted, chosen[i : i + 2], cutting)) for i in range(0, len(chosen), 2)]
        if batch.paired
        else [[row] for row in _rows(batch, counted, chosen, cutting)]
    )
    bins = _balanced(list(filter(None, together)), cutting)
    micro_batches = [_micro_batch(batch, counted, rows, cutting.kernel) for rows in bins]
    return [micro_batches[rank :: cutting.num_ranks] for rank in range(cutting.num_ranks)]


def _counted(batch: TrainBatch) -> _Counted:
    mask = batch.loss_mask_BT.numpy()
    experience_M, token_M = np.nonzero(mask)
    first_B = np.concatenate([[0], np.cumsum(np.count_nonzero(mask, axis=1))]).tolist()
    return _Counted(first_B, experience_M, token_M, batch.token_ids_BT.numpy()[experience_M, token_M])


def _balanced(units: list[list[_Row]], cutting: Cutting) -> list[list[_Row]]:
    """Put rows that stay together into bins of at most `max_tokens`; the number of bins is a multiple of `num_ranks`.

    The most expensive rows come first, each into the cheapest bin with room (Graham 1969: at most 4/3 of the best).
    """
    if not units:
        return []
    costs = [sum(row.cost(cutting.quadratic_at) for row in rows) for rows in units]
    sizes = [sum(row.length for row in rows) for rows in units]
    order = sorted(range(len(units)), key=lambda u: (-costs[u], units[u][0].experiences))
    num_alone = sum(size > cutting.max_tokens for size in sizes)
    num_full = math.ceil(sum(size for size in sizes if size <= cutting.max_tokens) / cutting.max_tokens)
    rounds = math.ceil((num_alone + num_full) / cutting.num_ranks)
    while (filled := _placed(order, costs, sizes, rounds * cutting.num_ranks, cutting.max_tokens)) is None:
        rounds += 1
    costliest_first = sorted(filled, key=lambda members: -sum(costs[u] for u in members))
    return [[row for u in sorted(members) for row in units[u]] for members in costliest_first]


def _placed(
    order: list[int], costs: list[float], sizes: list[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Return the units of each bin; None where they do not fit."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    filled = [0] * num_bins
    heap = [(0.0, b) for b in range(num_bins)]
    for u in order:
        passed: list[tuple[float, int]] = []
        while heap and filled[heap[0][1]] and filled[heap[0][1]] + sizes[u] > max_tokens:
            passed.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heapq.heappop(heap)
        bins[b].append(u)
        filled[b] += sizes[u]
        for entry in (*passed, (cost + costs[u], b)):
            heapq.heappush(heap, entry)
    return bins


def _rows(batch: TrainBatch, counted: _Counted, members: Sequence[int], cutting: Cutting) -> Iterator[_Row]:
    token_ids = batch.token_ids_BT.numpy()
    open_rows: dict[bytes, _Row] = {}
    for b in members:
        first, stop = counted.first_B[b], counted.first_B[b + 1]
        if first == stop:
            continue
        # The prompt is what precedes the first token that counts; `end` leaves out the last, which predicts nothing.
        prompt_length, end = int(counted.token_M[first]), int(counted.token_M[stop - 1])
        if cutting.sharing == "never":
            yield _Row(prompt_length, (b,), (end,))
            continue
        prompt = token_ids[b, :prompt_length].tobytes()
        row = open_rows.get(prompt)
        if row is not None:
            longer = _Row(prompt_length, (*row.experiences, b), (*row.ends, end))
            limit = max(cutting.max_tokens, row.length)
            # In a masked row continuations are computed against each other; beyond the prompt's length that costs more than it saves.
            most = limit if cutting.sharing == "always" else min(2 * prompt_length, limit)
            if longer.length <= most and longer.num_keys <= _KEYS_OF_A_TOKEN * limit:
                open_rows[prompt] = longer
                continue
            yield row
        open_rows[prompt] = _Row(prompt_length, (b,), (end,))
    yield from open_rows.values()


def _micro_batch(batch: TrainBatch, counted: _Counted, rows: list[_Row], kernel: Kernel) -> MicroBatch:
    """Pack rows: those of one experience, then the shared prompts, then their continuations."""
    ids = batch.token_ids_BT.numpy()
    single = [row for row in rows if not row.is_shared]
    shared = [row for row in rows if row.is_shared]
    pieces: list[tuple[int, int, int]] = [(row.experiences[0], 0, row.ends[0]) for row in single]
    pieces += [(row.experiences[0], 0, row.prompt_length) for row in shared]
    pieces += [(b, row.prompt_length, end) for row in shared for b, end in zip(row.experiences, row.ends, strict=True)]
    lengths = np.array([stop - start for _, start, stop in pieces], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    # Of each experience in the order of the pieces, the end of its prompt and the start of what follows it.
    prompt_ends = [start + row.prompt_length for row, start in zip(single, starts, strict=False)]
    own_starts = [*prompt_ends, *starts[len(single) + len(shared) : -1]]
    for row, prompt_end in zip(shared, starts[len(single) + 1 :], strict=False):
        prompt_ends += [prompt_end] * len(row.experiences)
    order = [b for row in (*single, *shared) for b in row.experiences]
    places = [counted.places(b) for b in order]
    index_N = np.concatenate([np.zeros(0, np.int64), *places])
    source_N = counted.token_M[index_N]
    at = 0
    for mine, prompt_end, own_start in zip(places, prompt_ends, own_starts, strict=True):
        # The first is predicted at the prompt's last place, the others at the token before them.
        source_N[at : at + len(mine)] += own_start - counted.token_M[mine[0]] - 1
        source_N[at] = prompt_end - 1
        at += len(mine)
    if not rows:  # a pass whose result is not read, because all ranks make as many passes
        lengths, starts, pieces = np.ones(1, np.int64), np.array([0, 1]), [(0, 0, 1)]
    return MicroBatch(
        token_ids_L=torch.from_numpy(np.concatenate([ids[b, start:stop] for b, start, stop in pieces])),
        position_ids_L=torch.from_numpy(np.concatenate([np.arange(start, stop) for _, start, stop in pieces])),
        packing=_segments(starts, single, shared) if kernel == "segments" else _padded_rows(starts, single, shared),
        source_N=torch.from_numpy(source_N),
        target_N=torch.from_numpy(counted.target_M[index_N]),
        sequences=Sequences.of(torch.from_numpy(counted.experience_M[index_N])),
        index_N=torch.from_numpy(index_N),
        longest=max(stop for *_, stop in pieces),
        num_tokens=int(starts[-1]) if rows else 0,
    )


def _segments(starts: npt.NDArray[np.int64], single: list[_Row], shared: list[_Row]) -> Segments:
    longest = int(np.diff(starts).max())
    if not any(
        row.length > row.prompt_length for row in shared
    ):  # only responses of one token, which the prompt predicts
        return Segments(_int32(starts), longest)
    ranges = [np.arange(start, stop) for start, stop in pairwise(starts)]
    first_continuation = len(single) + len(shared)
    prompts = np.repeat(np.arange(len(single), first_continuation), [len(row.experiences) for row in shared])
    keys = ranges[:first_continuation]
    for prompt, own in zip(prompts, ranges[first_continuation:], strict=True):
        keys.append(np.concatenate([ranges[prompt], own]) if len(own) else own)
    place_K = np.concatenate(keys)
    num_copies_L = np.bincount(place_K)
    return Segments(
        _int32(starts),
        longest,
        _int32(np.cumsum([0, *map(len, keys)])),
        max(map(len, keys)),
        torch.from_numpy(place_K),
        torch.from_numpy(np.argsort(place_K, kind="stable")),
        torch.from_numpy(np.cumsum(num_copies_L) - num_copies_L),
    )


def _int32(values: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(values.astype(np.int32))


def _padded_rows(starts: npt.NDArray[np.int64], single: list[_Row], shared: list[_Row]) -> PaddedRows:
    """Pad rows of similar length together, so that little is padding; rows with a mask apart from the others."""
    ranges = [np.arange(start, stop) for start, stop in pairwise(starts)]
    alone: list[_Placed] = [(places, None) for places in (ranges[: len(single)] if single or shared else ranges)]
    masked: list[_Placed] = []
    piece = len(single) + len(shared)
    for number, row in enumerate(shared):
        members = [ranges[len(single) + number], *ranges[piece : piece + len(row.experiences)]]
        masked.append(
            (np.concatenate(members), np.repeat(np.arange(len(members)), [len(places) for places in members]))
        )
        piece += len(row.experiences)
    parts: list[Rows] = []
    place = np.zeros(int(starts[-1]), np.int64)
    offset = 0
    for rows in (*_alike(alone), *_alike(masked)):
        width = len(rows[0][0])
        place_RW = np.zeros((len(rows), width), np.int64)
        part_RW = np.full((len(rows), width), -1)  # padding, which sees itself, so that softmax has an entry
        for r, (places, part) in enumerate(rows):
            place_RW[r, : len(places)] = places
            place[places] = offset + r * width + np.arange(len(places))
            if part is not None:
                part_RW[r, : len(places)] = part
        offset += place_RW.size
        visible = None if rows[0][1] is None else _visible(torch.from_numpy(part_RW))
        parts.append(Rows(torch.from_numpy(place_RW), visible))
    return PaddedRows(tuple(parts), torch.from_numpy(place))


def _alike(rows: Sequence[_Placed]) -> Iterator[list[_Placed]]:
    """Group rows into parts with little padding, longest first."""
    part: list[_Placed] = []
    for row in sorted(rows, key=lambda row: -len(row[0])):
        if part and len(row[0]) < (1 - _PADDED_AT_MOST) * len(part[0][0]):
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def _visible(part_RW: Tensor) -> Tensor:
    """Return the mask: a token sees, at or before itself, the prompt and its own continuation."""
    width = part_RW.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    same = part_RW[:, :, None] == part_RW[:, None, :]
    prompt = (part_RW == 0)[:, None, :]
    return (causal & (same | prompt))[:, None]
