"""Weights into one safetensors file, tensor by tensor, in the engines' type: no more than one tensor is in memory at a time.

Names, shapes and types are known before the first tensor comes, so the header is written first, and every tensor goes to its place.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING

from rftcore.sync.weights_file import OUTPUT_HEAD, embedding_of, has_head
from rftdata.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of a weight."""
_ALIGNMENT = 8  # of the header, by the format


@dataclass(frozen=True)
class Slot:
    """Where a tensor goes.

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
        slots: by name.
        head_of: the embedding that is written as the output head, too; None if the head is a tensor of its own.
    """

    slots: Mapping[str, Slot]
    head_of: str | None

    @property
    def num_bytes(self) -> int:
        """Size of all tensors together."""
        return sum(slot.num_bytes for slot in self.slots.values())


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
    return Layout(slots, head_of)


def stream_weights(places: Layout, tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Write tensors to `path`, each as it comes; the caller renames the file (`write_atomically`).

    All of them are taken even if the disk is full, because the ranks of a trainer produce them together.

    Args:
        places: of these tensors.
        tensors: of any type, on any device, in any order.

    Raises:
        ModelError: they are not those of the layout.
        OSError: there is no space.
    """
    missing = {*places.slots}
    failure: OSError | ModelError | None = None
    with path.open("wb") as file:
        first = _write_header(places, file)
        for name, tensor in tensors:
            if failure is None:
                try:
                    missing -= _write(file, first, places, name, tensor)
                except (OSError, ModelError) as error:
                    failure = error
    if failure is not None:
        raise failure
    if missing:
        raise ModelError(
            "the weights are incomplete", value=", ".join(sorted(missing)[:3]), todo="export the model's full state"
        )


def _write_header(places: Layout, file: IO[bytes]) -> int:
    """Write the header; return the place of the first byte behind it."""
    entries = {
        name: {"dtype": _NAMES[slot.dtype], "shape": slot.shape, "data_offsets": [slot.start, slot.start + slot.num_bytes]}
        for name, slot in places.slots.items()
    }  # fmt: skip
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % _ALIGNMENT)
    return file.write(struct.pack("<Q", len(header)) + header)


def _write(file: IO[bytes], first: int, places: Layout, name: str, tensor: Tensor) -> set[str]:
    """Write a tensor to its place, or places; return their names."""
    import torch

    slot = places.slots.get(name)
    if slot is None or tuple(tensor.shape) != slot.shape:
        raise ModelError(
            f"the weight {name} is not that of the file's layout", value=tuple(tensor.shape), allowed=str(slot)
        )
    # A copy even of a tensor in the host's memory: numpy would keep its storage from being freed while an engine has its turn.
    values = tensor.detach().to("cpu", getattr(torch, slot.dtype), copy=True).contiguous()
    content = values.view(-1).view(torch.uint8).numpy().data
    names = {name, OUTPUT_HEAD} if name == places.head_of else {name}
    for each in names:
        file.seek(first + places.slots[each].start)
        file.write(content)
    return names
