"""Trial of the experience chain on rehearsed rollouts, for `rft check --deep` before a run. Nothing is stored."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from operators.base import Messages, StageContext, UnavailableError
from operators.chain.chain import Chain
from operators.chain.stage_trial import try_stages
from rftcore.workflows.task import Task
from rftdata.experience import Array, Rollout
from rftdata.experience import Sequence as Trained
from rftdata.pipeline.label_columns import without_labels
from rftdata.pipeline.records import BATCH_SCHEMA

_MAX_GROUP_SIZE = 4
_RIGHT, _WRONG = 1.0, 0.0


class RehearsedBatch:
    """Experiences as an explorer would store them: a group of copies for each rehearsed rollout, with another reward in every second copy.

    Args:
        group_size: of the run; at most four copies are made.

    Attributes:
        table: the columns of `BATCH_SCHEMA`.
    """

    def __init__(self, rehearsed: Sequence[tuple[Task, Mapping[str, Any], Rollout]], group_size: int) -> None:
        size = min(group_size, _MAX_GROUP_SIZE)
        self._sequences: list[Trained] = []
        rows = []
        for group_id, (task, features, rollout) in enumerate(rehearsed, start=1):
            for index, (turn_index, sequence) in itertools.product(range(size), _numbered(rollout)):
                reward = rollout.reward
                if index % 2:
                    reward = _WRONG if reward else _RIGHT
                self._sequences.append(replace(sequence, reward=reward))
                rows.append(
                    _row(task, features, self._sequences[-1])
                    | {"experience_id": len(self._sequences), "group_id": group_id, "task_id": group_id}
                    | {"rollout_index": index, "turn_index": turn_index, "group_size": group_size}
                )
        self.table = pa.Table.from_pylist(rows, schema=BATCH_SCHEMA)

    def read_arrays(self, experience_ids: Sequence[int], name: str) -> list[Array | None]:
        """Return an array of each experience, as `Buffer.arrays` does."""
        return [self._array(self._sequences[i - 1], name) for i in experience_ids]

    @staticmethod
    def _array(sequence: Trained, name: str) -> Array | None:
        values = sequence.arrays[name] if name in sequence.arrays else getattr(sequence, name, None)
        return None if values is None else np.asarray(values)


def _numbered(rollout: Rollout) -> Iterator[tuple[int, Trained]]:
    """Yield the sequences of a rollout with the number of their first turn, as the writer counts it."""
    num_turns = 0
    for sequence in rollout.sequences:
        yield sequence.first_turn(num_turns), sequence
        num_turns += sequence.num_turns


def _row(task: Task, features: Mapping[str, Any], sequence: Trained) -> dict[str, Any]:
    return {
        "taskset": task.taskset,
        "answer": task.answer,
        "prompt": sequence.prompt,
        "response": sequence.response,
        "reward": sequence.reward,
        "reward_sampled": sequence.reward,
        "num_prompt_tokens": sequence.num_prompt_tokens,
        "num_response_tokens": len(sequence.token_ids) - sequence.num_prompt_tokens,
        "num_trained_tokens": sequence.num_trained_tokens,
        "num_turns": sequence.num_turns,
        "role": sequence.role,
        "finish_reason": sequence.finish_reason,
        "metrics": json.dumps(sequence.metrics),
        "source": "explorer",
        "messages": None if sequence.messages is None else json.dumps(sequence.messages),
        "reward_parts": json.dumps(sequence.reward_parts),
        "metadata": json.dumps(task.metadata),
        "features": json.dumps(dict(features)),
        "staleness": 0,
        "labelled": False,
    }


def try_rehearsed_chain(chain: Chain, context: StageContext, batch: RehearsedBatch) -> dict[str, str]:
    """Prepare a chain, try its stages, and close it; return the stages that were not tried, with the reason.

    Raises:
        RftError: a stage cannot be prepared, or fails.
    """
    try:
        chain.prepare(replace(context, read_arrays=batch.read_arrays))
        return try_stages(chain, without_labels(batch.table, chain.columns)) if batch.table.num_rows else {}
    finally:
        chain.close()


def refuse_to_generate(chats: Sequence[Messages], max_tokens: int, temperature: float) -> list[str | Exception]:
    """Raise in place of the policy, which a check does not start."""
    raise UnavailableError("it asks the policy")
