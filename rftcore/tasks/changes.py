"""What the stages of a task pipeline add to tasks and change in them: features and new texts."""

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
from rftdata.pipeline.tasks import TASK_BATCH_SCHEMA, TaskBatch, TaskChange

_FIXED = frozenset(TASK_BATCH_SCHEMA.names) - {"prompt", "answer", "priority"}


class Changes:
    """Records what the stages of each pass add to tasks and change in them (`operators.chain.isolate.Recorder`).

    Attributes:
        kept: the changes of passes that decided, by task id.
    """

    def __init__(self, batch: TaskBatch) -> None:
        self._is_text = dict(zip(batch.table["experience_id"].to_pylist(), batch.is_text))
        self._pending: defaultdict[int, TaskChange] = defaultdict(TaskChange)
        self.kept: dict[int, TaskChange] = {}

    def start(self) -> None:
        """A pass begins; what one before it noted that failed is forgotten."""
        self._pending.clear()

    def watch(self, stage: Stage, before: pa.Table, after: pa.Table, outcome: StageOutcome) -> None:
        """Note what a stage changed.

        Raises:
            OperatorError: a column that says what a task is.
        """
        ids = before["experience_id"].to_pylist()
        stays = outcome.reasons.is_null().to_pylist()
        wanted = stage.operator.writes or frozenset()  # a priority that is set to what it was is set
        for name in outcome.columns:
            # As the chain holds it, not as the stage returned it: of the same type as before.
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
        """The pass decided.

        Raises:
            OperatorError: a stage changed the prompt of a chat, or took a prompt away.
        """
        kept = verdicts.decisions.filter(verdicts.decisions["kept"])
        for task_id in kept["experience_id"].to_pylist():
            texts = self._pending[task_id].texts if task_id in self._pending else {}
            if "prompt" in texts and not (self._is_text[task_id] and texts["prompt"]):
                raise OperatorError(
                    f"a stage of pipelines.task changes the prompt of task {task_id}, which is a chat, or empties it",
                    allowed="prompts that are texts", todo="drop such tasks, or mend them at their source",
                )  # fmt: skip
        self.kept.update(self._pending)


def _fixed_column(stage: Stage, name: str) -> OperatorError:
    return OperatorError(
        f"stage {stage.index} of pipelines.task ({stage.name}) changes {name}",
        allowed="prompt, answer, priority, and columns of its own, which become features",
        todo="give the new column another name",
    )


def _plain(value: Any) -> Any:
    """A feature as JSON holds it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return json.loads(json.dumps(value, default=str))
