"""Where the tensors of a checkpoint lie within the tensors of a transformers model.

transformers keeps the experts of a layer as one tensor, `mlp.experts.gate_up_proj` of [experts, 2 · intermediate, hidden], and other models under other
names than their checkpoints have. Files, transfers and engines use the checkpoint's names alone. So trainer and engine translate at the model: what they
write and send, and what they load.

The layout comes from transformers' own reverse conversion, applied once to tensors without storage, so no family is named here. It exists where every tensor of
the checkpoint is a view of one tensor of the model: consecutive rows (entries of the first dimension), or part of one row, as a matrix of an expert.
FSDP2 divides rows, so that each expert lies whole on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rftdata.errors import ConfigError


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint, as a view of a tensor of the model.

    Attributes:
        name: name in the checkpoint.
        shape: shape in the checkpoint.
        first_row, num_rows: the rows of the model's tensor from which it has some or all values.
        has_rows: whether its first dimension is these rows; false for (part of) one row.
        row_shape, row_stride, row_offset: the view of each row, in elements.
    """

    name: str
    shape: tuple[int, ...]
    first_row: int
    num_rows: int
    has_rows: bool
    row_shape: tuple[int, ...]
    row_stride: tuple[int, ...]
    row_offset: int

    def view(self, rows: Tensor, first: int = 0) -> Tensor:
        """Return this tensor, or those of its rows that are in `rows`.

        Args:
            rows: consecutive rows of the model's tensor, contiguous; or a tensor without dimensions.
            first: number of the first of them.

        Returns:
            A view. Of a tensor without rows of its own, which lies in another part, none of its rows.
        """
        if not rows.ndim:
            return rows
        start, end = max(self.first_row, first), min(self.first_row + self.num_rows, first + len(rows))
        if end <= start:
            return rows.new_empty((0, *(self.row_shape if self.has_rows else self.row_shape[1:])))
        own = rows[start - first : end - first]
        offset = own.storage_offset() + self.row_offset
        if not self.has_rows:
            return own.as_strided(self.row_shape, self.row_stride, offset)
        return own.as_strided((len(own), *self.row_shape), (own.stride(0), *self.row_stride), offset)

    def first_of(self, first: int) -> int:
        """Return the number, in this tensor, of the first row that `view` returns of rows from `first` on."""
        return max(0, first - self.first_row) if self.has_rows else 0


class CheckpointLayout:
    """The pieces of every tensor of a model that are not the whole tensor under its own name.

    Args:
        model: without adapters; it may be on the meta device.

    Raises:
        ConfigError: a tensor of the checkpoint is not a view of one tensor of the model, or some values are in none.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._pieces = _pieces(model)

    def pieces(self, name: str) -> tuple[Piece, ...] | None:
        """Return the parts of a tensor of the model; None for one that the checkpoint has whole under the same name."""
        return self._pieces.get(name)

    def names(self, name: str) -> tuple[str, ...]:
        """Return the names of the checkpoint's tensors that a tensor of the model is made of."""
        pieces = self.pieces(name)
        return (name,) if pieces is None else tuple(piece.name for piece in pieces)

    @property
    def stacked(self) -> frozenset[str]:
        """Last parts of the names of tensors that the model stacks into one, such as `down_proj` of experts."""
        parts = (piece for pieces in self._pieces.values() for piece in pieces if not piece.has_rows)
        return frozenset(part.name.removesuffix(".weight").rpartition(".")[2] for part in parts)

    def tensors(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors that a tensor of the model is made of, as views: writing to them changes the model.

        Args:
            tensor: whole, and contiguous if it has parts.
        """
        pieces = self.pieces(name)
        if pieces is None:
            yield name, tensor
            return
        assert tensor.is_contiguous(), name
        yield from ((piece.name, piece.view(tensor)) for piece in pieces)

    def of_state(self, state: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the checkpoint's tensors in a model's state, as views."""
        return {part: view for name, tensor in state for part, view in self.tensors(name, tensor)}


class _ViewsStayViews(TorchFunctionMode):
    """Keeps views: transformers' conversions make each part contiguous, which would copy it, and only its place matters here."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _pieces(model: PreTrainedModel) -> dict[str, tuple[Piece, ...]]:
    state = model.state_dict()
    ends, end = list[tuple[int, str]](), 0
    # All tensors of the model are pieces of one without storage, so that an offset in it identifies the tensor and the place.
    flat = torch.empty(sum(tensor.numel() for tensor in state.values()), device="meta")
    sources: dict[str, Tensor] = {}
    for name, tensor in state.items():
        sources[name] = flat[end : end + tensor.numel()].view(tensor.shape)
        end += tensor.numel()
        ends.append((end, name))
    try:
        with _ViewsStayViews():
            converted = revert_weight_conversion(model, dict(sources))
    except (ValueError, RuntimeError) as error:
        raise _unknown_layout(model, f"the conversion fails with {type(error).__name__}: {error}") from error
    pieces_of: dict[str, list[Piece]] = {name: [] for name in sources}
    places, number = sorted(converted.items(), key=lambda named: named[1].storage_offset()), 0
    for name, part in places:
        if part._base is not flat:
            raise _unknown_layout(model, f"{name} is computed from several tensors of the model")
        while part.storage_offset() >= ends[number][0] and number < len(ends) - 1:
            number += 1
        source = ends[number][1]
        piece = _piece(name, part, sources[source])
        if piece is None:
            raise _unknown_layout(model, f"{name} is not made of consecutive rows of {source}, nor part of one")
        pieces_of[source].append(piece)
    for name, pieces in pieces_of.items():
        if sum(prod(piece.shape) for piece in pieces) != sources[name].numel():
            raise _unknown_layout(model, f"the checkpoint does not have each value of {name} once")
    return {name: tuple(pieces) for name, pieces in pieces_of.items() if not _is_whole(name, pieces, sources[name])}


def _piece(name: str, part: Tensor, source: Tensor) -> Piece | None:
    """Return where the view `part` lies in `source`; None if it crosses the bounds of rows."""
    shape, stride = tuple(part.shape), part.stride()
    offset = int(part.storage_offset() - source.storage_offset())
    if source.ndim == 0 or not part.numel():
        return Piece(name, shape, 0, source.shape[0] if source.ndim else 1, True, shape[1:], stride[1:], 0)
    row_size = source.stride(0)
    first_row, row_offset = divmod(offset, row_size)
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if row_offset + last < row_size and not (source.ndim == 1 and shape):
        return Piece(name, shape, first_row, 1, False, shape, stride, row_offset)
    if not shape or stride[0] != row_size or row_offset + last - (shape[0] - 1) * row_size >= row_size:
        return None
    return Piece(name, shape, first_row, shape[0], True, shape[1:], stride[1:], row_offset)


def _is_whole(name: str, pieces: list[Piece], source: Tensor) -> bool:
    return len(pieces) == 1 and pieces[0].name == name and pieces[0].shape == tuple(source.shape)


def _unknown_layout(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"weights of this model cannot be handed over: transformers holds them in another form than its checkpoint, and {reason}",
        value=model.config.model_type,
        allowed="models whose weights are stacks of those of the checkpoint, such as qwen3_moe, mixtral",
        todo="name another model in model.path",
    )
