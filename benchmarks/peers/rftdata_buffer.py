"""The buffer itself, through its public interface: a writer per producer, a trainer's attempt that draws whole groups.

A space is a run without pipeline stages, so that what is written can be drawn. Every write is durable on return; every draw is noted
durably, with receipts, fencing, checksums and the reward used, before its arrays are handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rftdata
from benchmarks.harness import Store, keys_of
from benchmarks.workload import GROUP_SIZE, Sample
from rftdata import Group, Rollout
from rftdata import Sequence as Experience
from rftdata.config import BufferConfig

COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs")


def as_groups(samples: Sequence[Sample]) -> list[Group]:
    """The samples as the buffer takes them."""
    groups = []
    for start in range(0, len(samples), GROUP_SIZE):
        rollouts = [
            Rollout(
                index,
                "ok",
                s.reward,
                [
                    Experience(
                        prompt=s.prompt,
                        response=s.response,
                        token_ids=s.token_ids,
                        num_prompt_tokens=s.num_prompt_tokens,
                        finish_reason="stop",
                        reward=s.reward,
                        behavior_logprobs=s.logprobs[s.num_prompt_tokens :],
                        metrics=s.metrics,
                    )
                ],
            )
            for index, s in enumerate(samples[start : start + GROUP_SIZE])
        ]
        groups.append(Group(rollouts, source="import", taskset="benchmark", task_key=str(samples[start].group)))
    return groups


class RftdataBuffer(Store):
    package = "rftdata"

    def __init__(self, address: dict[str, Any]) -> None:
        super().__init__(address)
        self._buffer = rftdata.open(BufferConfig(uri=address["uri"], segments=f"{address['folder']}/segments"))
        self._writer: Any = None
        self._attempt: Any = None
        self._step = 0
        self._space = ""

    def create(self, space: str) -> None:
        self._buffer.create_run(name=space, config={}, seed=0, steps=10**6, pipeline_version="none")

    def open(self, space: str) -> None:
        self._space, self._step = space, 0
        self._writer = self._buffer.writer(space)

    def convert(self, samples: Sequence[Sample]) -> list[Group]:
        return as_groups(samples)

    def put(self, batch: list[Group]) -> None:
        self._writer.insert(*batch)

    def take(self, num: int) -> list[int]:
        if self._attempt is None:
            self._attempt = self._buffer.attempt(self._space)
        self._step += 1
        batch = self._attempt.draw(self._step, num // GROUP_SIZE, COLUMNS)
        token_ids, *_ = (batch.packed(column) for column in COLUMNS)
        return keys_of(token_ids[start:] for start in batch.offsets[:-1])

    def close(self, space: str) -> None:
        if self._attempt is not None:
            self._attempt.close()
        if self._writer is not None:
            self._writer.close()
        self._attempt = self._writer = None


STORE = RftdataBuffer
