"""Checks of the sources of all tasksets before any is stored, so that a mistake in the last leaves no tasks of the first behind.

Only the beginning of a source is read; later damage is found when the source is loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from operators.chain.chain import Chain
from operators.chain.stage import error_at_stage
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.needs import TaskNeeds
from rftdata.buffer import Buffer
from rftdata.config import TasksetConfig
from rftdata.errors import OperatorError, RftError
from rftdata.tasks.loading import is_current, no_task
from rftdata.tasks.query import asks_buffer
from rftdata.tasks.rows import Reading, read_tasks
from rftdata.tasks.sources import reading_for

# Number of first rows that are checked. If stages look for numbers in them, it is the size of a first batch.
_FIRST_ROWS = 64
_FIRST_BATCH = 4096
LOOKING_S = 60.0
"""Longest time for reading the first rows of a source."""

Tasks = Sequence[Mapping[str, Any]]


def check_tasks(resolved: ResolvedRun, buffer: Buffer | None = None, *, looking_s: float = LOOKING_S) -> None:
    """Check names, arguments and columns of every source that would be read, as far as its first rows show them.

    Args:
        buffer: tasks stored there are not checked again. Without it, sources that query the buffer are skipped.
        looking_s: see `first_tasks`.

    Raises:
        TaskSourceError: a source cannot be read, or its rows are not tasks or lack what the rewards and the workflow need.
        OperatorError: a stage looks for a number that the tasks do not have, as far as can be determined.
        SeveralErrors: several sets are wrong.
    """
    config, findings = resolved.config, Findings()
    for taskset in (*config.tasks, *config.eval.tasks, *config.eval.test):
        if buffer is None and asks_buffer(taskset):
            continue
        if buffer is not None and is_current(buffer.database, taskset, config.base_dir):
            continue
        findings.passes(_check_taskset, resolved, taskset, buffer, findings, looking_s)
    findings.refuse()


def _check_taskset(
    resolved: ResolvedRun, taskset: TasksetConfig, buffer: Buffer | None, findings: Findings, looking_s: float
) -> None:
    config = resolved.config
    # The source is read even if a stage, a reward or the workflow does not load.
    passes_chain = taskset in config.tasks
    chain = findings.value(lambda: resolved.task_chain) if passes_chain else None
    needs = findings.value(TaskNeeds, resolved, taskset, chain)
    stages = chain.stages if chain is not None else []
    wants_numbers = any(stage.operator.keys for stage in stages)
    reading = Reading()
    count = _FIRST_BATCH if wants_numbers else _FIRST_ROWS
    first = first_tasks(taskset, config.base_dir, buffer, count, reading, looking_s=looking_s)
    are_all = len(first) < count and not reading.was_cut
    # A query on the buffer may select tasks that the preceding sets are about to store.
    if not first and are_all and not asks_buffer(taskset):
        raise no_task(taskset, reading)
    if needs is None or (chain is None and passes_chain):
        return
    for task in first[:_FIRST_ROWS]:
        needs.see(task)
    if are_all and len(first) <= _FIRST_ROWS:
        needs.refuse_all()
    # If stages compare tasks, the whole set is one batch, and a number may first appear in any row of it.
    if chain is not None and wants_numbers and first and (are_all or (chain.rowwise and len(first) == _FIRST_BATCH)):
        _check_numbers(chain, taskset, first)


def first_tasks(
    taskset: TasksetConfig,
    base_dir: Path,
    buffer: Buffer | None,
    count: int,
    reading: Reading,
    *,
    looking_s: float = LOOKING_S,
) -> Tasks:
    """Return up to `count` tasks of a source, which is read for at most `looking_s` seconds.

    Raises:
        TaskSourceError: they cannot be read.
    """
    rows = read_tasks(taskset, base_dir, buffer.database if buffer is not None else None, reading)
    try:
        with reading_for(looking_s):  # a source that repeats its rows forever yields few tasks
            return list(itertools.islice(rows, count))
    finally:
        rows.close()  # a query's connection, or a user's generator


def _check_numbers(chain: Chain, taskset: TasksetConfig, tasks: Tasks) -> None:
    """Check that the numbers which stages look for in features and metadata exist, up to a stage that may add any."""
    names = keys_of(tasks)
    for stage in chain.stages:
        missing = sorted(stage.operator.keys - names)
        if missing:
            error = OperatorError(
                f"no task has the number {missing[0]!r}, neither as a column nor among its features or metadata",
                allowed=", ".join(sorted(names)) or None,
                todo="correct the name, or put the stage that computes it before this one",
            )
            raise of_taskset(taskset.name, error_at_stage(stage.index, stage.name, error))
        if stage.operator.writes is None:
            return


def keys_of(tasks: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names in the features and metadata of tasks."""
    return {name for task in tasks for name in _names(task)}


def _names(task: Mapping[str, Any]) -> Iterator[str]:
    yield from task["features"]
    yield from task["payload"]["metadata"]


def of_taskset(name: str, error: RftError) -> OperatorError:
    """Return the same error of a stage with the name of the taskset."""
    return OperatorError(
        f"the taskset {name!r}: {error.what}", value=error.value, allowed=error.allowed, todo=error.todo
    )
