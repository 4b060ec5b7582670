"""Trials of a run's rollouts and stages, with a stand-in for the engine, before anything is started."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from operators.base import StageContext
from rftcore.checks.algorithm import check_recorded
from rftcore.checks.tasks import TasksetSample
from rftcore.config.run import RunConfig
from rftcore.explorer.rehearsal import check_context, rehearse
from rftcore.pipeline.rehearsal_trial import RehearsedBatch, refuse_to_generate, try_rehearsed_chain
from rftcore.resolved import ResolvedRun
from rftcore.workflows.chat_encoding import chat_encoder
from rftcore.workflows.prompts import Prompts, Thoughts
from rftcore.workflows.task import Task
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError, RftError, RolloutsFailedError
from rftdata.experience import Rollout
from rftdata.pipeline.task_batches import source_batch
from rftdata.tasks import read_tasks
from rftdata.tasks.sources import reading_for
from rftdata.tasks.stored import taskset_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def describe_rollouts(
    resolved: ResolvedRun, sample: TasksetSample, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Try workflow and rewards on tasks of a set, with a stand-in for the engine; add what was rehearsed to the sample.

    Raises:
        RolloutsFailedError: a rollout fails.
        ConfigError: a prompt does not fit the engine's context, or the workflow does not record what the algorithm reads.
    """
    if sample.first is None or sample.longest is None:
        return
    name = sample.taskset.name
    resolved = resolved.for_taskset(name)
    first, longest = (Task.from_row({"task_id": 0, "taskset": name, **row}) for row in (sample.first, sample.longest))
    try:
        tried = rehearse(resolved, first, tokenizer)
        longest_tried = tried if longest == first else rehearse(resolved, longest, tokenizer)
    except RolloutsFailedError as error:
        if not sample.passes_stages:
            raise
        yield f"{error.what}; stages of pipelines.task may change or drop that task"
        return
    if sample.is_trained:
        check_recorded(resolved.algorithm, resolved.config.explorer, tried.recorded)
    tries = ((first, sample.first, tried), (longest, sample.longest, longest_tried))
    rollouts = {task.task_key: (task, row.get("features") or {}, one.rollout) for task, row, one in tries}
    sample.rehearsed += rollouts.values()
    yield f"taskset {name}: a rollout with a stand-in for the model gets the reward {tried.rollout.reward:g}"
    yield from (
        f"taskset {name}: {sentence}"
        for sentence in _turns(tried.rollout, tokenizer, resolved.config.explorer.thoughts)
    )
    if longest_tried.num_prompt_tokens is not None:
        sentence = check_context(resolved, longest, longest_tried.num_prompt_tokens)
        yield from [f"taskset {name}: {sentence}"] if sentence else []


def _turns(rollout: Rollout, tokenizer: PreTrainedTokenizerBase, thoughts: Thoughts) -> Iterator[str]:
    """Yield what a rollout of several turns is stored as, and where the model's chat template may divide it."""
    if rollout.num_turns < 2:
        return
    forks = Counter(sequence.fork for sequence in rollout.sequences if sequence.fork is not None)
    causes = f" (forks: {', '.join(f'{num} {cause}' for cause, num in forks.items())})" if forks else ""
    yield f"its {rollout.num_turns} turns are stored as {len(rollout.sequences)} experiences{causes}"
    if roles := Prompts(thoughts).rewriting_roles(chat_encoder(tokenizer)):
        yield (
            f"the model's chat template changes earlier answers that have thoughts when a message of the role {' or '.join(roles)} follows, so that "
            "such a turn begins an experience of its own (fork template); explorer.thoughts keeps them"
        )


def describe_stages(
    resolved: ResolvedRun,
    pipeline: Literal["task", "experience"],
    buffer: Buffer | None,
    batch: RehearsedBatch,
    read_s: float,
) -> Iterator[str]:
    """Prepare every stage of a pipeline for its first batch, as the processes of a run do when they start, and try it.

    Args:
        batch: experiences to try the stages on; none for `pipelines.task`.
        read_s: maximum seconds for reading a task source.

    Raises:
        RftError: a stage cannot be prepared, or fails.
    """
    config = resolved.config
    chain = resolved.task_chain if pipeline == "task" else resolved.experience_chain
    context = StageContext(
        config.base_dir,
        model_path=config.model.path,
        generate=refuse_to_generate,
        read_taskset=functools.partial(_task_texts, config, buffer, read_s),
    )
    try:
        skipped = try_rehearsed_chain(chain, context, batch)
    except RftError as error:
        raise error.about(f"pipelines.{pipeline}") from error
    if chain.stages:
        is_tried = batch.table.num_rows and len(skipped) < len(chain.stages)
        tried = f", and tried on {batch.table.num_rows} experiences" if is_tried else ""
        yield f"pipelines.{pipeline}: {', '.join(stage.name for stage in chain.stages)}: ready{tried}"
    yield from (f"pipelines.{pipeline}: {stage} was not tried: {reason}" for stage, reason in skipped.items())


def _task_texts(config: RunConfig, buffer: Buffer | None, read_s: float, name: str) -> pa.Table:
    """Return the tasks of a set from its source if the configuration has one of that name, else from the buffer.

    Raises:
        ConfigError: neither has such a set.
    """
    tasksets = (*config.tasks, *config.eval.tasks, *config.eval.test)
    for taskset in tasksets:
        if taskset.name == name:
            database = buffer.database if buffer is not None else None
            with reading_for(read_s):
                table: pa.Table = source_batch(name, list(read_tasks(taskset, config.base_dir, database)))
            return table.select(["task_key", "prompt", "answer"])
    if buffer is None:
        known = ", ".join(taskset.name for taskset in tasksets)
        raise ConfigError("unknown set, and there is no buffer yet that could contain it", value=name, allowed=known)
    return taskset_texts(buffer.database, name)
