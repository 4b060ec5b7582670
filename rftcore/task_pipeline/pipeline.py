"""`pipelines.task`: the chain that tasks pass before they can be selected.

It runs when tasks are loaded (`rft run`, `rft tasks load`). All sources are checked first, then every set is loaded, and then the sets that
are trained on are decided on (`rftcore.task_pipeline.task_decisions`), since a stage may read any set of the buffer.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator

import pyarrow as pa

from operators.base import StageContext
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.embeddings import TaskEmbeddings
from rftcore.task_pipeline.needs import TaskNeeds
from rftcore.task_pipeline.sources import check_tasks
from rftcore.task_pipeline.task_decisions import TasksDecided, decide_tasksets
from rftdata.buffer import Buffer
from rftdata.pipeline.task_batches import TaskReader, source_batch
from rftdata.pipeline.task_verdicts import decidable_tasks, register_task_pipeline
from rftdata.tasks.loading import load_taskset
from rftdata.tasks.rows import read_tasks
from rftdata.tasks.stored import taskset_texts


def load_tasks(resolved: ResolvedRun, buffer: Buffer, *, again: bool = False) -> list[TasksDecided]:
    """Load every taskset of a configuration, and decide on those that are trained on. Evaluations use their tasks unchanged.

    Nothing is stored before the first rows of all sources have been checked. If a stage cannot decide on one set, the others are still
    decided on.

    Raises:
        TaskSourceError: a taskset cannot be loaded, has no task left, or lacks what the rewards and the workflow need.
        PluginError, ConfigError, OperatorError, ModelError: a stage cannot work.
    """
    config, chain, decided = resolved.config, resolved.task_chain, list[TasksDecided]()
    check_tasks(resolved, buffer)
    trained = [(taskset, TaskNeeds(resolved, taskset, chain)) for taskset in config.tasks]
    evaluated = [(taskset, TaskNeeds(resolved, taskset, None)) for taskset in (*config.eval.tasks, *config.eval.test)]
    for taskset, needs in trained:
        load_taskset(buffer.database, taskset, config.base_dir, pending=bool(chain.stages), check=needs)
    for taskset, needs in evaluated:
        load_taskset(buffer.database, taskset, config.base_dir, check=needs)
    if chain.stages:
        stages = [{stage.name: stage.operator.spec()} for stage in chain.stages]
        register_task_pipeline(buffer.database, chain.version, stages)
        _prepare_chain(resolved, buffer)
        try:
            decided = decide_tasksets(chain, buffer, config.tasks, again=again)
        finally:
            chain.close()
    for name, needs in {taskset.name: needs for taskset, needs in (*trained, *evaluated)}.items():
        for sentence in needs.stored(buffer):
            print(f"tasks: {name}: {sentence}", file=sys.stderr, flush=True)
    return decided


def task_batches(resolved: ResolvedRun, buffer: Buffer, limit: int) -> Iterator[tuple[str, pa.Table]]:
    """Yield the first `limit` tasks of every taskset as the chain would see them, for a preview; prepares the chain.

    Nothing is stored. Sets that are not loaded yet are read from their sources, with ids from 1.
    """
    config, chain = resolved.config, resolved.task_chain
    _prepare_chain(resolved, buffer, keep_vectors=False)
    for taskset in config.tasks:
        ids = decidable_tasks(buffer.database, taskset.name)[:limit]
        if ids:
            yield taskset.name, TaskReader(buffer.database, taskset.name, chain.reads).read(ids).table
        else:
            tasks = itertools.islice(read_tasks(taskset, config.base_dir, buffer.database), limit)
            yield taskset.name, source_batch(taskset.name, list(tasks))


def _prepare_chain(resolved: ResolvedRun, buffer: Buffer, *, keep_vectors: bool = True) -> None:
    config = resolved.config
    embed = TaskEmbeddings(buffer, config.model.path, config.base_dir, keep=keep_vectors)
    read = functools.partial(taskset_texts, buffer.database)
    context = StageContext(config.base_dir, model_path=config.model.path, embed=embed, read_taskset=read)
    resolved.task_chain.prepare(context)
