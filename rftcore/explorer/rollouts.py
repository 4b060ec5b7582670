"""Running rollouts: one boundary where a failure becomes data.

An exception in a workflow or a reward, and a rollout that takes too long, are outcomes that are stored with their error; they
never stop the explorer. Errors of the run itself (its configuration, model or engine) are ours and do: every other rollout would
end in the same way.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from rftcore.explorer.engines.base import Decoding, Engine
from rftcore.explorer.task import Model, Scorer, Task, Workflow
from rftdata.claims import ClaimedGroup
from rftdata.errors import ConfigError, EngineStoppedError, ModelError
from rftdata.groups import Group, Rollout, successes_and_trials
from rftdata.selectors import Screening

_ERRORS_OF_THE_RUN = (ConfigError, ModelError, EngineStoppedError)


@dataclass(frozen=True)
class RolloutRunner:
    """How this run tries a task.

    Attributes:
        timeout_s: a rollout that takes longer, from the moment it begins, is recorded as timed out.
        slots: rollouts that may run at the same time; the others wait, and their time does not count.
    """

    engine: Engine
    workflow: Workflow
    workflow_args: dict[str, Any]
    scorer: Scorer
    timeout_s: float
    source: str
    slots: asyncio.Semaphore

    async def group(self, claimed: ClaimedGroup, decoding: Decoding, screening: Screening | None = None) -> Group:
        """All rollouts of a claimed group, at the same time; with a screening rule, the others only if the first are neither all bad nor
        all good enough.

        A group that is screened out is whole nevertheless: the rollouts it was spared are recorded as cancelled, with the reason.
        """
        task = Task(
            claimed.task_id,
            claimed.taskset,
            claimed.task_key,
            claimed.payload["prompt"],
            claimed.payload.get("answer"),
            claimed.payload.get("metadata") or {},
        )
        size = claimed.group_size
        first = min(screening.rollouts, size) if screening else size
        group = Group(
            await self._rollouts(task, range(first), decoding), claimed.group_id, claimed.claim_token, self.source
        )
        if screening and first < size:
            refusal = screening.refusal(*successes_and_trials(group))
            group.rollouts += (
                await self._rollouts(task, range(first, size), decoding)
                if refusal is None
                else [Rollout(index, "cancelled", error=refusal) for index in range(first, size)]
            )
        return group

    async def _rollouts(self, task: Task, indices: range, decoding: Decoding) -> list[Rollout]:
        return list(await asyncio.gather(*(self.rollout(task, index, decoding) for index in indices)))

    async def rollout(self, task: Task, index: int, decoding: Decoding) -> Rollout:
        """One try and its outcome.

        Raises:
            ConfigError, ModelError, EngineStoppedError: the run cannot go on like this.
        """
        async with self.slots:
            return await self._try(task, index, decoding)

    async def _try(self, task: Task, index: int, decoding: Decoding) -> Rollout:
        model = Model(self.engine, decoding)
        started = time.monotonic()
        outcome, error, score = "ok", None, None
        timeout = asyncio.timeout(self.timeout_s)
        try:
            async with timeout:
                score = await self.workflow(task, model, self.scorer, **self.workflow_args)
        except Exception as raised:  # the boundary: what a user's code raises is data
            if _of_the_run(raised):
                raise
            if timeout.expired():
                outcome, error = "timeout", f"took longer than explorer.rollout_timeout_s = {self.timeout_s} s"
            else:
                outcome, error = "failed", f"{type(raised).__name__}: {raised}"
        sequences = [turn.sequence for turn in model.turns]
        for sequence in sequences:
            # The reward of a rollout is given to each of its turns.
            sequence.reward = score.reward if score else None
            sequence.reward_parts = score.parts if score else {}
        return Rollout(index, outcome, score.reward if score else None, sequences, time.monotonic() - started, error)


def _of_the_run(error: Exception) -> bool:
    if isinstance(error, ExceptionGroup):  # of a workflow with several requests at once
        return error.subgroup(_ERRORS_OF_THE_RUN) is not None
    return isinstance(error, _ERRORS_OF_THE_RUN)
