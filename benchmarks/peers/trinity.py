"""Trinity-RFT 0.6.0: its own writer and reader classes, with its own `Experience`.

SQL: in the process that uses it (a Ray actor in between would make it slower), on the PostgreSQL of the benchmark, one table for each space.
Queue: a Ray actor, as its trainer uses it, with the JSONL file that it always writes beside the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
import torch
from trinity.buffer.reader.queue_reader import QueueReader
from trinity.buffer.reader.sql_reader import SQLReader
from trinity.buffer.writer.queue_writer import QueueWriter
from trinity.buffer.writer.sql_writer import SQLWriter
from trinity.common.config import StorageConfig
from trinity.common.constants import StorageType
from trinity.common.experience import EID, Experience

from benchmarks.harness.store import Store, keys_of
from benchmarks.harness.workload import GROUP_SIZE, Sample
from benchmarks.peers import ray_cluster


class _Trinity(Store):
    package = "trinity-rft"
    _reads_and_writes: tuple[type[Any], type[Any]]

    def __init__(self, address: dict[str, Any]) -> None:
        super().__init__(address)
        self._loop = asyncio.new_event_loop()
        self._reader: Any = None
        self._writer: Any = None

    def config(self, space: str) -> StorageConfig:
        raise NotImplementedError

    def open(self, space: str) -> None:
        reader, writer = self._reads_and_writes
        self._reader, self._writer = reader(self.config(space)), writer(self.config(space))

    def convert(self, samples: Sequence[Sample]) -> list[Experience]:
        return [
            Experience(
                eid=EID(batch=0, task=s.group, run=s.key % GROUP_SIZE),
                tokens=torch.from_numpy(s.token_ids),
                logprobs=torch.from_numpy(s.logprobs[s.num_prompt_tokens :]),
                prompt_length=s.num_prompt_tokens,
                prompt_text=s.prompt,
                response_text=s.response,
                reward=s.reward,
                metrics=s.metrics,
                info={"model_version": 0, "use_count": 0},
            )
            for s in samples
        ]

    def put(self, batch: list[Experience]) -> None:
        self._loop.run_until_complete(self._writer.write(batch))

    def take(self, num: int) -> list[int]:
        found = self._loop.run_until_complete(self._reader.read(num))
        arrays = [(e.tokens.numpy(), e.logprobs.numpy(), e.action_mask.numpy()) for e in found]
        return keys_of(tokens for tokens, _, _ in arrays)


class TrinitySql(_Trinity):
    _reads_and_writes = (SQLReader, SQLWriter)

    def config(self, space: str) -> StorageConfig:
        return StorageConfig(
            name=f"trinity_{space}",
            storage_type=StorageType.SQL.value,
            schema_type="experience",
            path=self.address["uri"],
            batch_size=256,
            wrap_in_ray=False,
        )

    def create(self, space: str) -> None:
        self.open(space)  # the first connection creates the table

    def open(self, space: str) -> None:
        super().open(space)
        for one in (self._writer, self._reader):
            self._loop.run_until_complete(one._get_async_storage())  # connects, before the clock runs


class TrinityQueue(_Trinity):
    _reads_and_writes = (QueueReader, QueueWriter)

    def __init__(self, address: dict[str, Any]) -> None:
        super().__init__(address)
        # Ray ends an actor when its first handle is deleted, even if other handles exist.
        self._made: dict[str, Any] = {}
        ray_cluster.connect(address)

    @classmethod
    def start(cls, address: dict[str, Any]) -> dict[str, Any]:
        return ray_cluster.start(address)

    @classmethod
    def stop(cls) -> None:
        ray.shutdown()

    def config(self, space: str) -> StorageConfig:
        return StorageConfig(
            name=space,
            storage_type=StorageType.QUEUE.value,
            path=f"{self.address['folder']}/trinity_{space}.jsonl",
            batch_size=256,
            ray_namespace=ray_cluster.NAMESPACE,
        )

    def create(self, space: str) -> None:
        self.open(space)
        self._made[space] = (self._reader, self._writer)
        self._loop.run_until_complete(self._acquire())

    def close(self, space: str) -> None:
        self._made.pop(space, None)

    async def _acquire(self) -> None:
        await self._writer.acquire()
