"""Write weights into one safetensors file, in the engines' type, with no more than one tensor in memory at a time.

Names, shapes and types are known before the first tensor comes, so the header is written first, and every tensor goes to its place. Rows of a tensor
are consecutive bytes, so each rank of a trainer writes the rows that it holds.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from rftcore.sync.files.weights_file import OUTPUT_HEAD, disk_full_error, embedding_of, has_head
from rftcore.sync.tensors import Part, WireTensor
from rftdata.errors import ModelError, is_disk_full

if TYPE_CHECKING:
    from torch import Tensor

    from rftcore.sync.tensors import HeldRows

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight."""
_ALIGNMENT = 8  # of the header, by the format


@dataclass(frozen=True)
class Slot:
    """The place of a tensor in a file.

    Attributes:
        start: first byte, from the end of the header.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The places of tensors in a file.

    Attributes:
        dtype: type of matrices.
        slots: place of each tensor, by name.
        head_of: name of the embedding that is written as the output head, too; None if the head is a tensor of its own.
    """

    dtype: str
    slots: Mapping[str, Slot]
    head_of: str | None

    @property
    def num_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(slot.num_bytes for slot in self.slots.values())

    @property
    def in_float32(self) -> frozenset[str]:
        """The tensors that are in float32."""
        return frozenset(name for name, slot in self.slots.items() if slot.dtype == "float32")

    def slot(self, name: str) -> Slot:
        """Return the place of a tensor.

        Raises:
            ModelError: there is none.
        """
        if name not in self.slots:
            raise ModelError(
                f"the weight {name} is not that of the file's layout", allowed=f"{len(self.slots)} weights"
            )
        return self.slots[name]

    @cached_property
    def header(self) -> bytes:
        """The bytes before the first tensor."""
        entries = {
            name: {
                "dtype": _NAMES[slot.dtype],
                "shape": slot.shape,
                "data_offsets": [slot.start, slot.start + slot.num_bytes],
            }
            for name, slot in self.slots.items()
        }
        header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        header += b" " * (-len(header) % _ALIGNMENT)
        return struct.pack("<Q", len(header)) + header


def layout(shapes: Mapping[str, tuple[int, ...]], dtype: str, in_float32: Collection[str] = ()) -> Layout:
    """Return the places of tensors, and of an output head.

    Args:
        shapes: by name.
        dtype: float32, bfloat16 or float16. Vectors and numbers are written in float32: they take no room, and some engines keep them so.
        in_float32: further tensors that engines keep in float32.

    Raises:
        ModelError: there is neither an output head nor one embedding to copy it from.
    """
    head_of = None if has_head(shapes) else embedding_of(shapes)
    whole = {**shapes, **({} if head_of is None else {OUTPUT_HEAD: shapes[head_of]})}
    types = {name: "float32" if len(shape) < 2 or name in in_float32 else dtype for name, shape in whole.items()}
    slots, start = dict[str, Slot](), 0
    # The wider type first, so that every tensor is aligned.
    for name in sorted(whole, key=lambda name: (-ITEM_BYTES[types[name]], name)):
        slots[name] = Slot(types[name], tuple(whole[name]), start)
        start += slots[name].num_bytes
    return Layout(dtype, slots, head_of)


def stream_weights(places: Layout, tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write whole tensors to `path`, each as it comes; the caller renames the file (`write_atomically`).

    Args:
        places: of these tensors.
        tensors: of any type, on any device, in any order.

    Raises:
        ModelError: they are not those of the layout.
        OSError: there is no space.
    """
    begin_file(places, path)
    missing = {*places.slots}
    with path.open("r+b", buffering=0) as file:
        for name, tensor in tensors:
            names = {name, OUTPUT_HEAD} if name == places.head_of else {name}
            _write(file.fileno(), places, names, Part(0, 0, _num_rows(places.slot(name).shape)), tensor)
            missing -= names
    _refuse_missing(missing)


def begin_file(places: Layout, path: Path) -> None:
    """Write the header of a file whose tensors follow.

    Raises:
        OSError: there is no space.
    """
    path.write_bytes(places.header)


def write_rows(
    places: Layout,
    tensors: Sequence[WireTensor],
    rank: int,
    held: Iterable[HeldRows],
    path: Path,
    done: Callable[[], None],
) -> None:
    """Write a rank's share of all tensors into a file that has been begun; together the ranks write every row once.

    All held rows are taken even if the disk is full, because the ranks of a trainer produce some of them together.

    Args:
        places: of these tensors.
        tensors: which rank has which rows.
        held: this rank's rows of every tensor that has rows of its own.
        done: called after each tensor.

    Raises:
        ModelError: they are not those of the layout, or not all that the rank has to write.
        DiskFullError: there is no space.
    """
    shares = {tensor.name: [part for part in tensor.parts if part.sender == rank] for tensor in tensors}
    names = {name: {name} for name in shares}
    for tensor in tensors:
        if tensor.same_as is not None:
            names[tensor.same_as].add(tensor.name)
    if places.head_of is not None:
        names[places.head_of].add(OUTPUT_HEAD)
    failure: OSError | ModelError | None = None
    stream = iter(held)
    try:
        with path.open("r+b", buffering=0) as file:
            for rows in stream:
                for part in shares.pop(rows.name, ()):
                    _write(file.fileno(), places, names[rows.name], part, _rows_of_part(rows, part))
                done()
        _refuse_missing({name for name, parts in shares.items() if parts})
    except (OSError, ModelError) as error:
        failure = error
    for _ in stream:
        done()
    if failure is not None and is_disk_full(failure):
        raise disk_full_error(path) from failure
    if failure is not None:
        raise failure


def _rows_of_part(held: HeldRows, part: Part) -> Tensor:
    first = part.first_row - held.first_row
    rows = held.rows[max(0, first) : first + part.num_rows] if held.rows.ndim else held.rows
    if first < 0 or _num_rows(tuple(rows.shape)) != part.num_rows:
        raise ModelError(
            f"a rank holds other rows of the weight {held.name} than it has to write",
            value=f"{len(held.rows)} from row {held.first_row} on",
            allowed=f"{part.num_rows} from row {part.first_row} on",
        )
    return rows


def _refuse_missing(names: Collection[str]) -> None:
    if names:
        raise ModelError(
            "the weights are incomplete", value=", ".join(sorted(names)[:3]), todo="export the model's full state"
        )


def _write(file: int, places: Layout, names: Collection[str], part: Part, rows: Tensor) -> None:
    """Write consecutive rows of a tensor to their place under each of its names."""
    import torch

    copies: dict[str, Tensor] = {}
    for name in names:
        slot = places.slot(name)
        if (part.num_rows, *slot.shape[1:]) != (_num_rows(tuple(rows.shape)), *rows.shape[1:]):
            raise ModelError(
                f"the weight {name} is not that of the file's layout", value=tuple(rows.shape), allowed=str(slot)
            )
        # A copy even of a tensor in the host's memory: numpy would keep its storage from being freed while an engine uses the device.
        if slot.dtype not in copies:
            copies[slot.dtype] = rows.detach().to("cpu", getattr(torch, slot.dtype), copy=True).contiguous()
        values = copies[slot.dtype]
        start = slot.start + part.first_row * slot.num_bytes // max(1, _num_rows(slot.shape))
        _write_at(file, values.view(-1).view(torch.uint8).numpy().data, len(places.header) + start)


def _write_at(file: int, content: memoryview, start: int) -> None:
    # A call writes 2 GiB at most.
    while content:
        written = os.pwrite(file, content, start)
        content, start = content[written:], start + written


def _num_rows(shape: Sequence[int]) -> int:
    return shape[0] if shape else 1
