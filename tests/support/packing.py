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
    num = starts[-1]
    seen = torch.zeros(num, num, dtype=torch.bool)
    is_shared = packing.key_starts_S is not None
    key_starts = packing.key_starts_S.tolist() if packing.key_starts_S is not None else starts
    places = packing.key_place_K if packing.key_place_K is not None else torch.arange(num)
    for (start, stop), (first, last) in zip(pairwise(starts), pairwise(key_starts), strict=True):
        assert 0 <= stop - start <= packing.longest
        assert last - first <= (packing.longest_keys if is_shared else packing.longest)
        keys = places[first:last]
        assert keys[len(keys) - (stop - start) :].tolist() == list(range(start, stop)), "the last keys are its own"
        # FlashAttention aligns the last query with the last key.
        sees = torch.ones(stop - start, last - first).tril(last - first - (stop - start)).bool()
        assert len(keys.unique()) == len(keys)
        seen[start:stop, keys] = sees
    if packing.copies_K is not None and packing.first_copy_L is not None:
        ends = [*packing.first_copy_L.tolist()[1:], len(places)]
        for token, (first, last) in enumerate(zip(packing.first_copy_L.tolist(), ends, strict=True)):
            assert last > first and (places[packing.copies_K[first:last]] == token).all()
        assert packing.copies_K.sort().values.tolist() == list(range(len(places)))
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
