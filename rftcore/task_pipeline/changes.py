"""The features and new texts that stages of a task pipeline give to tasks."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from operators.base import StageOutcome
from operators.chain.stage import Stage
from rftdata.errors import OperatorError
from rftdata.pipeline.records import Verdicts
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA, TaskBatch
from rftdata.pipeline.task_verdicts import TaskChange

_FIXED = frozenset(TASK_BATCH_SCHEMA.names) - {"prompt", "answer", "priority"}


class Changes:
    """Records what the stages of each pass add to tasks and change in them (`operators.chain.isolation.Recorder`).

    Attributes:
        kept: the changes of successful passes, by task id.
    """

    def __init__(self, batch: TaskBatch) -> None:
        self._is_text = dict(zip(batch.table["experience_id"].to_pylist(), batch.is_text))
        self._pending: defaultdict[int, TaskChange] = defaultdict(TaskChange)
        self.kept: dict[int, TaskChange] = {}

    def start(self) -> None:
        """Begin a pass, and discard the changes of a failed one before it."""
        self._pending.clear()

    def watch(self, stage: Stage, before: pa.Table, after: pa.Table, outcome: StageOutcome) -> None:
        """Record what a stage changed.

        Raises:
            OperatorError: the stage changed a column other than prompt, answer, priority or a new one.
        """
        ids = before["experience_id"].to_pylist()
        stays = outcome.reasons.is_null().to_pylist()
        wanted = stage.operator.writes or frozenset()  # these count as set even if the value is unchanged
        for name in outcome.columns:
            # The chain's values instead of the stage's, because they have the same type as before.
            values = after[name].to_pylist()
            old: Sequence[Any] = before[name].to_pylist() if name in before.column_names else []
            if name in _FIXED:
                if any(stay and value != was for stay, value, was in zip(stays, values, old)):
                    raise _fixed_column(stage, name)
                continue
            for i, (task_id, stay, value) in enumerate(zip(ids, stays, values)):
                if not stay or (old and value == old[i] and name not in wanted):
                    continue
                if name in ("prompt", "answer"):
                    self._pending[task_id].texts[name] = value
                elif value is not None:
                    self._pending[task_id].features[name] = _plain(value)

    def keep(self, verdicts: Verdicts) -> None:
        """Keep the changes of a pass that decided.

        Raises:
            OperatorError: a stage changed the prompt of a chat, or removed a prompt.
        """
        kept = verdicts.decisions.filter(verdicts.decisions["kept"])
        for task_id in kept["experience_id"].to_pylist():
            texts = self._pending[task_id].texts if task_id in self._pending else {}
            if "prompt" in texts and not (self._is_text[task_id] and texts["prompt"]):
                raise OperatorError(
                    f"a stage of pipelines.task changes the prompt of task {task_id}, which is a chat, or empties it",
                    allowed="prompts that are texts",
                    todo="drop such tasks, or correct them in their source",
                )
        self.kept.update(self._pending)


def _fixed_column(stage: Stage, name: str) -> OperatorError:
    return OperatorError(
        f"stage {stage.index} of pipelines.task ({stage.name}) changes {name}",
        allowed="prompt, answer, priority, and new columns, which become features",
        todo="give the new column another name",
    )


def _plain(value: Any) -> Any:
    """Convert a feature to a value that JSON can represent."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.loads(json.dumps(value, default=str))
