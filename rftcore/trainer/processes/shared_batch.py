"""The batch of a step in memory that all ranks of a machine share: rank 0 writes it, and the others read it in place.

The memory is an anonymous file (memfd), which the ranks inherit as an open file. The system frees it when the last process that has it open
ends. It grows with the batches and never shrinks, because a mapping beyond the end of a file crashes its reader. Rank 0 writes only between
two updates, when no rank reads.
"""

from __future__ import annotations

import mmap
import os
import warnings
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from rftcore.trainer.batches.train_batch import TrainBatch

_ALIGNMENT = 64


@dataclass(frozen=True)
class TensorPlace:
    """The place of one tensor of a batch: its field, its type (`int64`, …), its shape and its first byte."""

    field: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def tensor_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a batch in the shared memory.

    Attributes:
        tensors: in the order of their places.
        others: the fields of the batch that are not tensors, None included.
        num_bytes: from the first byte of the memory to the last one of the batch.
    """

    tensors: tuple[TensorPlace, ...]
    others: dict[str, Any]
    num_bytes: int


class SharedBatchMemory:
    """The shared memory, for its writer or for a reader.

    Args:
        fd: the memory's open file, for a reader; None for the writer, which creates it.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._writes = fd is None
        self.fd = os.memfd_create("rft-batch") if fd is None else fd
        self._mapping: mmap.mmap | None = None

    def write(self, batch: TrainBatch) -> BatchLayout:
        """Overwrite the batch before, which no rank may be reading any more.

        Raises:
            OSError: not enough memory.
        """
        layout = _layout(batch)
        if layout.num_bytes > os.fstat(self.fd).st_size:
            # Allocates all pages now: touching a page that cannot be allocated later would crash the process.
            os.posix_fallocate(self.fd, 0, layout.num_bytes)
        for place in layout.tensors:
            self._view(place, layout).copy_(getattr(batch, place.field))
        return layout

    def read(self, layout: BatchLayout) -> TrainBatch:
        """Return the batch as views of the memory, valid until the next one is written. They are read-only."""
        tensors: dict[str, Any] = {place.field: self._view(place, layout) for place in layout.tensors}
        return TrainBatch(**tensors, **layout.others)

    def close(self) -> None:
        """Close the file; views stay valid."""
        self._mapping = None  # not `close`, because views may be in use
        os.close(self.fd)

    def _view(self, place: TensorPlace, layout: BatchLayout) -> Tensor:
        dtype = place.tensor_dtype
        count = torch.Size(place.shape).numel()
        if not count:
            return torch.empty(place.shape, dtype=dtype)
        if self._mapping is None or len(self._mapping) < layout.num_bytes:
            protection = mmap.PROT_READ | (mmap.PROT_WRITE if self._writes else 0)
            self._mapping = mmap.mmap(self.fd, os.fstat(self.fd).st_size, mmap.MAP_SHARED, protection)
        with warnings.catch_warnings():
            # torch has no read-only tensors, and warns.
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            flat = torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=place.offset)
        return flat.view(place.shape)


def _layout(batch: TrainBatch) -> BatchLayout:
    places, others, end = [], {}, 0
    for field in fields(batch):
        value = getattr(batch, field.name)
        if not isinstance(value, Tensor):
            others[field.name] = value
            continue
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        places.append(TensorPlace(field.name, str(value.dtype).removeprefix("torch."), tuple(value.shape), start))
        end = start + value.numel() * value.element_size()
    return BatchLayout(tuple(places), others, end)
