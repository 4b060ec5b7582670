"""`pipelines.task`: the chain that tasks pass before they can be selected.

It runs when tasks are loaded (`rft run`, `rft tasks load`). Tasks that the chain has decided on are left alone: where every stage
decides row by row only new ones go through it, in batches; where one compares tasks with each other the whole set does, once
there is something new. `again` decides on all of them, since what runs observed may have changed their scores.

A batch on which a stage raises is halved until the task is found that does it; that task is excluded with the error as its
reason, and tried again when the set is next loaded. Where every task raises, or all are excluded, the run is refused: nothing could be
selected. So it is where an aggregator's endpoint says nothing at all: the tasks stay undecided. A task that a stage makes of another
becomes a task of the set, and passes the other stages.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from operators.base import CreatedGroup, StageContext
from operators.build import build_chain
from operators.chain import Chain, ChainResult
from operators.stage import SilentEndpointError, StageError
from rftcore.config import RunConfig
from rftcore.task_changes import Changes
from rftcore.task_checks import check_tasks, of_taskset
from rftcore.task_embeddings import TaskEmbeddings
from rftdata.config import TasksetConfig
from rftdata.database import Database
from rftdata.errors import OperatorError, RftError, TaskSourceError
from rftdata.tasks.loading import load_taskset, taskset_texts
from rftdata.tasks.rows import read_tasks
from rftdata.tasks.verdicts import (
    TASK_BATCH_SCHEMA,
    MadeTask,
    TaskBatch,
    TaskDecision,
    TaskReader,
    TaskScore,
    commit_task_verdicts,
    decidable_tasks,
    known_scores,
    register_task_pipeline,
    source_batch,
    tasks_by_maker,
    taskset_lock,
    undecided_tasks,
)
from rftdata.verdicts import StageCount

_BATCH_TASKS = 4096
_PROBES = 8
"""So many tasks of a batch are tried alone before it is halved: a stage that is down would be asked about every one in vain."""


@dataclass(frozen=True)
class TasksDecided:
    """What a task pipeline did with one set.

    Attributes:
        num_decided: tasks that went through the stages now.
        num_active, num_excluded: how the set stands.
        dropped_by: stage (or `by hand`) -> tasks it excludes.
    """

    taskset: str
    num_decided: int
    num_active: int
    num_excluded: int
    dropped_by: dict[str, int]


def build_task_chain(config: RunConfig) -> Chain:
    """The chain of `pipelines.task`.

    Raises:
        PluginError, ConfigError: a stage that does not exist, load or fit tasks.
    """
    try:
        return build_chain(config.pipelines.task, config.base_dir, schema=TASK_BATCH_SCHEMA, require_reward=False)
    except RftError as error:
        raise error.about("pipelines.task") from error


def load_tasks(config: RunConfig, database: Database, *, again: bool = False) -> list[TasksDecided]:
    """Load every taskset of a configuration, and decide on those that are trained on. Evaluations see their tasks as they are.

    Nothing is stored before the first rows of all sources were looked at. A set that a stage cannot decide on keeps no other from being
    decided on.

    Raises:
        TaskSourceError: a taskset that cannot be loaded, or of which no task is left.
        PluginError, ConfigError, OperatorError, ModelError: a stage that cannot work.
    """
    chain = build_task_chain(config)
    check_tasks(config, chain, database)
    for taskset in config.tasks:
        load_taskset(database, taskset, config.base_dir, pending=bool(chain.stages))
    for taskset in (*config.eval.tasks, *config.eval.test):
        load_taskset(database, taskset, config.base_dir)
    if not chain.stages:
        return []
    register_task_pipeline(database, chain.version, [{stage.name: stage.operator.spec()} for stage in chain.stages])
    _prepare(chain, config, database)
    try:
        return _decide_sets(chain, database, config.tasks, again=again)
    finally:
        chain.close()


def _decide_sets(
    chain: Chain, database: Database, tasksets: Sequence[TasksetConfig], *, again: bool
) -> list[TasksDecided]:
    decided, errors = [], []
    for taskset in tasksets:
        try:
            decided.append(decide_tasks(chain, database, taskset, again=again))
        except (OperatorError, TaskSourceError) as error:
            errors.append(error)
    for error in errors[1:]:
        print(f"tasks: {error}", file=sys.stderr, flush=True)
    if errors:
        raise errors[0]
    return decided


def task_batches(config: RunConfig, database: Database, chain: Chain, limit: int) -> Iterator[tuple[str, pa.Table]]:
    """The first `limit` tasks of every taskset as the chain would see them, for a preview; the chain is prepared for them.

    Nothing is stored: sets that are not loaded yet are read from their sources, under ids from 1.
    """
    _prepare(chain, config, database, keep_vectors=False)
    for taskset in config.tasks:
        ids = decidable_tasks(database, taskset.name)[:limit]
        if ids:
            yield taskset.name, TaskReader(database, taskset.name, _columns(chain)).read(ids).table
        else:
            tasks = itertools.islice(read_tasks(taskset, config.base_dir, database), limit)
            yield taskset.name, source_batch(taskset.name, list(tasks))


def decide_tasks(chain: Chain, database: Database, taskset: TasksetConfig, *, again: bool = False) -> TasksDecided:
    """Run a prepared chain over the tasks of a loaded set that it has not decided on; over all of them with `again`.

    Raises:
        TaskSourceError: no task of the set is left.
        OperatorError: a stage fails on every task, or on the set as a whole.
    """
    name, num_decided = taskset.name, 0
    with taskset_lock(database, name):
        ids = undecided_tasks(database, name, chain.version, again=again, failed_too=_is_rowwise(chain))
        if ids:
            reader = TaskReader(database, name, _columns(chain))
            # What a stage makes of a task is decided on next, and passes that stage no more: this ends.
            while ids:
                try:
                    num_decided += _decide_all(chain, database, name, reader, ids)
                except OperatorError as error:
                    raise of_taskset(name, error) from error
                ids = undecided_tasks(database, name, chain.version)
    row = database.fetch("taskset_verdicts", taskset=name)[0]
    done = TasksDecided(name, num_decided, row["active"], row["excluded"], row["dropped_by"] or {})
    if not done.num_active:
        by = ", ".join(
            f"{stage}: {number}" for stage, number in sorted(done.dropped_by.items(), key=lambda item: -item[1])
        )
        raise TaskSourceError(
            f"no task of {name!r} is left to select: all {row['num_tasks']} are excluded ({by})",
            todo=f"loosen the stages of pipelines.task; `rft tasks show {name}` says why each was dropped",
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


def _prepare(chain: Chain, config: RunConfig, database: Database, *, keep_vectors: bool = True) -> None:
    embed = TaskEmbeddings(database, config.model.path, config.base_dir, keep=keep_vectors)
    read = functools.partial(taskset_texts, database)
    chain.prepare(StageContext(config.base_dir, model_path=config.model.path, embed=embed, read_taskset=read))


def _is_rowwise(chain: Chain) -> bool:
    return all(stage.operator.rowwise for stage in chain.stages)


def _columns(chain: Chain) -> frozenset[str]:
    """What the stages read; everything where one may read anything."""
    reads = [stage.operator.reads for stage in chain.stages]
    if any(columns is None for columns in reads):
        return frozenset(TASK_BATCH_SCHEMA.names)
    return frozenset().union(*(columns or () for columns in reads))


def _decide_all(chain: Chain, database: Database, taskset: str, reader: TaskReader, ids: list[int]) -> int:
    """Decide on these tasks, or on the whole set where stages compare tasks; how many."""
    rowwise = _is_rowwise(chain)
    everything = decidable_tasks(database, taskset)
    is_new = len(ids) == len(everything)
    asked = set(ids)
    num_decided = 0
    for made_by, members in tasks_by_maker(database, ids if rowwise else everything).items():
        if not asked.intersection(members):
            continue
        stages = [stage for stage in chain.stages if not {stage.name, stage.operator.part_of} & {*made_by}]
        part = chain if len(stages) == len(chain.stages) else replace(chain, stages=stages, _prepared=True)
        size = _BATCH_TASKS if rowwise else len(members)
        for start in range(0, len(members), size):
            batch = reader.read(members[start : start + size])
            decided = _decide_batch(part, database, batch, rowwise=rowwise, is_first=is_new and start == 0)
            commit_task_verdicts(
                database, taskset, chain.version, decided.decisions, decided.stages, decided.scores, decided.made
            )
        num_decided += len(members)
    return num_decided


def _decide_batch(chain: Chain, database: Database, batch: TaskBatch, *, rowwise: bool, is_first: bool) -> _Decided:
    """Decide on a batch; `is_first`: this version has decided on no task of the set before."""
    decided = _Decided()
    try:
        _decide(chain, database, batch, decided)
    except StageError as error:
        if rowwise:
            _divide(chain, database, batch, decided, error)
        else:
            _leave_out(chain, database, batch, decided)
        if is_first and decided.num_failed == batch.table.num_rows:
            raise  # the stage itself is wrong, not a task
    return decided


@dataclass
class _Decided:
    decisions: list[TaskDecision] = field(default_factory=list)
    stages: list[StageCount] = field(default_factory=list)
    scores: list[TaskScore] = field(default_factory=list)
    made: list[MadeTask] = field(default_factory=list)
    num_failed: int = 0

    def fail(self, batch: TaskBatch, error: StageError) -> None:
        """Exclude tasks on which a stage raised."""
        stage = error.run.stage if error.run else "chain"
        task_ids = batch.table["experience_id"].to_pylist()
        self.decisions += [TaskDecision(task_id, False, stage, error.reason) for task_id in task_ids]
        self.stages += [_count(run) for run in (*error.stages, error.run) if run]
        self.num_failed += len(task_ids)


def _decide(chain: Chain, database: Database, batch: TaskBatch, decided: _Decided) -> None:
    changes = Changes(batch)
    known = known_scores(database, batch, chain.score_keys)
    try:
        result = chain.run(batch.table, 1, known=known, watch=changes.watch)
    except StageError as error:
        if not isinstance(error.__cause__, SilentEndpointError):
            raise
        # No task does it. Halves would be asked about in vain, and all be excluded.
        raise SilentEndpointError(error.what, value=error.value, todo=error.todo) from error
    _refuse(result)
    decided.decisions += changes.decisions(result)
    decided.stages += [_count(run) for run in result.stages]
    decided.scores += _scores(chain, result)
    decided.made += changes.made


def _divide(chain: Chain, database: Database, batch: TaskBatch, decided: _Decided, error: StageError) -> None:
    """Both halves of a batch that fails; a task that fails alone is the one that does it, and is excluded."""
    if _each_fails(chain, database, batch):
        decided.fail(batch, error)
        return
    for half in _halves(batch):
        try:
            _decide(chain, database, half, decided)
        except StageError as failed:
            _divide(chain, database, half, decided, failed)


def _leave_out(chain: Chain, database: Database, batch: TaskBatch, decided: _Decided) -> None:
    """Decide on a set whose stages compare tasks without those that fail alone.

    Raises:
        StageError: it fails without them, too.
    """
    failing: set[int] = set()
    for part, error in _failing(chain, database, batch):
        decided.fail(part, error)
        failing.update(part.table["experience_id"].to_pylist())
    stays = [task_id not in failing for task_id in batch.table["experience_id"].to_pylist()]
    if any(stays):
        table = batch.table.filter(pa.array(stays)).combine_chunks()
        _decide(chain, database, TaskBatch(table, list(itertools.compress(batch.is_text, stays))), decided)


def _failing(chain: Chain, database: Database, batch: TaskBatch) -> Iterator[tuple[TaskBatch, StageError]]:
    """Tasks on which a stage raises though there is no other, in parts with one error."""
    try:
        _decide(chain, database, batch, _Decided())
    except StageError as error:
        if _each_fails(chain, database, batch):
            yield batch, error
        else:
            for half in _halves(batch):
                yield from _failing(chain, database, half)


def _each_fails(chain: Chain, database: Database, batch: TaskBatch) -> bool:
    """Whether every task of a batch that fails does it alone; of many tasks, every one of some that are spread over them."""
    rows = batch.table.num_rows
    return rows == 1 or (
        rows > 2 * _PROBES
        and all(
            any(_failing(chain, database, _part(batch, place, place + 1)))
            for place in range(0, rows, -(-rows // _PROBES))
        )
    )


def _halves(batch: TaskBatch) -> Iterator[TaskBatch]:
    rows = batch.table.num_rows
    yield _part(batch, 0, rows // 2)
    yield _part(batch, rows // 2, rows)


def _part(batch: TaskBatch, start: int, end: int) -> TaskBatch:
    return TaskBatch(batch.table.slice(start, end - start).combine_chunks(), batch.is_text[start:end])


def _refuse(result: ChainResult) -> None:
    if result.waiting:
        raise OperatorError(
            f"{_place(result, result.waiting[0].stage)} waits for a person, which tasks cannot",
            todo="exclude tasks by hand: UPDATE rft.task SET status = 'excluded' WHERE …",
        )
    if any(isinstance(made, CreatedGroup) for made in result.created):
        raise OperatorError(
            "a stage of pipelines.task makes experiences, which only pipelines.experience stores",
            todo="move the stage there",
        )


def _place(result: ChainResult, stage: str) -> str:
    index = next((run.index for run in result.stages if run.stage == stage), 0)
    return f"stage {index} of pipelines.task ({stage})"


def _count(run: Any) -> StageCount:
    return StageCount(
        run.index, run.stage, run.rows_in, run.rows_kept, run.rows_dropped, run.rows_created, run.seconds, run.error
    )


def _scores(chain: Chain, result: ChainResult) -> list[TaskScore]:
    errors = {stage.score_key: stage.operator.error_column for stage in chain.stages if stage.score_key}
    scores = []
    for found in result.scores:
        failed = errors[found.score_key]
        for row, digest in zip(found.table.to_pylist(), found.input_digests.to_pylist(), strict=True):
            if failed is None or row.get(failed) is None:  # a call that failed is made again
                scores.append(TaskScore(row.pop("experience_id"), found.score_key, found.stage, row, digest))
    return scores
