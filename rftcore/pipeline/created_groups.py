"""Storage of experiences that stages created: their tokens and tasks, with a receipt for each group."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from operators.base import CreatedGroup
from rftcore.algorithms.compatibility import check_answers
from rftcore.resolved import ResolvedRun
from rftcore.workflows.chats import written_sequence
from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError, DiskFullError, RftError
from rftdata.experience import Group, Rollout
from rftdata.pipeline.records import StageRun
from rftdata.pipeline.verdicts import add_features, task_of_experience
from rftdata.writing.writer import Writer

_SYNTHESIS = uuid.UUID("5f0c7f5e-6a3b-4b3f-9d57-0f6f6d2c1f11")


class CreatedGroups:
    """Stores groups that stages created, each once, with their tasks."""

    def __init__(self, resolved: ResolvedRun, buffer: Buffer, writer: Writer) -> None:
        self._resolved = resolved
        self._database = buffer.database
        self._writer = writer
        self._tokenizer: Any = None

    def store(self, created: Sequence[CreatedGroup]) -> list[StageRun]:
        """Store groups. A group that cannot be stored is recorded as an error, and the others are stored."""
        refused = []
        for group in created:
            # There is one group per parent and key, however often a worker creates it.
            name = group.key if group.task is None else f"{group.task.taskset}/{group.task.task_key}"
            receipt = uuid.uuid5(_SYNTHESIS, f"{self._writer.run_id}/{group.parent_id}/{name}")
            try:
                self._writer.insert(self._group(group), receipt=receipt)
                if group.task is not None:
                    # The task was created with its group, so a task whose group cannot be stored is never sampled.
                    add_features(self._database, group.task)
            except (BufferUnavailableError, DiskFullError):
                raise
            except (RftError, TypeError, ValueError) as error:
                why = f"the group created from experience {group.parent_id} cannot be stored: {error}"
                refused.append(StageRun("created", 0, 1, 0, 1, 0.0, error=why[:500]))
        return refused

    def _group(self, group: CreatedGroup) -> Group:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self._resolved.model_folder)
        smallest = self._resolved.config.algorithm.smallest_group
        check_answers(self._resolved.algorithm, smallest, len(group.answers))
        rollouts = []
        for index, answer in enumerate(group.answers):
            sequence = written_sequence(
                self._tokenizer, [dict(message) for message in answer.messages], answer.response
            )
            sequence.reward, sequence.parent_id = answer.reward, group.parent_id
            sequence.metrics = dict(answer.metrics)
            rollouts.append(Rollout(index, "ok", answer.reward, [sequence]))
        task = group.task
        if task is None:
            return Group(rollouts, source="synthesis", **self._task_of(group.parent_id))
        return Group(
            rollouts, source="synthesis", taskset=task.taskset, task_key=task.task_key, payload=dict(task.payload)
        )

    def _task_of(self, experience_id: int) -> dict[str, Any]:
        task = task_of_experience(self._database, experience_id)
        if task is None:
            raise RftError("the experience no longer exists, so its task is unknown", value=experience_id)
        taskset, task_key = task
        return {"taskset": taskset, "task_key": task_key}
