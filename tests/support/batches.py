"""Batches of whole groups for the tests of pipeline stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from operators.base import BATCH_SCHEMA
from operators.chain.chain import Chain
from rftdata.pipeline.scores import StageScores, StoredScore
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA
from rftdata.postgres.values import storable


def batch_of_groups(*groups: Sequence[float | None], **columns: Sequence[object]) -> pa.Table:
    """One row per reward; `batch_of_groups([0, 1], [1, 1])` is two groups of two rollouts. Columns override defaults."""
    rows = [(group, index, reward) for group, rewards in enumerate(groups) for index, reward in enumerate(rewards)]
    values: Mapping[str, Sequence[object]] = {
        "experience_id": [100 + row for row in range(len(rows))],
        "group_id": [group for group, _, _ in rows],
        "rollout_index": [index for _, index, _ in rows],
        "turn_index": [0] * len(rows),
        "task_id": [7 + group for group, _, _ in rows],
        "taskset": ["sums"] * len(rows),
        "answer": ["4"] * len(rows),
        "prompt": ["What is 2 + 2?"] * len(rows),
        "response": [f"The answer of rollout {index} is four." for _, index, _ in rows],
        "reward": [reward for _, _, reward in rows],
        "reward_sampled": [reward for _, _, reward in rows],
        "num_prompt_tokens": [8] * len(rows),
        "num_response_tokens": [9] * len(rows),
        "num_trained_tokens": [9] * len(rows),
        "num_turns": [1] * len(rows),
        "role": [None] * len(rows),
        "finish_reason": ["stop"] * len(rows),
        "metrics": ["{}"] * len(rows),
        "source": ["explorer"] * len(rows),
        **columns,
    }
    schema = pa.schema([field for field in BATCH_SCHEMA if field.name in values])
    return pa.table({name: pa.array(values[name], schema.field(name).type) for name in schema.names}, schema=schema)


def batch_of_tasks(*prompts: str, **columns: Sequence[object]) -> pa.Table:
    """One row per task; columns not given are empty."""
    ids = range(len(prompts))
    values: Mapping[str, Sequence[object]] = {
        "experience_id": ids,
        "group_id": ids,
        "task_id": ids,
        "rollout_index": [0] * len(ids),
        "taskset": ["sums"] * len(ids),
        "task_key": [f"k{n}" for n in ids],
        "prompt": prompts,
        **columns,
    }
    empty = [None] * len(ids)
    return pa.table(
        [pa.array(values.get(field.name, empty), field.type) for field in TASK_BATCH_SCHEMA], TASK_BATCH_SCHEMA
    )


def stored(scores: Sequence[StageScores]) -> dict[str, dict[int, StoredScore]]:
    """Return these scores as a chain receives them the next time."""
    known: dict[str, dict[int, StoredScore]] = {}
    for found in scores:
        for row, digest in zip(found.table.to_pylist(), found.input_digests.to_pylist()):
            if digest is not None:
                known.setdefault(found.score_key, {})[row.pop("experience_id")] = StoredScore(digest, storable(row))
    return known


def replaced(
    chain: Chain, table: pa.Table, values: Mapping[int, Mapping[str, object]]
) -> dict[str, dict[int, StoredScore]]:
    """Stored scores of these experiences and no others by the first scoring stage of a chain, with values that it did not compute."""
    scores = chain.run(table).scores[0]
    known = stored([scores])[scores.score_key]
    return {scores.score_key: {key: StoredScore(known[key].input_digest, values[key]) for key in values}}
