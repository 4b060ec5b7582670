"""New experiences that stages made, on their way into the buffer: tokens, tasks, and a receipt for each group."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from operators.base import CreatedGroup
from rftcore.config import RunConfig
from rftcore.explorer.task import written_sequence
from rftcore.launch.prepare import model_folder
from rftcore.pipeline.deciding import new_task
from rftdata.buffer import Buffer
from rftdata.errors import BufferUnavailableError, DiskFullError, RftError
from rftdata.groups import Group, Rollout
from rftdata.verdicts import StageCount, make_tasks
from rftdata.writer import Writer

_SYNTHESIS = uuid.UUID("5f0c7f5e-6a3b-4b3f-9d57-0f6f6d2c1f11")


class Created:
    """Stores groups that stages made, each once, with their tasks."""

    def __init__(self, config: RunConfig, buffer: Buffer, writer: Writer) -> None:
        self._config = config
        self._buffer = buffer
        self._writer = writer
        self._tokenizer: Any = None

    def store(self, created: Sequence[CreatedGroup]) -> list[StageCount]:
        """Store groups; one that cannot be stored is noted as an error of its own, and the others go on."""
        refused = []
        for made in created:
            # Of one parent and key there is one group, however often a worker comes to make it.
            key = f"{self._writer.run_id}/{made.parent_id}/{made.task.taskset}/{made.task.task_key}"
            try:
                group = self._group(made)
                with self._buffer.database.transaction() as connection:
                    make_tasks(connection, [new_task(made.task)])
                self._writer.insert(group, receipt=uuid.uuid5(_SYNTHESIS, key))
            except (BufferUnavailableError, DiskFullError):
                raise
            except (RftError, TypeError, ValueError) as error:
                why = f"the group made of experience {made.parent_id} cannot be stored: {error}"
                refused.append(StageCount(0, "created", 1, 0, 1, 0, 0.0, why[:500]))
        return refused

    def _group(self, made: CreatedGroup) -> Group:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(model_folder(self._config))
        rollouts = []
        for index, answer in enumerate(made.answers):
            sequence = written_sequence(
                self._tokenizer, [dict(message) for message in answer.messages], answer.response
            )
            sequence.reward, sequence.parent_id = answer.reward, made.parent_id
            rollouts.append(Rollout(index, "ok", answer.reward, [sequence]))
        task = made.task
        return Group(
            rollouts, source="synthesis", taskset=task.taskset, task_key=task.task_key, payload=dict(task.payload)
        )
