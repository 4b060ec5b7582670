"""From the batch that was drawn from the buffer to the batch that is trained on.

Inputs that only some algorithms read come from arrays of the experiences (`rftcore.workflows.inputs`) and from the group's greedy
rollout. An experience without the array `turns` is one turn, as all were in older buffers. Every experience that a policy sampled must have
the inputs that the algorithm compares; none is replaced by a default value.
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
from rftdata.experience import TURNS

ARRAYS = (*attempt.ARRAYS, *PER_TOKEN, *PER_TURN, TURNS)
# Columns that are known only when the step begins (`rftcore.trainer.batches.role_baselines`).
OF_THE_STEP: frozenset[Column] = frozenset({"role_baselines"})
_ARRAY_OF: dict[Column, str] = {"step_rewards": "step_reward", "state": "state_hash"}

# One entry per experience, or per turn of each, and whether the experience has it.
Numbers = tuple[npt.NDArray[Any] | list[npt.NDArray[Any]], npt.NDArray[np.bool_]]


def batch_metrics(batch: Batch) -> dict[str, float]:
    """Return the metrics of a step's experiences: mean reward where there are rewards, largest staleness, mean number of trained response tokens."""
    if not len(batch):
        return {}
    rewards = batch.rows["reward"].drop_null().to_pylist()
    return {
        **({"reward": sum(rewards) / len(rewards)} if rewards else {}),
        "staleness": max(batch.rows["staleness"].to_pylist()),
        "response_tokens": sum(batch.rows["num_trained_tokens"].to_pylist()) / len(batch),
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
    _refuse_roles_without_a_baseline(batch, algorithm)
    tokens: dict[str, Any] = {name: (partial(batch.padded, name), offsets) for name in PER_TOKEN if batch.has(name)}
    turns = turns_of(batch)
    columns = {
        column: _numbers(batch, column, turns)
        for column in (*sorted(algorithm.columns - OF_THE_STEP), *sorted(algorithm.optional_columns))
    }
    present = {column: numbers for column, numbers in columns.items() if numbers[1].any()}
    names = _reward_names(batch) if "reward_parts" in present else ()
    trained = pad_batch(
        PackedColumns(
            token_ids=(partial(batch.padded, "token_ids"), offsets),
            loss_mask=(partial(batch.padded, "loss_mask"), offsets),
            behavior_logprobs=(partial(batch.padded, "behavior_logprobs"), offsets),
            rewards=[math.nan if reward is None else reward for reward in batch.rows["reward"].to_pylist()],
            group_ids=_compared_groups(batch),
            rollout_index=batch.rows["rollout_index"].to_pylist(),
            turns=turns,
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


def _refuse_roles_without_a_baseline(batch: Batch, algorithm: Algorithm) -> None:
    roles = batch.rows["role"].drop_null()
    if "baseline_rewards" in algorithm.columns and len(roles):
        raise RoleFailedError(
            f"{algorithm.name} compares a rollout with the greedy one of its group, which has one reward for all roles",
            value=roles[0].as_py(),
            allowed="workflows of one role",
            todo="name an algorithm that compares each role with itself, such as rae or grpo",
        )


def _compared_groups(batch: Batch) -> npt.NDArray[np.int64]:
    """Number the groups whose rollouts algorithms compare, [B]: each role of a group is a group of its own."""
    group_ids = np.asarray(batch.rows["group_id"], np.int64)
    if batch.rows["role"].null_count == len(batch):
        return group_ids
    numbers: dict[tuple[int, str | None], int] = {}
    keys = zip(group_ids.tolist(), batch.rows["role"].to_pylist(), strict=True)
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def turns_of(batch: Batch) -> list[npt.NDArray[Any]]:
    """Return the turns of each experience, int [K, 3]: first token, token after the last, and number in its rollout."""
    found = batch.arrays(TURNS) if batch.has(TURNS) else [None] * len(batch)
    numbers, starts = batch.rows["turn_index"].to_pylist(), batch.rows["num_prompt_tokens"].to_pylist()
    whole = zip(starts, batch.lengths.tolist(), numbers, strict=True)
    return [np.array([one]) if turns is None else turns for turns, one in zip(found, whole, strict=True)]


def _numbers(batch: Batch, column: Column, turns: list[npt.NDArray[Any]]) -> Numbers:
    """Return one value per experience, or per turn of each, 0 where it has none."""
    if column == "reward_parts":
        return _reward_parts(batch)
    name = _ARRAY_OF.get(column)
    if name is not None:
        values = _per_turn(batch, name, turns) if batch.has(name) else [None] * len(batch)
        is_present = np.array([value is not None for value in values])
        return [
            np.zeros(len(of)) if value is None else value for value, of in zip(values, turns, strict=True)
        ], is_present
    rewards = batch.rows["baseline_reward"].to_pylist()
    return np.array([0 if reward is None else reward for reward in rewards]), np.array(
        [reward is not None for reward in rewards]
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


def _per_turn(batch: Batch, name: str, turns: list[npt.NDArray[Any]]) -> list[npt.NDArray[Any] | None]:
    """Return the array of each experience, with one value per turn; None where it has none."""
    values = batch.arrays(name)
    for experience_id, value, of in zip(batch.rows["experience_id"].to_pylist(), values, turns, strict=True):
        if value is not None and value.shape != (len(of),):
            raise RoleFailedError(
                f"the array {name!r} of experience {experience_id} has not one value per turn",
                value=list(value.shape),
                allowed=f"{len(of)} values",
                todo="store one number for each turn of the experience",
            )
    return values


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
