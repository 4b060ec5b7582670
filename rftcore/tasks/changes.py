"""What the stages of a task pipeline add to tasks and change in them: features, new texts, tasks made of others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from operators.base import CreatedTask, StageOutcome
from operators.chain.chain import ChainResult
from operators.chain.stage import Stage
from rftdata.errors import OperatorError
from rftdata.pipeline.tasks import TASK_BATCH_SCHEMA, MadeTask, TaskBatch, TaskDecision

_FIXED = frozenset(TASK_BATCH_SCHEMA.names) - {"prompt", "answer", "priority"}


@dataclass
class Changes:
    """What the stages add to tasks and change in them, collected while they run."""

    batch: TaskBatch
    features: dict[int, dict[str, Any]] = field(default_factory=dict)
    texts: dict[int, dict[str, str | None]] = field(default_factory=dict)
    made: list[MadeTask] = field(default_factory=list)

    def watch(self, stage: Stage, before: pa.Table, after: pa.Table, outcome: StageOutcome) -> None:
        self.made += [
            MadeTask(made.taskset, made.task_key, made.payload, made.features, made.parent_id, stage.name)
            for made in outcome.created
            if isinstance(made, CreatedTask)
        ]
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
                    self.texts.setdefault(task_id, {})[name] = value
                elif value is not None:
                    self.features.setdefault(task_id, {})[name] = _plain(value)

    def decisions(self, result: ChainResult) -> list[TaskDecision]:
        """One per task, in the order of the batch.

        Raises:
            OperatorError: a stage changed the prompt of a chat, or took a prompt away.
        """
        is_text = dict(zip(self.batch.table["experience_id"].to_pylist(), self.batch.is_text))
        made = []
        for row in result.decisions.select(["experience_id", "kept", "stage", "reason"]).to_pylist():
            task_id = row.pop("experience_id")
            texts = self.texts.get(task_id, {}) if row["kept"] else {}
            if "prompt" in texts and not (is_text[task_id] and texts["prompt"]):
                raise OperatorError(
                    f"a stage of pipelines.task changes the prompt of task {task_id}, which is a chat, or empties it",
                    allowed="prompts that are texts", todo="drop such tasks, or mend them at their source",
                )  # fmt: skip
            made.append(
                TaskDecision(
                    task_id, **row, features=self.features.get(task_id, {}), prompt=texts.get("prompt"), answer=texts.get("answer"),
                    answer_changed="answer" in texts,
                )
            )  # fmt: skip
        return made


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
