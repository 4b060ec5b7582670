"""Running rollouts: one boundary where a failure becomes data.

An exception in a workflow or a reward, and a rollout that takes too long, are outcomes that are stored with their error; they
never stop the explorer. Errors of the buffer or the engine are ours and do.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from rftcore.explorer.engines.base import Decoding, Engine
from rftcore.explorer.task import Model, Scorer, Task, Workflow
from rftdata.claims import ClaimedGroup
from rftdata.errors import ConfigError, ModelError
from rftdata.writer import Group, Rollout


@dataclass(frozen=True)
class RolloutRunner:
    """How this run tries a task."""

    engine: Engine
    workflow: Workflow
    workflow_args: dict[str, Any]
    scorer: Scorer
    timeout_s: float
    source: str

    async def group(self, claimed: ClaimedGroup, decoding: Decoding) -> Group:
        """All rollouts of a claimed group, at the same time."""
        task = Task(
            claimed.task_id,
            claimed.taskset,
            claimed.task_key,
            claimed.payload["prompt"],
            claimed.payload.get("answer"),
            claimed.payload.get("metadata") or {},
        )
        rollouts = await asyncio.gather(*(self.rollout(task, index, decoding) for index in range(claimed.group_size)))
        return Group(list(rollouts), claimed.group_id, claimed.claim_token, self.source)

    async def rollout(self, task: Task, index: int, decoding: Decoding) -> Rollout:
        """One try and its outcome."""
        model = Model(self.engine, decoding)
        started = time.monotonic()
        outcome, error, score = "ok", None, None
        try:
            async with asyncio.timeout(self.timeout_s):
                score = await self.workflow(task, model, self.scorer, **self.workflow_args)
        except TimeoutError:
            outcome, error = "timeout", f"took longer than explorer.rollout_timeout_s = {self.timeout_s} s"
        except (ConfigError, ModelError):
            raise  # of this run, not of this rollout: every other one would fail in the same way
        except Exception as raised:  # noqa: BLE001 - the boundary: what a user's code raises is data
            outcome, error = "failed", f"{type(raised).__name__}: {raised}"
        sequences = [turn.sequence for turn in model.turns]
        for sequence in sequences:
            # The reward of a rollout is given to each of its turns.
            sequence.reward = score.reward if score else None
            sequence.reward_parts = score.parts if score else {}
        return Rollout(index, outcome, score.reward if score else None, sequences, time.monotonic() - started, error)
