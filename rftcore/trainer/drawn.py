"""From the batch that was drawn from the buffer to the batch that is trained on."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from rftcore.algorithms.algorithm import Algorithm
from rftcore.trainer.batches import TrainBatch
from rftdata.errors import RoleFailedError
from rftdata.training import attempt
from rftdata.training.batch import Batch

# Arrays that experiences may bring, and that some algorithms read: one value per token, and one value alone.
_TOKEN_ARRAYS = ("token_rewards", "teacher_logprobs")
_NUMBERS = {"step_rewards": "step_reward", "state": "state_hash", "baseline_rewards": "baseline_reward"}
ARRAYS = (*attempt.ARRAYS, *_TOKEN_ARRAYS, *_NUMBERS.values())


def train_batch(batch: Batch, algorithm: Algorithm) -> TrainBatch:
    """A drawn batch as the learner takes it.

    Raises:
        RoleFailedError: an experience without a reward where the algorithm uses rewards, or an array of another size.
    """
    offsets = batch.offsets
    missing = [row["experience_id"] for row in batch.rows.to_pylist() if row["reward"] is None]
    if missing and algorithm.uses_rewards:
        raise RoleFailedError(
            f"experience {missing[0]} was drawn without a reward",
            todo="set its reward, or add a stage that drops such rows",
        )
    tokens: dict[str, Any] = {name: (partial(batch.padded, name), offsets) for name in _TOKEN_ARRAYS if batch.has(name)}
    numbers: dict[str, Any] = {key: _one_each(batch, name) for key, name in _NUMBERS.items() if batch.has(name)}
    return TrainBatch.from_packed(
        token_ids=(partial(batch.padded, "token_ids"), offsets),
        loss_mask=(partial(batch.padded, "loss_mask"), offsets),
        behavior_logprobs=(partial(batch.padded, "behavior_logprobs"), offsets),
        rewards=[math.nan if reward is None else reward for reward in batch.rows["reward"].to_pylist()],
        group_ids=batch.rows["group_id"].to_pylist(),
        rollout_index=batch.rows["rollout_index"].to_pylist(),
        turn_index=batch.rows["turn_index"].to_pylist(),
        importance_weights=batch.rows["importance_weight"].to_pylist(),
        paired=algorithm.pairwise,
        **tokens,
        **numbers,
    )


def _one_each(batch: Batch, name: str) -> npt.NDArray[Any]:
    """The one value of each experience's array, 0 where it has none."""
    values = batch.arrays(name)
    for experience_id, value in zip(batch.rows["experience_id"].to_pylist(), values, strict=True):
        if value is not None and value.size != 1:
            raise RoleFailedError(
                f"the array {name!r} of experience {experience_id} has not one value", value=value.size, allowed="1",
                todo="store it as an array of one number",
            )  # fmt: skip
    return np.array([0 if value is None else value.item() for value in values])
