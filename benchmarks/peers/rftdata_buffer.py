"""The buffer itself, through its public interface: a writer per producer, and an attempt of a trainer that draws whole groups.

A space is a run without pipeline stages, so experiences can be drawn as soon as they are written. A write is durable when it returns. A draw is
durable, with receipts, fencing, checksums and the reward used, before its arrays are returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rftdata
from benchmarks.harness.store import Store, keys_of
from benchmarks.harness.workload import GROUP_SIZE, Sample
from rftdata import Group, Rollout
from rftdata import Sequence as Experience
from rftdata.config import BufferConfig

COLUMNS = ("token_ids", "loss_mask", "behavior_logprobs")


def as_sequence(sample: Sample, *, parent_id: int | None = None) -> Experience:
    """Return a sample as the buffer takes it."""
    return Experience(
        prompt=sample.prompt,
        response=sample.response,
        token_ids=sample.token_ids,
        num_prompt_tokens=sample.num_prompt_tokens,
        finish_reason="stop",
        reward=sample.reward,
        behavior_logprobs=sample.logprobs[sample.num_prompt_tokens :],
        metrics=sample.metrics,
        parent_id=parent_id,
    )


def as_groups(samples: Sequence[Sample]) -> list[Group]:
    """Return samples as groups of the buffer."""
    groups = []
    for start in range(0, len(samples), GROUP_SIZE):
        some = samples[start : start + GROUP_SIZE]
        rollouts = [Rollout(index, "ok", sample.reward, [as_sequence(sample)]) for index, sample in enumerate(some)]
        groups.append(Group(rollouts, source="import", taskset="benchmark", task_key=str(some[0].group)))
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
