"""From the batch that was drawn from the buffer to the batch that is trained on.

Inputs that only some algorithms read come from arrays of the experiences (`rftcore.workflows.inputs`) and from the group's greedy
rollout. Every experience that a policy sampled must have the inputs that the algorithm compares; none is replaced by a default value.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import Column
from rftcore.algorithms.inputs import RECORDED_BY
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.workflows.inputs import PER_TOKEN, PER_TURN
from rftdata.attempts import attempt
from rftdata.attempts.batch import Batch
from rftdata.errors import RoleFailedError

ARRAYS = (*attempt.ARRAYS, *PER_TOKEN, *PER_TURN)
_ARRAY_OF: dict[Column, str] = {"step_rewards": "step_reward", "state": "state_hash"}

# One entry per experience, and whether the experience has it.
Numbers = tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a step's experiences: mean reward where there are rewards, largest staleness, mean number of response tokens."""
    if not len(batch):
        return {}
    rewards = batch.rows["reward"].drop_null().to_pylist()
    return {
        **({"reward": sum(rewards) / len(rewards)} if rewards else {}),
        "staleness": max(batch.rows["staleness"].to_pylist()),
        "response_tokens": sum(batch.rows["num_response_tokens"].to_pylist()) / len(batch),
    }


def train_batch(batch: Batch, algorithm: Algorithm) -> TrainBatch:
    """Convert a drawn batch for the learner.

    Raises:
        RoleFailedError: an experience without a reward or another input that the algorithm reads, or an array of another size.
    """
    offsets = batch.offsets
    missing = [row["experience_id"] for row in batch.rows.to_pylist() if row["reward"] is None]
    if missing and algorithm.uses_rewards:
        raise RoleFailedError(
            f"experience {missing[0]} was drawn without a reward",
            todo="set its reward, or add a stage that drops such rows",
        )
    tokens: dict[str, Any] = {name: (partial(batch.padded, name), offsets) for name in PER_TOKEN if batch.has(name)}
    columns = {
        column: _one_each(batch, column) for column in (*sorted(algorithm.columns), *sorted(algorithm.optional_columns))
    }
    present = {column: numbers for column, numbers in columns.items() if numbers[1].any()}
    names = _reward_names(batch) if "reward_parts" in present else ()
    trained = pad_batch(
        PackedColumns(
            token_ids=(partial(batch.padded, "token_ids"), offsets),
            loss_mask=(partial(batch.padded, "loss_mask"), offsets),
            behavior_logprobs=(partial(batch.padded, "behavior_logprobs"), offsets),
            rewards=[math.nan if reward is None else reward for reward in batch.rows["reward"].to_pylist()],
            group_ids=batch.rows["group_id"].to_pylist(),
            rollout_index=batch.rows["rollout_index"].to_pylist(),
            turn_index=batch.rows["turn_index"].to_pylist(),
            importance_weights=batch.rows["importance_weight"].to_pylist(),
            paired=algorithm.draws_pairs,
            reward_names=names,
            **tokens,
            **{column: values for column, (values, _) in present.items()},  # type: ignore[arg-type]  # columns have the names of arguments
        )
    )
    for column, (_, is_present) in columns.items():
        if column in present or column in algorithm.columns:
            _refuse_missing(batch, algorithm, trained, column, torch.from_numpy(is_present))
    return trained


def _one_each(batch: Batch, column: Column) -> Numbers:
    """Return one value per experience, 0 where it has none."""
    if column == "reward_parts":
        return _reward_parts(batch)
    name = _ARRAY_OF.get(column)
    if name is None:
        values = batch.rows["baseline_reward"].to_pylist()
    else:
        values = _items(batch, name) if batch.has(name) else [None] * len(batch)
    return np.array([0 if value is None else value for value in values]), np.array(
        [value is not None for value in values]
    )


def _reward_names(batch: Batch) -> tuple[str, ...]:
    """Return the names of all rewards in the batch."""
    return tuple(sorted({name for parts in batch.rows["reward_parts"].to_pylist() for name, _ in parts}))


def _reward_parts(batch: Batch) -> Numbers:
    """Return the rewards of each experience by name, [B, K]; an experience that lacks one of the names counts as without rewards."""
    names, rows = _reward_names(batch), [dict(parts) for parts in batch.rows["reward_parts"].to_pylist()]
    values = [[row.get(name, 0.0) for name in names] for row in rows]
    rewards = np.array(values, dtype=np.float64).reshape(len(rows), len(names))
    return rewards, np.array([bool(names) and row.keys() == set(names) for row in rows], dtype=np.bool_)


def _items(batch: Batch, name: str) -> list[Any]:
    """Return the value of each experience's array, None where it has none."""
    values = batch.arrays(name)
    for experience_id, value in zip(batch.rows["experience_id"].to_pylist(), values, strict=True):
        if value is not None and value.size != 1:
            raise RoleFailedError(
                f"the array {name!r} of experience {experience_id} has not one value",
                value=value.size,
                allowed="1",
                todo="store it as an array of one number",
            )
    return [None if value is None else value.item() for value in values]


def _refuse_missing(
    batch: Batch, algorithm: Algorithm, trained: TrainBatch, column: Column, present_B: torch.Tensor
) -> None:
    """Refuse experiences without an input that the algorithm compares; experiences of an expert need none where experts have a loss of their own."""
    needed_B = ~trained.expert_B if algorithm.expert is not None else torch.ones(len(batch), dtype=torch.bool)
    rows = (needed_B & ~present_B).nonzero().flatten().tolist()
    if rows:
        what, how = RECORDED_BY[column]
        raise RoleFailedError(
            f"{len(rows)} of {len(batch)} experiences of step {batch.step} have no {column.replace('_', ' ')} ({what}), which "
            f"{algorithm.name} reads; the first is experience {batch.rows['experience_id'][rows[0]].as_py()}",
            todo=how,
        )
