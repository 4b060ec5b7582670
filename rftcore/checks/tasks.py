"""The tasks of a run: their sources, and what rewards, workflow and selectors need of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rftcore.checks.task_features import FeatureCheck
from rftcore.findings import Findings
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.needs import TaskNeeds
from rftcore.task_pipeline.sources import check_tasks
from rftcore.workflows.task import Task
from rftdata.buffer import Buffer
from rftdata.config import TasksetConfig
from rftdata.connection import check_new_folder, exists
from rftdata.experience import Rollout
from rftdata.tasks import read_tasks
from rftdata.tasks.loading import no_task
from rftdata.tasks.query import asks_buffer
from rftdata.tasks.rows import Reading
from rftdata.tasks.sources import reading_for


def check_new_buffer(resolved: ResolvedRun, findings: Findings) -> None:
    """Check the buffer's folder and the sources if the buffer does not exist yet, so that a mistake creates none."""
    config = resolved.config.buffer
    if not exists(config):
        findings.passes(check_new_folder, config)
        findings.passes(check_tasks, resolved)


@dataclass
class TasksetSample:
    """Tasks of a set for a trial rollout.

    Attributes:
        is_trained: whether the set is trained on; evaluations use their tasks unchanged.
        read_s: maximum seconds for reading its source.
        passes_stages: whether stages of pipelines.task may still change or drop the tasks.
        first, longest: the first task and the one with the longest prompt; None if the set is not read here.
        rehearsed: the tasks that were tried, with their features and rollouts.
    """

    taskset: TasksetConfig
    is_trained: bool
    read_s: float
    passes_stages: bool = False
    first: Mapping[str, Any] | None = None
    longest: Mapping[str, Any] | None = None
    rehearsed: list[tuple[Task, Mapping[str, Any], Rollout]] = field(default_factory=list)
    _length: int = -1

    def see(self, task: Mapping[str, Any]) -> None:
        """Record the next task."""
        self.first = self.first or task
        prompt = task["payload"]["prompt"]
        length = len(prompt) if isinstance(prompt, str) else sum(len(str(turn.get("content"))) for turn in prompt)
        if length > self._length:
            self.longest, self._length = task, length


def read_tasksets(
    resolved: ResolvedRun, buffer: Buffer | None, findings: Findings, read_s: float, *, checks_features: bool
) -> list[TasksetSample]:
    """Read and describe every taskset; return samples of those whose tasks were read.

    Args:
        read_s: maximum seconds for one source.
        checks_features: whether the features are checked that selectors choose by.
    """
    config = resolved.config
    may_change = bool(config.pipelines.task)
    samples = [
        *(TasksetSample(taskset, True, read_s, may_change) for taskset in config.tasks),
        *(TasksetSample(taskset, False, read_s) for taskset in (*config.eval.tasks, *config.eval.test)),
    ]
    for sample in samples:
        findings.describe(describe_tasks(resolved, sample, buffer, checks_features=checks_features))
    return samples


def describe_tasks(
    resolved: ResolvedRun, sample: TasksetSample, buffer: Buffer | None, *, checks_features: bool = True
) -> Iterator[str]:
    """Read all tasks of a source, because a run reads every row and may refuse the source for any of them; fill the sample.

    Raises:
        TaskSourceError: the source cannot be read, or its rows are not tasks or lack what the rewards and the workflow need.
        ConfigError: tasks lack the features of their selector.
    """
    taskset = sample.taskset
    if asks_buffer(taskset):
        yield f"taskset {taskset.name}: its query on the buffer runs when it is loaded"
        return
    features = FeatureCheck(resolved, taskset, buffer) if sample.is_trained and checks_features else None
    chain = resolved.task_chain if sample.is_trained else None
    num_tasks, reading = 0, Reading()
    # A reward or workflow that does not load keeps the source from being read as little as the other way round.
    wanting = Findings()
    needs = wanting.value(TaskNeeds, resolved, taskset, chain)
    with reading_for(sample.read_s) as cut:
        for task in read_tasks(taskset, resolved.config.base_dir, reading=reading):
            num_tasks += 1
            sample.see(task)
            if needs is not None:
                needs.see(task)
            if features is not None:
                features.see(task)
    if sample.first is None and not reading.was_cut:
        raise no_task(taskset, reading)
    if reading.was_cut:
        yield (
            f"taskset {taskset.name}: its source has not ended after {cut.num_rows:,} rows and {sample.read_s:g} s; the rest was not checked"
            ", and a run reads all of it unless the taskset has a limit"
        )
    first = f", the first prompt is {str(sample.first['payload']['prompt'])[:80]!r}" if sample.first is not None else ""
    yield f"taskset {taskset.name}: {num_tasks:,} tasks{first}"
    for sentence in (
        *reading.sentences(),
        *(needs.sentences(are_all=not reading.was_cut) if needs is not None else ()),
    ):
        yield f"taskset {taskset.name}: {sentence}"
    if features is not None:
        yield from features.verdict(are_all=not reading.was_cut)
    wanting.refuse()
