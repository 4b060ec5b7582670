"""Stored experiences as an iterable dataset of torch, or of the library `datasets`.

Each process of a data loader opens the buffer and reads its own share (`Buffer.scan`), so that every experience is read once, for any number of
workers and ranks. A process reads the buffer as it is when the process starts: experiences that are stored meanwhile may be in some shares and
not in others, but never twice. Shares differ in size by some blocks of 64 experiences, so ranks that must take equally many steps have to agree
on a number of steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from torch.utils.data import IterableDataset, get_worker_info

import rftdata
from rftdata.config import BufferConfig
from rftdata.query.arrays import BASE_ARRAYS, OPTIONAL_ARRAYS

if TYPE_CHECKING:
    import datasets

Example = dict[str, Any]
_TENSORS = [*BASE_ARRAYS.values(), *OPTIONAL_ARRAYS.values()]


class ExperienceDataset(IterableDataset[Example]):
    """Experiences in ascending order of their ids, as dictionaries: arrays are tensors, other columns Python values, NULL is None.

    Args:
        buffer: folder or URL of the buffer, or its configuration.
        columns, where, run: as in `Buffer.scan`.
        rank, world_size: place of this process among those that share the experiences; by default that of torch.distributed.
    """

    def __init__(
        self,
        buffer: str | BufferConfig,
        columns: Sequence[str],
        where: str | None = None,
        *,
        run: str | int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        super().__init__()
        self._buffer, self._columns, self._where, self._run = buffer, list(columns), where, run
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[Example]:
        rank, world_size = self._rank_and_size()
        worker = get_worker_info()
        num_workers = 1 if worker is None else worker.num_workers
        index = rank * num_workers + (0 if worker is None else worker.id)
        yield from _examples(
            self._buffer, self._columns, self._where, self._run, (index, world_size * num_workers), as_tensors=True
        )

    def _rank_and_size(self) -> tuple[int, int]:
        """Return the rank and the number of ranks."""
        group = torch.distributed if torch.distributed.is_available() and torch.distributed.is_initialized() else None
        rank = self._rank if self._rank is not None else group.get_rank() if group else 0
        size = self._world_size if self._world_size is not None else group.get_world_size() if group else 1
        return rank, size


def huggingface_dataset(
    buffer: str | BufferConfig,
    columns: Sequence[str],
    where: str | None = None,
    *,
    run: str | int | None = None,
    num_shards: int = 8,
) -> datasets.IterableDataset:
    """Return experiences as an iterable dataset of the library `datasets`; arrays are lists.

    `datasets.distributed.split_dataset_by_node` and `torch.utils.data.DataLoader` divide its shards over ranks and workers.

    Args:
        columns, where, run: as in `Buffer.scan`.
        num_shards: a multiple of the number of ranks times the number of workers.
    """
    import datasets

    with _opened(buffer) as opened:
        features = datasets.Features.from_arrow_schema(opened.scan(columns, "false", run=run).schema)
    arguments = {
        "buffer": buffer,
        "columns": tuple(columns),
        "where": where,
        "run": run,
        "num_shards": num_shards,
        "shards": list(range(num_shards)),
    }
    return datasets.IterableDataset.from_generator(_of_shards, features=features, gen_kwargs=arguments)


def _opened(buffer: str | BufferConfig) -> rftdata.Buffer:
    return rftdata.open(buffer, create=False, schema="check", application="rft dataset")


def _of_shards(
    buffer: str | BufferConfig,
    columns: tuple[str, ...],
    where: str | None,
    run: str | int | None,
    num_shards: int,
    shards: list[int],
) -> Iterator[Example]:
    for shard in shards:
        yield from _examples(buffer, columns, where, run, (shard, num_shards), as_tensors=False)


def _examples(
    buffer: str | BufferConfig,
    columns: Sequence[str],
    where: str | None,
    run: str | int | None,
    share: tuple[int, int],
    *,
    as_tensors: bool,
) -> Iterator[Example]:
    with _opened(buffer) as opened, opened.scan(columns, where, run=run, share=share) as batches:
        for batch in batches:
            values = [
                _tensors(column) if as_tensors and column.type in _TENSORS else column.to_pylist()
                for column in batch.columns
            ]
            for example in zip(*values, strict=True):
                yield dict(zip(batch.schema.names, example, strict=True))


def _tensors(column: pa.ListArray) -> list[torch.Tensor | None]:
    """Return each row's array, as a view of one copy of all of them."""
    together = torch.from_numpy(column.flatten().to_numpy(zero_copy_only=False).copy())
    lengths = column.value_lengths().fill_null(0).to_pylist()
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    rows = [together[start:end] for start, end in pairwise(ends)]
    return [row if there else None for row, there in zip(rows, column.is_valid().to_pylist(), strict=True)]
