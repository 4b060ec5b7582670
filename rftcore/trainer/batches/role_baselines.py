"""The running mean reward of each role, which the advantage `rae` subtracts, along the steps of one attempt.

The baselines are read once, as the last step of the attempt's history left them, and advanced when a step begins: with the rewards that it trains on, in the
order of its batch. They are stored in the transaction that records the step, so each trained rollout advances them exactly once on every history.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from rftcore.algorithms.advantages.rae import RAE
from rftcore.algorithms.algorithm import Algorithm
from rftcore.trainer.batches.train_batch import TrainBatch
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.batch import Batch
from rftdata.attempts.role_baselines import RoleBaseline

_Rollout = tuple[int, int, str]


class RoleBaselines:
    """The baselines of a run's roles; of none if its algorithm reads none."""

    def __init__(self, attempt: Attempt, algorithm: Algorithm) -> None:
        self._decay = algorithm.advantage.config.decay if isinstance(algorithm.advantage, RAE) else None
        self._has_experts = algorithm.expert is not None
        self._known = {} if self._decay is None else attempt.role_baselines()

    def advance(self, drawn: Batch, batch: TrainBatch) -> tuple[TrainBatch, list[RoleBaseline]]:
        """Return the batch of a step with the baselines before each rollout, and the baselines that the step has advanced.

        Rollouts without a token that counts, and those that an expert wrote where experts have a loss of their own, advance nothing.
        """
        if self._decay is None:
            return batch, []
        rollouts = _rollouts(drawn)
        counted = batch.loss_mask_BT.any(dim=1) & ~(batch.expert_B & self._has_experts)
        before = torch.zeros(batch.num_experiences)
        advanced: dict[tuple[str, str], RoleBaseline] = {}
        for (_, _, role), rows in rollouts.items():
            key = (drawn.rows["taskset"][rows[0]].as_py(), role)
            known = self._known.get(key) or RoleBaseline(taskset=key[0], role=role)
            before[rows] = known.baseline
            if bool(counted[rows].any()):
                self._known[key] = advanced[key] = known.advanced(_reward(batch, rows), self._decay)
        return replace(batch, role_baselines_B=before), list(advanced.values())


def _rollouts(drawn: Batch) -> dict[_Rollout, list[int]]:
    """Return the rows of each rollout's role, in the order of the batch."""
    found: dict[_Rollout, list[int]] = {}
    columns = (drawn.rows[name].to_pylist() for name in ("group_id", "rollout_index", "role"))
    for row, (group_id, index, role) in enumerate(zip(*columns, strict=True)):
        found.setdefault((group_id, index, role or ""), []).append(row)
    return found


def _reward(batch: TrainBatch, rows: list[int]) -> float:
    """Return the reward of the rows of a rollout: that of the row with its last turn, with the rewards of the tokens of all."""
    last = max(rows, key=lambda row: int(batch.turn_BA[row].max()))
    reward = float(batch.rewards_B[last])
    if batch.token_rewards_BT is not None:
        reward += float((batch.token_rewards_BT[rows].double() * batch.loss_mask_BT[rows]).sum())
    return reward
