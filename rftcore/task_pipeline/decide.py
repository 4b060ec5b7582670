"""Decisions of a chain on a batch of tasks."""

from __future__ import annotations

from operators.chain.chain import Chain
from operators.chain.isolate import decide
from rftcore.task_pipeline.changes import Changes
from rftdata.buffer import Buffer
from rftdata.errors import OperatorError
from rftdata.pipeline.records import Question, Verdicts
from rftdata.pipeline.task_verdicts import TaskBatch, TaskChange, known_task_scores


def decide_batch(
    chain: Chain, buffer: Buffer, batch: TaskBatch, *, rowwise: bool, is_first: bool
) -> tuple[Verdicts, dict[int, TaskChange]]:
    """Decide on a batch; return the verdicts and the changes to tasks.

    Args:
        rowwise: whether every stage decides on each task separately.
        is_first: whether this version has not decided on any task of the set yet.

    Raises:
        StageError: the stage itself is wrong, not a task.
        OperatorError: a stage does something that stages may not do to tasks.
    """
    known = known_task_scores(buffer.database, batch.table["experience_id"].to_pylist(), chain.score_keys)
    changes = Changes(batch)
    verdicts = decide(
        chain,
        batch.table,
        known,
        patient=is_first,
        as_whole=not rowwise,
        min_group_size=1,
        retried=True,
        recorder=changes,
    )
    if verdicts.questions:
        raise _question(chain, verdicts.questions[0])
    if verdicts.groups:
        raise OperatorError(
            "a stage of pipelines.task creates experiences, which only pipelines.experience can store",
            todo="move the stage there",
        )
    return verdicts, changes.kept


def _question(chain: Chain, question: Question) -> OperatorError:
    index = next((stage.index for stage in chain.stages if stage.name == question.stage), 0)
    return OperatorError(
        f"stage {index} of pipelines.task ({question.stage}) waits for a person, which is not possible for tasks",
        todo="exclude tasks by hand: UPDATE rft.task SET status = 'excluded' WHERE …",
    )
