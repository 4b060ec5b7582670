"""Reverb 0.14.0: a queue table in the memory of its server.

Each experience is an item. A writer refuses arrays of different lengths, so they are padded to the longest of the workload.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import reverb

from benchmarks.harness.store import Store, keys_of
from benchmarks.harness.workload import MAX_TOKENS, Sample

_NUM_SPACES = 200
# A sample has its columns in the order of their names.
_COLUMNS = ("logprobs", "mask", "metrics", "num_tokens", "prompt", "response", "reward", "token_ids")


class ReverbQueue(Store):
    package = "dm-reverb"
    _server: ClassVar[Any] = None

    def __init__(self, address: dict[str, Any]) -> None:
        super().__init__(address)
        self._client = reverb.Client(f"localhost:{address['port']}")
        self._space = ""

    @classmethod
    def start(cls, address: dict[str, Any]) -> dict[str, Any]:
        # Tables are named when the server starts.
        tables = [reverb.Table.queue(f"space{i}", max_size=10**6) for i in range(1, _NUM_SPACES + 1)]
        cls._server = reverb.Server(tables)
        return {**address, "port": cls._server.port}

    @classmethod
    def stop(cls) -> None:
        cls._server.stop()

    def open(self, space: str) -> None:
        self._space = space

    def convert(self, samples: Sequence[Sample]) -> list[dict[str, Any]]:
        def padded(values: Any) -> Any:
            out = np.zeros(MAX_TOKENS, values.dtype)
            out[: len(values)] = values
            return out

        return [
            {
                "num_tokens": np.int32(len(s.token_ids)),
                "token_ids": padded(s.token_ids),
                "logprobs": padded(s.logprobs),
                "mask": padded(s.mask),
                "reward": np.float64(s.reward),
                "prompt": np.array(s.prompt),
                "response": np.array(s.response),
                "metrics": np.array(json.dumps(s.metrics)),
            }
            for s in samples
        ]

    def put(self, batch: list[dict[str, Any]]) -> None:
        with self._client.trajectory_writer(num_keep_alive_refs=1) as writer:
            for item in batch:
                writer.append(item)
                writer.create_item(self._space, 1.0, {name: column[-1:] for name, column in writer.history.items()})
            writer.flush()

    def take(self, num: int) -> list[int]:
        arrays = []
        for sample in self._client.sample(self._space, num_samples=num, emit_timesteps=False):
            one = dict(zip(_COLUMNS, sample.data, strict=True))
            length = int(np.squeeze(one["num_tokens"]))
            arrays.append([np.squeeze(one[name], 0)[:length] for name in ("token_ids", "logprobs", "mask")])
        return keys_of(token_ids for token_ids, _, _ in arrays)

    def close(self, space: str) -> None:
        self._client.reset(space)


STORE = ReverbQueue
