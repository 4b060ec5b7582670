"""Which tokens of a packed row each of its tokens sees, read from what the attention kernels are given."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from rftcore.trainer.batches.packed_rows import Packing, PaddedRows, Segments


def visible(packing: Packing) -> Tensor:
    """bool [L, L]; row may look at column."""
    return _of_segments(packing) if isinstance(packing, Segments) else _of_rows(packing)


def _of_segments(packing: Segments) -> Tensor:
    starts = packing.starts_S.tolist()
    seen = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for start, stop in pairwise(starts):
        assert 0 <= stop - start <= packing.longest
        seen[start:stop, start:stop] = torch.ones(stop - start, stop - start).tril().bool()
    if packing.prompt_starts_G is None:
        return seen
    assert packing.continuation_starts_G is not None
    prompts = (packing.prompt_starts_G + packing.first_prompt).tolist()
    continuations = (packing.continuation_starts_G + packing.first_continuation).tolist()
    assert prompts[-1] == packing.first_continuation and continuations[-1] == starts[-1]
    for g in range(len(prompts) - 1):
        assert prompts[g + 1] - prompts[g] <= packing.longest_prompt
        assert continuations[g + 1] - continuations[g] <= packing.longest_continuations
        seen[continuations[g] : continuations[g + 1], prompts[g] : prompts[g + 1]] = True
    return seen


def _of_rows(packing: PaddedRows) -> Tensor:
    num = len(packing.place_L)
    seen = torch.zeros(num, num, dtype=torch.bool)
    of_slot = torch.full((sum(rows.place_RW.numel() for rows in packing.parts),), -1)
    of_slot[packing.place_L] = torch.arange(num)
    first = 0
    for rows in packing.parts:
        num_rows, width = rows.place_RW.shape
        causal = torch.ones(num_rows, 1, width, width).tril().bool()
        for r, mask in enumerate(causal if rows.visible_R1WW is None else rows.visible_R1WW):
            tokens = of_slot[first + r * width : first + (r + 1) * width]
            there = (tokens >= 0).nonzero().flatten()
            assert torch.equal(rows.place_RW[r, there], tokens[there])
            for slot in there.tolist():
                looked_at = mask[0, slot].nonzero().flatten()
                assert (tokens[looked_at] >= 0).all(), "a token sees padding"
                seen[tokens[slot], tokens[looked_at]] = True
        first += num_rows * width
    return seen
