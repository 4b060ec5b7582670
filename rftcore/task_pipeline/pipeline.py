"""`pipelines.task`: the chain that tasks pass before they can be selected.

It runs when tasks are loaded (`rft run`, `rft tasks load`). Tasks that the chain has already decided on are skipped: if every stage
decides row by row, only new tasks go through it, in batches. If a stage compares tasks with each other, the whole set does as soon as
a task is new. `again` decides on all of them, since outcomes of runs may have changed their scores.

A task on which a stage raises (`operators.chain.isolate`) is excluded with the error as its reason, and tried again when the set is
next loaded. A task at which a stage blocks the process is not tried again (`rftcore.task_pipeline.blocking_task`). If every
task raises, or all are excluded, the run is refused, because no task could be selected. It is also refused if an aggregator's endpoint
does not answer at all; then the tasks stay undecided. A task that a stage creates from another becomes a task of the set, and passes the
other stages.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from operators.base import StageContext
from operators.chain.chain import Chain
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.blocking_task import setting_aside
from rftcore.task_pipeline.decide import decide_batch
from rftcore.task_pipeline.embeddings import TaskEmbeddings
from rftcore.task_pipeline.needs import TaskNeeds
from rftcore.task_pipeline.sources import check_tasks, of_taskset
from rftdata.buffer import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import OperatorError, TaskSourceError
from rftdata.pipeline.records import Verdicts
from rftdata.pipeline.task_verdicts import (
    TASK_BATCH_SCHEMA,
    TaskReader,
    commit_task_verdicts,
    decidable_tasks,
    register_task_pipeline,
    source_batch,
    tasks_by_maker,
    taskset_lock,
    taskset_state,
    undecided_tasks,
)
from rftdata.tasks.loading import load_taskset, taskset_texts
from rftdata.tasks.rows import read_tasks

BATCH_TASKS = 4096
"""Tasks per batch for stages that look at no other rows; verdicts are stored after each batch."""


@dataclass(frozen=True)
class TasksDecided:
    """The result of a task pipeline on one set.

    Attributes:
        num_decided: tasks that went through the stages in this call.
        num_active, num_excluded: state of the set.
        dropped_by: stage (or `by hand`) -> number of tasks it excludes.
    """

    taskset: str
    num_decided: int
    num_active: int
    num_excluded: int
    dropped_by: dict[str, int]


def load_tasks(resolved: ResolvedRun, buffer: Buffer, *, again: bool = False) -> list[TasksDecided]:
    """Load every taskset of a configuration, and decide on those that are trained on. Evaluations use their tasks unchanged.

    Nothing is stored before the first rows of all sources have been checked. If a stage cannot decide on one set, the others are still
    decided on.

    Raises:
        TaskSourceError: a taskset cannot be loaded, has no task left, or lacks what the rewards and the workflow need.
        PluginError, ConfigError, OperatorError, ModelError: a stage cannot work.
    """
    config, chain = resolved.config, resolved.task_chain
    check_tasks(resolved, buffer)
    needs = {taskset.name: TaskNeeds(resolved, taskset, chain) for taskset in config.tasks}
    for taskset in config.tasks:
        load_taskset(buffer.database, taskset, config.base_dir, pending=bool(chain.stages), check=needs[taskset.name])
    for taskset in (*config.eval.tasks, *config.eval.test):
        needs[taskset.name] = TaskNeeds(resolved, taskset, None)
        load_taskset(buffer.database, taskset, config.base_dir, check=needs[taskset.name])
    decided = _run_chain(resolved, buffer, again=again) if chain.stages else []
    for name, need in needs.items():
        for sentence in need.stored(buffer):
            print(f"tasks: {name}: {sentence}", file=sys.stderr, flush=True)
    return decided


def _run_chain(resolved: ResolvedRun, buffer: Buffer, *, again: bool) -> list[TasksDecided]:
    chain = resolved.task_chain
    register_task_pipeline(
        buffer.database, chain.version, [{stage.name: stage.operator.spec()} for stage in chain.stages]
    )
    _prepare(resolved, buffer)
    try:
        return _decide_sets(chain, buffer, resolved.config.tasks, again=again)
    finally:
        chain.close()


def _decide_sets(chain: Chain, buffer: Buffer, tasksets: Sequence[TasksetConfig], *, again: bool) -> list[TasksDecided]:
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


def task_batches(resolved: ResolvedRun, buffer: Buffer, limit: int) -> Iterator[tuple[str, pa.Table]]:
    """Yield the first `limit` tasks of every taskset as the chain would see them, for a preview; prepares the chain.

    Nothing is stored. Sets that are not loaded yet are read from their sources, with ids from 1.
    """
    config, chain = resolved.config, resolved.task_chain
    _prepare(resolved, buffer, keep_vectors=False)
    for taskset in config.tasks:
        ids = decidable_tasks(buffer.database, taskset.name)[:limit]
        if ids:
            yield taskset.name, TaskReader(buffer.database, taskset.name, _columns(chain)).read(ids).table
        else:
            tasks = itertools.islice(read_tasks(taskset, config.base_dir, buffer.database), limit)
            yield taskset.name, source_batch(taskset.name, list(tasks))


def decide_tasks(chain: Chain, buffer: Buffer, taskset: TasksetConfig, *, again: bool = False) -> TasksDecided:
    """Run a prepared chain on the tasks of a loaded set that it has not decided on, or with `again` on all of them.

    Raises:
        TaskSourceError: no task of the set is left.
        OperatorError: a stage fails on every task, or on the set as a whole.
    """
    name, num_decided = taskset.name, 0
    with taskset_lock(buffer.database, name):
        ids = undecided_tasks(buffer.database, name, chain.version, again=again, failed_too=_is_rowwise(chain))
        if ids:
            reader = TaskReader(buffer.database, name, _columns(chain))
            # Tasks that a stage creates are decided on next, and do not pass that stage again, so this loop ends.
            while ids:
                try:
                    num_decided += _decide_all(chain, buffer, name, reader, ids, again=again)
                except OperatorError as error:
                    raise of_taskset(name, error) from error
                ids = undecided_tasks(buffer.database, name, chain.version)
    state = taskset_state(buffer.database, name)
    done = TasksDecided(name, num_decided, state.active, state.excluded, state.dropped_by or {})
    if not done.num_active:
        by = ", ".join(
            f"{stage}: {number}" for stage, number in sorted(done.dropped_by.items(), key=lambda item: -item[1])
        )
        raise TaskSourceError(
            f"no task of {name!r} is left to select: all {state.num_tasks} are excluded ({by})",
            todo=f"loosen the stages of pipelines.task; `rft tasks show {name}` shows why each was dropped",
        )
    if num_decided:
        print(_sentence(done), file=sys.stderr, flush=True)
    return done


def _sentence(done: TasksDecided) -> str:
    why = (
        f" ({', '.join(f'{stage}: {number:,}' for stage, number in done.dropped_by.items())})"
        if done.dropped_by
        else ""
    )
    return (
        f"tasks: {done.taskset}: {done.num_decided:,} decided on; {done.num_active:,} can be selected, "
        f"{done.num_excluded:,} are excluded{why}"
    )


def _prepare(resolved: ResolvedRun, buffer: Buffer, *, keep_vectors: bool = True) -> None:
    config = resolved.config
    embed = TaskEmbeddings(buffer, config.model.path, config.base_dir, keep=keep_vectors)
    read = functools.partial(taskset_texts, buffer.database)
    context = StageContext(config.base_dir, model_path=config.model.path, embed=embed, read_taskset=read)
    resolved.task_chain.prepare(context)


def _is_rowwise(chain: Chain) -> bool:
    return all(stage.operator.rowwise for stage in chain.stages)


def _columns(chain: Chain) -> frozenset[str]:
    """Return the columns that the stages read; all columns if one may read any."""
    reads = [stage.operator.reads for stage in chain.stages]
    if any(columns is None for columns in reads):
        return frozenset(TASK_BATCH_SCHEMA.names)
    return frozenset().union(*(columns or () for columns in reads))


def _decide_all(chain: Chain, buffer: Buffer, taskset: str, reader: TaskReader, ids: list[int], *, again: bool) -> int:
    """Decide on these tasks, or on the whole set if stages compare tasks; return the number of tasks."""
    rowwise = _is_rowwise(chain)
    everything = decidable_tasks(buffer.database, taskset, leave_out_blocked_by=None if again else chain.version)
    is_new = len(ids) == len(everything)
    asked = set(ids)
    num_decided = 0

    def store_aside(aside: Verdicts) -> None:
        commit_task_verdicts(buffer.database, taskset, chain.version, aside)

    for made_by, members in tasks_by_maker(buffer.database, ids if rowwise else everything).items():
        if not asked.intersection(members):
            continue
        part = chain.passed_by(made_by)
        size = BATCH_TASKS if rowwise else len(members)
        for start in range(0, len(members), size):
            batch = reader.read(members[start : start + size])
            with setting_aside(taskset, batch, store_aside):
                verdicts, changes = decide_batch(part, buffer, batch, rowwise=rowwise, is_first=is_new and start == 0)
            commit_task_verdicts(buffer.database, taskset, chain.version, verdicts, changes)
        num_decided += len(members)
    return num_decided
