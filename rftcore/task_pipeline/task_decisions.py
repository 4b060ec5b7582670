"""Decisions of a prepared chain on the tasks of loaded sets.

Tasks that the chain has already decided on are skipped. If every stage decides row by row, only new tasks go through it, in batches. If a
stage compares tasks with each other, the whole set goes through it as soon as a task is new. `again` decides on all tasks, since outcomes of
runs may have changed their scores.

A task on which a stage raises (`operators.chain.isolation`) is excluded with the error as its reason, and tried again when the set is
next loaded. A task at which a stage blocks the process is not tried again (`rftcore.task_pipeline.blocking_task`). If every
task raises, or all are excluded, the run is refused, because no task could be selected. It is also refused if an aggregator's endpoint
does not answer at all; then the tasks stay undecided. A task that a stage creates from another becomes a task of the set, and passes the
other stages.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from operators.chain.chain import Chain
from operators.chain.isolation import decide_despite_failures
from rftcore.task_pipeline.blocking_task import setting_aside_blocking_task
from rftcore.task_pipeline.changes import Changes
from rftcore.task_pipeline.sources import of_taskset
from rftdata.buffer import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import OperatorError, TaskSourceError
from rftdata.pipeline.records import Question, Verdicts
from rftdata.pipeline.scores import TASK_SCORES
from rftdata.pipeline.task_batches import TaskBatch, TaskReader
from rftdata.pipeline.task_verdicts import (
    TaskChange,
    commit_task_verdicts,
    decidable_tasks,
    tasks_by_maker,
    taskset_lock,
    undecided_tasks,
)
from rftdata.tasks.stored import taskset_state

BATCH_TASKS = 4096
"""Tasks per batch for stages that look at no other rows; verdicts are stored after each batch."""


@dataclass(frozen=True)
class TasksDecided:
    """The result of a task pipeline on one set.

    Attributes:
        num_decided: tasks that went through the stages in this call.
        num_active, num_excluded: state of the set.
        dropped_by: stage (or `by hand`) -> number of tasks it excludes.
        num_purged: tasks that were purged while they were decided on; nothing of them is stored.
    """

    taskset: str
    num_decided: int
    num_active: int
    num_excluded: int
    dropped_by: dict[str, int]
    num_purged: int = 0

    def __str__(self) -> str:
        dropped = ", ".join(f"{stage}: {number:,}" for stage, number in self.dropped_by.items())
        return (
            f"tasks: {self.taskset}: {self.num_decided:,} decided on; {self.num_active:,} can be selected, "
            f"{self.num_excluded:,} are excluded{f' ({dropped})' if dropped else ''}"
            f"{f'; {self.num_purged:,} were purged meanwhile' if self.num_purged else ''}"
        )


def decide_tasksets(
    chain: Chain, buffer: Buffer, tasksets: Sequence[TasksetConfig], *, again: bool
) -> list[TasksDecided]:
    """Decide on several sets, on each as `decide_tasks` does. An error of one set is raised after the others are decided on."""
    decided, errors = [], []
    for taskset in tasksets:
        try:
            decided.append(decide_tasks(chain, buffer, taskset, again=again))
        except (OperatorError, TaskSourceError) as error:
            errors.append(error)
    for later in errors[1:]:
        print(f"tasks: {later}", file=sys.stderr, flush=True)
    if errors:
        raise errors[0]
    return decided


def decide_tasks(chain: Chain, buffer: Buffer, taskset: TasksetConfig, *, again: bool = False) -> TasksDecided:
    """Run a prepared chain on the tasks of a loaded set that it has not decided on, or with `again` on all of them.

    Raises:
        TaskSourceError: no task of the set is left.
        OperatorError: a stage fails on every task, or on the set as a whole.
    """
    name, num_decided, num_purged = taskset.name, 0, 0
    with taskset_lock(buffer.database, name):
        ids = undecided_tasks(buffer.database, name, chain.version, again=again, failed_too=chain.rowwise)
        reader = TaskReader(buffer.database, name, chain.reads) if ids else None
        # Tasks that a stage creates are decided on next, and do not pass that stage again, so this loop ends.
        while reader is not None and ids:
            try:
                passed, purged = _decide_all(chain, buffer, name, reader, ids, again=again)
                num_decided, num_purged = num_decided + passed, num_purged + purged
            except OperatorError as error:
                raise of_taskset(name, error) from error
            ids = undecided_tasks(buffer.database, name, chain.version)
    state = taskset_state(buffer.database, name)
    done = TasksDecided(name, num_decided, state.active, state.excluded, state.dropped_by or {}, num_purged)
    if not done.num_active:
        by = ", ".join(
            f"{stage}: {number}" for stage, number in sorted(done.dropped_by.items(), key=lambda item: -item[1])
        )
        raise TaskSourceError(
            f"no task of {name!r} is left to select: all {state.num_tasks} are excluded ({by})",
            todo=f"loosen the stages of pipelines.task; `rft tasks show {name}` shows why each was dropped",
        )
    if num_decided:
        print(done, file=sys.stderr, flush=True)
    return done


def _decide_all(
    chain: Chain, buffer: Buffer, taskset: str, reader: TaskReader, ids: list[int], *, again: bool
) -> tuple[int, int]:
    """Decide on these tasks, or on the whole set if stages compare tasks; return their number, and that of tasks purged meanwhile."""
    rowwise = chain.rowwise
    everything = decidable_tasks(buffer.database, taskset, leave_out_blocked_by=None if again else chain.version)
    is_new = len(ids) == len(everything)
    asked = set(ids)
    num_decided = num_purged = 0

    def store_aside(aside: Verdicts) -> None:
        commit_task_verdicts(buffer.database, taskset, chain.version, aside)

    for made_by, members in tasks_by_maker(buffer.database, ids if rowwise else everything).items():
        if not asked.intersection(members):
            continue
        part = chain.passed_by(made_by)
        size = BATCH_TASKS if rowwise else len(members)
        for start in range(0, len(members), size):
            batch = reader.read(members[start : start + size])
            with setting_aside_blocking_task(taskset, batch, store_aside):
                verdicts, changes = _decide_batch(part, buffer, batch, rowwise=rowwise, is_first=is_new and start == 0)
            num_purged += commit_task_verdicts(buffer.database, taskset, chain.version, verdicts, changes)
        num_decided += len(members)
    return num_decided, num_purged


def _decide_batch(
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
    stored_scores = TASK_SCORES.read(buffer.database, chain.score_keys, batch.table["experience_id"].to_pylist())
    changes = Changes(batch)
    verdicts = decide_despite_failures(
        chain,
        batch.table,
        stored_scores,
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
