"""TransferQueue 0.1.11 with its default storage (in RAM, in Ray actors), through its client.

A space is a partition. The consumer asks for the metadata of 256 samples, then for their three arrays. In the default mode, a request that comes
before its data stops the controller for five seconds and then fails, so the polling mode is used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf
from tensordict import NonTensorStack, TensorDict

from benchmarks.harness.store import Store, keys_of
from benchmarks.harness.workload import Sample
from benchmarks.peers import ray_cluster

_FIELDS = ["token_ids", "logprobs", "mask"]
_POLL_S = 0.002


class TransferQueue(Store):
    package = "TransferQueue"

    def __init__(self, address: dict[str, Any]) -> None:
        super().__init__(address)
        ray_cluster.connect(address)
        transfer_queue.init()
        self._client = transfer_queue.get_client()
        self._space = ""

    @classmethod
    def start(cls, address: dict[str, Any]) -> dict[str, Any]:
        address = ray_cluster.start(address)
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}}))
        return address

    @classmethod
    def stop(cls) -> None:
        transfer_queue.close()
        ray.shutdown()

    def open(self, space: str) -> None:
        self._space = space

    def convert(self, samples: Sequence[Sample]) -> TensorDict:
        def ragged(name: str) -> torch.Tensor:
            return torch.nested.as_nested_tensor(
                [torch.from_numpy(getattr(s, name)) for s in samples], layout=torch.jagged
            )

        return TensorDict(
            {
                **{name: ragged(name) for name in _FIELDS},
                "reward": torch.tensor([[s.reward] for s in samples]),
                "prompt": NonTensorStack(*[s.prompt for s in samples]),
                "response": NonTensorStack(*[s.response for s in samples]),
                "metrics": NonTensorStack(*[s.metrics for s in samples]),
            },
            batch_size=len(samples),
        )

    def put(self, batch: TensorDict) -> None:
        self._client.put(data=batch, partition_id=self._space)

    def take(self, num: int) -> list[int]:
        while True:
            metadata = self._client.get_meta(
                data_fields=_FIELDS, batch_size=num, partition_id=self._space, task_name="trainer"
            )
            if metadata.size:
                break
            time.sleep(_POLL_S)
        found = self._client.get_data(metadata)
        arrays = [[one.numpy() for one in found[name].unbind()] for name in _FIELDS]
        return keys_of(arrays[0])

    def close(self, space: str) -> None:
        if space in self._client.get_partition_list():
            self._client.clear_partition(space)


STORE = TransferQueue
