"""Ray's object store: shared memory, the volatile ceiling.

A write is `ray.put` of a batch of experiences, each a dictionary of texts, numbers and three arrays. References reach the consumer through an
actor, the usual way to pass objects between processes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import ray

from benchmarks.harness.store import Store, keys_of
from benchmarks.harness.workload import Sample
from benchmarks.peers import ray_cluster


@ray.remote
class Mailbox:
    """Queue of references, one for each space."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def is_up(self) -> bool:
        return True

    async def put(self, reference: list[Any]) -> None:
        await self._queue.put(reference)

    async def get(self) -> list[Any]:
        return await self._queue.get()


class RayObjectStore(Store):
    package = "ray"

    def __init__(self, address: dict[str, Any]) -> None:
        super().__init__(address)
        ray_cluster.connect(address)
        self._mailbox: Any = None
        self._kept: list[Any] = []

    @classmethod
    def start(cls, address: dict[str, Any]) -> dict[str, Any]:
        return ray_cluster.start(address)

    @classmethod
    def stop(cls) -> None:
        ray.shutdown()

    def create(self, space: str) -> None:
        self._mailbox = Mailbox.options(name=space, lifetime="detached", num_cpus=0).remote()
        ray.get(self._mailbox.is_up.remote())

    def open(self, space: str) -> None:
        self._mailbox = ray.get_actor(space)

    def convert(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        return [vars(sample) for sample in samples]

    def put(self, batch: list[dict[str, Any]]) -> None:
        reference = ray.put(batch)
        self._kept.append(reference)  # the object exists as long as its owner holds the reference
        self._mailbox.put.remote([reference])  # not waited for: the object is stored

    def take(self, num: int) -> list[int]:
        (reference,) = ray.get(self._mailbox.get.remote())
        found = ray.get(reference)
        arrays = [(one["token_ids"], one["logprobs"], one["mask"]) for one in found]
        return keys_of(token_ids for token_ids, _, _ in arrays)

    def close(self, space: str) -> None:
        self._kept.clear()
        with contextlib.suppress(ValueError):  # another process has closed it
            ray.kill(ray.get_actor(space))


STORE = RayObjectStore
