"""The inputs that `rft check --deep` opens: model, task sources, database and inputs of stages; and a trial of rollouts and stages.

Every check yields a sentence for the user, and raises errors that would end a run or make all its rollouts fail.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import rftdata
from operators.base import StageContext
from operators.chain.chain import Chain
from rftcore.algorithms.requirements import check_recorded
from rftcore.checks.task_features import FeatureCheck
from rftcore.checks.task_needs import TaskNeeds
from rftcore.config.run import RunConfig
from rftcore.explorer.rehearsal import check_context, rehearse
from rftcore.explorer.teacher import open_teacher
from rftcore.installation.packages import check_environment
from rftcore.installation.requirements import installed_version
from rftcore.pipeline.trial import TrialBatch, refuse_to_generate, try_chain
from rftcore.resolved import ResolvedRun
from rftcore.run.model_checks import check_models_fit
from rftcore.run.prepare import check_max_tokens, planned_steps, select_source
from rftcore.trainer.estimates.device_checks import check_devices
from rftcore.workflows.task import Task
from rftdata.attempts.sampling import checked_formula
from rftdata.buffer import Buffer
from rftdata.config import TasksetConfig
from rftdata.connection import check_new_folder, exists
from rftdata.errors import ConfigError, ModelError, RftError, RolloutsFailedError
from rftdata.experience import Rollout
from rftdata.pipeline.task_verdicts import source_batch
from rftdata.reports.inspection import schema_version
from rftdata.tasks import read_tasks
from rftdata.tasks.loading import no_task, taskset_texts
from rftdata.tasks.query import asks_buffer
from rftdata.tasks.rows import Reading
from rftdata.tasks.sources import reading_for

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def open_inputs(resolved: ResolvedRun, read_s: float = 60.0) -> Iterator[str]:
    """Open the inputs of a run; yield a sentence for each. Database and tasks come first, because a model loads large packages.

    Args:
        read_s: maximum seconds for reading a task source.

    Raises:
        EnvironmentMismatchError: packages are missing here or incompatible with each other.
        ModelError, TaskSourceError, BufferUnavailableError: an input cannot be opened.
        PluginError, ConfigError: an input of a stage is missing, or rejects the stage's arguments.
        QueryError, ConfigError: the database rejects the priority formula, the selection cannot be trained on, or tasks lack
            the features of their selector.
        ConfigError: the models do not fit the GPUs, see `check_devices`.
    """
    config, chain = resolved.config, resolved.task_chain
    check_environment(config.explorer.engine)
    yield _describe_database(config)
    samples = []
    with _stored(config) as buffer:
        for taskset in config.tasks:
            sample = _Sample(taskset, read_s, passes_stages=bool(chain.stages))
            yield from _describe_tasks(resolved, sample, chain, FeatureCheck(resolved, taskset, buffer))
            samples.append(sample)
        for taskset in (*config.eval.tasks, *config.eval.test):
            samples.append(_Sample(taskset, read_s))
            yield from _describe_tasks(resolved, samples[-1])
        model, tokenizer = _open_model(resolved.model_folder)
        yield f"model {config.model.path}: a {model.model_type} with {len(tokenizer):,} tokens, in {tokenizer.name_or_path}"
        yield from check_devices(resolved, model, tokenizer)
        yield from _describe_device(resolved)
        yield from _describe_models(resolved, tokenizer)
        if config.has_explorer:
            yield from _describe_rollouts(resolved, samples, tokenizer)
        rehearsed = [one for sample in samples[: len(config.tasks)] for one in sample.rehearsed]
        yield from _describe_stages(resolved, buffer, read_s, TrialBatch(rehearsed, config.algorithm.group_size))
    if config.sampling.source is not None:
        yield _describe_selection(resolved)


@dataclass
class _Sample:
    """Tasks of a set for a trial rollout.

    Attributes:
        read_s: maximum seconds for reading its source.
        passes_stages: whether stages of pipelines.task may still change or drop the tasks.
        first, longest: the first task and the one with the longest prompt; None if the set is not read here.
        rehearsed: the tasks that were tried, with their features and rollouts.
    """

    taskset: TasksetConfig
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


def _describe_tasks(
    resolved: ResolvedRun, sample: _Sample, chain: Chain | None = None, features: FeatureCheck | None = None
) -> Iterator[str]:
    taskset = sample.taskset

    if asks_buffer(taskset):
        yield f"taskset {taskset.name}: its query on the buffer runs when it is loaded"
        return
    # All rows, because the run reads every row and may refuse the source for any of them.
    num_tasks, reading, needs = 0, Reading(), TaskNeeds(resolved, taskset, chain)
    with reading_for(sample.read_s) as cut:
        for task in read_tasks(taskset, resolved.config.base_dir, reading=reading):
            num_tasks += 1
            sample.see(task)
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
    for sentence in (*reading.sentences(), *needs.sentences(are_all=not reading.was_cut)):
        yield f"taskset {taskset.name}: {sentence}"
    if features is not None:
        yield from features.verdict(are_all=not reading.was_cut)


def _describe_stages(
    resolved: ResolvedRun, buffer: Buffer | None, read_s: float, experiences: TrialBatch
) -> Iterator[str]:
    """Prepare every stage for its first batch, as the processes of a run do when they start, and try those of experiences.

    Raises:
        RftError: a stage cannot be prepared, or fails.
    """
    config = resolved.config
    context = StageContext(
        config.base_dir,
        model_path=config.model.path,
        generate=refuse_to_generate,
        read_taskset=functools.partial(_task_texts, config, buffer, read_s),
    )
    chains = (
        ("task", resolved.task_chain, TrialBatch([], 1)),
        ("experience", resolved.experience_chain, experiences),
    )
    for name, chain, batch in chains:
        try:
            skipped = try_chain(chain, context, batch)
        except RftError as error:
            raise error.about(f"pipelines.{name}") from error
        if chain.stages:
            is_tried = batch.table.num_rows and len(skipped) < len(chain.stages)
            tried = f", and tried on {batch.table.num_rows} experiences" if is_tried else ""
            yield f"pipelines.{name}: {', '.join(stage.name for stage in chain.stages)}: ready{tried}"
        yield from (f"pipelines.{name}: {stage} was not tried: {reason}" for stage, reason in skipped.items())


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


@contextmanager
def _stored(config: RunConfig) -> Iterator[Buffer | None]:
    """Open the configuration's buffer; None if it does not exist yet."""
    if not exists(config.buffer):
        yield None
        return
    with rftdata.open(config.buffer, create=False, schema="check", application="rft check") as found:
        yield found


def _describe_selection(resolved: ResolvedRun) -> str:
    """Describe what the run would train on if it were created now."""
    config = resolved.config
    with rftdata.open(config.buffer, create=False, schema="check", application="rft check") as found:
        selected = select_source(resolved, found)
    assert selected is not None
    steps = planned_steps(config, len(selected.item_ids))
    sentence = f"sampling.source: {len(selected.item_ids):,} {selected.kind}s, {steps} steps, hash {selected.content_hash[:12]}"
    dropped = selected.describe_dropped()
    return sentence if dropped is None else f"{sentence}; {dropped}"


def _open_model(folder: Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    from transformers import AutoConfig, AutoTokenizer

    try:
        return AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:400]
        raise ModelError(f"the model in {folder} cannot be opened: {reason}", todo="correct model.path") from error


def _describe_device(resolved: ResolvedRun) -> Iterator[str]:
    """Yield settings of the engine that have no effect on this machine. With a cluster, roles run elsewhere and nothing is checked.

    Raises:
        ConfigError: a setting or the engine needs a GPU, and this machine has none.
    """
    import torch

    config = resolved.config
    if os.environ.get("RAY_ADDRESS") or torch.cuda.is_available() or not config.has_explorer:
        return
    engine = resolved.engine(worker_index=0)
    if config.explorer.engine == "vllm" and installed_version("vllm"):
        raise ConfigError(
            "the installed vLLM is the build for GPUs, but this machine has no working GPU",
            value=config.explorer.engine,
            todo="install the CPU build (`rft setup cpu`), or run on a machine with an NVIDIA GPU and driver",
        )
    if engine.async_scheduling:
        raise ConfigError(
            "explorer.engine_args.async_scheduling needs a GPU, but this machine has no working GPU",
            value=True,
            todo="remove it, or run on a machine with an NVIDIA GPU and driver",
        )
    if "gpu_memory_utilization" in config.explorer.engine_args:
        yield "explorer.engine_args.gpu_memory_utilization has no effect on this machine, which has no GPU: kv_cache_gib applies"


def _describe_models(resolved: ResolvedRun, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Compare the other models' tokenizers with the policy's, and ask a teacher's server for log-probabilities.

    Raises:
        ModelError, PluginError, ConfigError: see `check_models_fit` and `open_teacher`.
    """
    check_models_fit(resolved)
    for model in resolved.models[1:]:
        yield f"{model.key}: {model.folder} has the policy's tokenizer"
    teacher = resolved.config.explorer.teacher
    if teacher is not None and teacher.endpoint is not None:

        async def ask() -> None:
            await (await open_teacher(resolved, tokenizer)).close()

        asyncio.run(ask())
        yield f"explorer.teacher: the server at {teacher.endpoint.url} scores the policy's tokens"


def _describe_rollouts(
    resolved: ResolvedRun, samples: list[_Sample], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Try workflow and rewards on tasks of each set, with a stand-in for the engine.

    Raises:
        RolloutsFailedError: a rollout fails.
        ConfigError: a prompt or explorer.max_tokens does not fit the engine's context, or the workflow does not record what the
            algorithm reads.
    """
    check_max_tokens(resolved)
    for sample in samples:
        if sample.first is None or sample.longest is None:
            continue
        name = sample.taskset.name
        first, longest = (
            Task.from_row({"task_id": 0, "taskset": name, **row}) for row in (sample.first, sample.longest)
        )
        try:
            tried = rehearse(resolved, first, tokenizer)
            longest_tried = tried if longest == first else rehearse(resolved, longest, tokenizer)
            tries = ((first, sample.first, tried), (longest, sample.longest, longest_tried))
        except RolloutsFailedError as error:
            if not sample.passes_stages:
                raise
            yield f"{error.what}; stages of pipelines.task may change or drop that task"
            continue
        if sample.taskset in resolved.config.tasks:
            check_recorded(resolved.algorithm, resolved.config.explorer, tried.recorded)
        rollouts = {task.task_key: (task, row.get("features") or {}, one.rollout) for task, row, one in tries}
        sample.rehearsed += rollouts.values()
        yield f"taskset {name}: a rollout with a stand-in for the model gets the reward {tried.rollout.reward:g}"
        if longest_tried.num_prompt_tokens is not None:
            sentence = check_context(resolved, longest, longest_tried.num_prompt_tokens)
            yield from [f"taskset {name}: {sentence}"] if sentence else []


def _describe_database(config: RunConfig) -> str:
    buffer, formula = config.buffer, config.sampling.priority.formula
    if not exists(buffer):
        later = "; sampling.priority.formula is checked there when the run starts" if formula else ""
        folder = check_new_folder(buffer)
        return f"buffer: {folder} will be created{later}"
    with rftdata.open(buffer, create=False, schema="check", application="rft check") as found:
        checked_formula(found.database, formula)
        return f"buffer: {found.location} answers, schema {schema_version(found.database)}"
