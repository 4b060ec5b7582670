"""The rows of each weight that a rank hands over to engines, directly or in a file: those of its own shard, so that no weight is gathered.

FSDP2 shards the first dimension, and column-wise tensor parallelism does so before it: each rank holds consecutive rows. Row-wise tensor parallelism
splits the second dimension; such a weight is gathered over the tensor-parallel ranks only. Ranks that hold the same rows divide them.

Weights travel under the names of the checkpoint. Where the model stacks several of them into one tensor, such as experts, the rows of that tensor
determine which rank sends which.

Every rank computes the division for all ranks; nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from rftcore.sync.checkpoint_layout import CheckpointLayout, Piece
from rftcore.sync.tensors import HeldRows, Part, WireTensor
from rftcore.trainer.network.sharding import Grid

Rows = tuple[int, int]
"""First row, number of rows."""


def wire_tensors(
    weights: Iterable[tuple[str, Tensor]], tied: dict[str, str], grid: Grid, layout: CheckpointLayout | None = None
) -> tuple[WireTensor, ...]:
    """Return what the ranks of a grid send of these weights together.

    Args:
        weights: of this rank; only their shapes and placements matter.
        tied: from the name of a weight to that of an earlier one with the same values.
        layout: of the model that has the weights; None for weights that are sent as they are.
    """
    tensors: list[WireTensor] = []
    for name, tensor in weights:
        first = tied.get(name)
        holders = None if first is not None else _holders(name, tensor, grid)
        pieces = None if layout is None else layout.pieces(name)
        if pieces is None:
            parts = () if holders is None else _parts(holders, 0, _num_rows(tensor))
            tensors.append(WireTensor(name, tuple(tensor.shape), parts, first))
            continue
        assert layout is not None
        same_as = [None] * len(pieces) if first is None else layout.names(first)
        for piece, other in zip(pieces, same_as, strict=True):
            parts = () if holders is None else _parts_of_piece(holders, piece)
            tensors.append(WireTensor(piece.name, piece.shape, parts, other))
    return tuple(tensors)


def held_rows(
    weights: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    in_float32: Collection[str] = (),
    layout: CheckpointLayout | None = None,
) -> Iterator[HeldRows]:
    """Yield the rows of each weight that this rank holds; all ranks iterate together.

    Args:
        dtype: type in which weights are gathered that must be.
        in_float32: names of weights that are gathered in float32 instead.
        layout: see `wire_tensors`.
    """
    for name, tensor in weights:
        names = (name,) if layout is None else layout.names(name)
        first, own = 0, tensor
        if isinstance(tensor, DTensor):
            wide = any(part in in_float32 for part in names)
            rows = _gathered_to_rows(tensor, torch.float32 if wide else dtype)
            first, own = first_row(rows), rows.to_local()
        pieces = None if layout is None else layout.pieces(name)
        if pieces is None:
            yield HeldRows(name, first, own)
            continue
        own = own.contiguous()
        yield from (HeldRows(piece.name, piece.first_of(first), piece.view(own, first)) for piece in pieces)


def first_row(tensor: DTensor) -> int:
    """Return the row of the whole tensor with which this rank's part begins."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    return _rows(tensor, coordinate)[0]


def _holders(name: str, tensor: Tensor, grid: Grid) -> list[tuple[Rows, list[int]]]:
    """Return the ranks that hold each part of a tensor's rows, in the order of the rows."""
    num_rows = _num_rows(tensor)
    holders: dict[Rows, list[int]] = {}
    for rank, rows in _held_by_rank(tensor, grid, num_rows).items():
        if rows[1]:
            holders.setdefault(rows, []).append(rank)
    in_order, end = list[tuple[Rows, list[int]]](), 0
    for (first, count), ranks in sorted(holders.items()):
        if first != end:
            break
        in_order.append(((first, count), ranks))
        end += count
    assert end == num_rows, f"the ranks of the trainer hold other rows of {name} than each once: {holders}"
    return in_order


def _num_rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.ndim else 1


def _parts(holders: Sequence[tuple[Rows, list[int]]], first: int, num_rows: int) -> tuple[Part, ...]:
    """Divide these rows of a tensor among the ranks that hold them."""
    parts = list[Part]()
    for (start, count), ranks in holders:
        low, high = max(start, first), min(start + count, first + num_rows)
        if low < high:
            parts += _divided(low - first, high - low, ranks)
    return tuple(parts)


def _parts_of_piece(holders: Sequence[tuple[Rows, list[int]]], piece: Piece) -> tuple[Part, ...]:
    if piece.has_rows:
        return _parts(holders, piece.first_row, piece.num_rows)
    ranks = next(ranks for (start, count), ranks in holders if start <= piece.first_row < start + count)
    return tuple(_divided(0, piece.shape[0] if piece.shape else 1, ranks))


def _held_by_rank(tensor: Tensor, grid: Grid, num_rows: int) -> dict[int, Rows]:
    if grid.mesh is None:
        return {0: (0, num_rows)}
    names = grid.mesh.mesh_dim_names
    assert names is not None
    held = {}
    for place in product(*(range(size) for size in grid.mesh.mesh.shape)):
        rank = int(grid.mesh.mesh[place])
        held[rank] = (0, num_rows)
        if isinstance(tensor, DTensor):
            # The ranks along a dimension that the tensor's mesh lacks hold copies.
            own = tensor.device_mesh.mesh_dim_names or ()
            held[rank] = _rows(tensor, [place[names.index(name)] for name in own])
    return held


def _gathered_to_rows(tensor: DTensor, dtype: torch.dtype) -> DTensor:
    placements = _by_rows(tensor.placements)
    if placements == tensor.placements:
        return tensor
    cast = tensor.to(dtype)
    assert isinstance(cast, DTensor)
    return cast.redistribute(placements=placements)


def _rows(tensor: DTensor, coordinate: Sequence[int]) -> Rows:
    return _rows_at(
        tuple(tensor.shape), tuple(tensor.device_mesh.shape), tuple(coordinate), _by_rows(tensor.placements)
    )


# Many weights of a model are divided alike, and the computation takes longer than the copy of a small one.
@lru_cache(maxsize=1024)
def _rows_at(
    shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> Rows:
    own, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
    return (offset[0], own[0]) if shape else (0, 1)


@lru_cache(maxsize=1024)
def _by_rows(placements: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Replace placements that split another dimension than the first by whole copies."""
    return tuple(each if getattr(each, "dim", None) == 0 else Replicate() for each in placements)


def _divided(first: int, count: int, ranks: list[int]) -> list[Part]:
    share = -(-count // len(ranks))
    starts = range(0, count, share)
    return [Part(rank, first + start, min(share, count - start)) for rank, start in zip(ranks, starts, strict=False)]
