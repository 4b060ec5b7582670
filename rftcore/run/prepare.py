"""Preparation of a run from a configuration: checked plug-ins, loaded tasks, a row in `rft.run`.

Mistakes in a configuration are found here, before a process is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rftcore.algorithms.requirements import (
    check_inputs,
    check_made,
    check_models,
    check_rollouts,
    check_sampling,
    check_selected,
    check_source,
    check_steps,
)
from rftcore.checks.task_sources import check_before_buffer
from rftcore.config.run import RunConfig
from rftcore.engines import ENGINES
from rftcore.installation.packages import check_environment
from rftcore.monitor import MONITORS
from rftcore.resolved import ResolvedRun
from rftcore.run.gpus import local_gpus, this_machine
from rftcore.run.model_checks import check_models_fit
from rftcore.run.placement import place_run
from rftcore.run.selections import refuse_untrainable
from rftcore.task_pipeline.pipeline import load_tasks
from rftcore.workflows import check_workflow_args
from rftdata.attempts.run_models import record_models
from rftdata.attempts.sampling import checked_formula
from rftdata.attempts.stored_selection import Selection, num_steps, select
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError
from rftdata.run import Run
from rftdata.uri import redacted


def check_plugins(resolved: ResolvedRun) -> None:
    """Load everything that the configuration names, except its model.

    Raises:
        PluginError, ConfigError: something does not exist, cannot be loaded or does not fit.
    """
    config = resolved.config
    _ = resolved.rewards
    check_workflow_args(config.explorer.workflow, resolved.workflow, 3, config.explorer.workflow_args)
    check_selectors(resolved)
    # Registered engines and monitors may import large packages, so only the roles that use them load them.
    if config.explorer.engine not in ENGINES.names():
        _ = resolved.engine_class
    if not {*config.monitor} <= {*MONITORS.names()}:
        _ = resolved.monitors
    resolved.config.trainer.check_backend(resolved.config.base_dir)
    resolved.engine(worker_index=0)
    chain, _, algorithm = resolved.experience_chain, resolved.task_chain, resolved.algorithm
    for taskset in config.tasks:
        if taskset.group_size is not None and taskset.group_size < algorithm.min_group_size:
            raise ConfigError(
                f"group_size of the taskset {taskset.name!r} is too small for {algorithm.name}, which compares rollouts of one group",
                value=taskset.group_size,
                allowed=f"{algorithm.min_group_size} or more",
            )
    check_models(algorithm, bool(config.eval.tasks or config.eval.test))
    if config.steps is not None:
        check_steps(algorithm, config.steps)
    check_sampling(algorithm, config.explorer)
    check_source(algorithm, config.sampling.source is not None)
    if config.run.mode == "both" and config.sampling.source is None:
        check_rollouts(algorithm, config.explorer, chain)
        check_inputs(algorithm, config.explorer)
        check_made(algorithm, config.algorithm.smallest_group, chain)


def check_selectors(resolved: ResolvedRun) -> None:
    """Load every selector and try its arguments.

    Raises:
        PluginError, ConfigError: something does not exist, cannot be loaded or does not fit.
    """
    config, selectors = resolved.config, resolved.selectors
    for taskset in config.tasks:
        chosen = taskset.selector or config.selector
        screening = selectors[taskset.name].screening
        size = taskset.group_size or config.algorithm.group_size
        if screening is not None and screening.rollouts >= size:
            raise ConfigError(
                f"the selector {chosen.type!r} screens groups of the taskset {taskset.name!r} by their first rollouts, but they have no further rollouts",
                value=screening.rollouts,
                allowed=f"1 to {size - 1}, below the group's size",
                todo="lower screen_rollouts, or raise group_size",
            )


def check_run(resolved: ResolvedRun) -> None:
    """Check everything that a run needs except its buffer; check its tasks too if the buffer does not exist yet.

    Raises:
        PluginError, ConfigError, ModelError, TaskSourceError, OperatorError: what is wrong.
        EnvironmentMismatchError: packages are missing here or incompatible with each other.
    """
    check_environment(resolved.config.explorer.engine)
    check_plugins(resolved)
    check_before_buffer(resolved)
    check_max_tokens(resolved)  # fetches the model now, because a run whose model does not exist must not be stored
    check_models_fit(resolved)


def check_gpus(resolved: ResolvedRun) -> None:
    """Refuse a run that needs more GPUs than this machine has, unless a cluster runs it.

    Raises:
        ConfigError: see `place`.
    """
    if not os.environ.get("RAY_ADDRESS"):
        place_run(resolved, [this_machine(len(local_gpus()))])


def check_max_tokens(resolved: ResolvedRun) -> None:
    """Refuse an explorer.max_tokens that leaves no room for a prompt. With the default, the context limits responses.

    Raises:
        ModelError: the model does not exist.
        ConfigError: explorer.max_tokens is too large.
    """
    config, context = resolved.config, resolved.context_length
    explorer = config.explorer
    if context is None or explorer.max_tokens < context or "max_tokens" not in explorer.model_fields_set:
        return
    if config.has_explorer and explorer.engine != "none":
        raise ConfigError(
            "explorer.max_tokens leaves no room for a prompt in the engine's context",
            value=explorer.max_tokens,
            allowed=f"up to {context - 1}, less the prompt (its context is {context} tokens)",
            todo="lower explorer.max_tokens, or raise explorer.engine_args.context_length if the model allows it",
        )


def prepare_run(
    resolved: ResolvedRun,
    buffer: Buffer,
    *,
    resumed: Run | None = None,
    parent: Run | None = None,
    before_storing: Callable[[], object] = lambda: None,
    report: Callable[[str], object] = lambda sentence: None,
) -> Run:
    """Load a checked configuration's tasksets, and store a new run or the changed settings of a resumed one.

    Args:
        resumed: the run to continue; None for a new one.
        parent: the run from whose checkpoint a new one starts.
        before_storing: called just before the run is stored.
        report: called with a sentence about what a stored selection leaves out.

    Raises:
        ConfigError: the database rejects the priority formula, or the run is too short for its algorithm.
        TaskSourceError: a taskset cannot be loaded, or the task pipeline excludes all its tasks.
    """
    config = resolved.config
    checked_formula(buffer.database, config.sampling.priority.formula)
    pipeline_version = resolved.experience_chain.version
    load_tasks(resolved, buffer)
    stored = stored_config(config)
    if resumed is None:
        selected = select_source(resolved, buffer)
        if selected is not None and (sentence := selected.describe_dropped()) is not None:
            report(sentence)
        steps = planned_steps(config, len(selected.item_ids) if selected else None)
        check_steps(resolved.algorithm, steps)
        before_storing()
        run = buffer.create_run(
            name=config.run.name,
            config=stored,
            seed=config.run.seed,
            steps=steps,
            pipeline_version=pipeline_version,
            mode="both" if config.has_explorer else "train",
            selected=selected,
            epochs=config.sampling.epochs,
            parent=parent,
        )
    else:
        _refuse_another_source(config, resumed)
        steps = planned_steps(config, resumed.source_rows)
        check_steps(resolved.algorithm, steps)
        before_storing()
        run = resumed.go_on(stored, steps=steps, pipeline_version=pipeline_version)
    record_models(run, [(model.used_as, model.folder) for model in resolved.models])
    return run


def select_source(resolved: ResolvedRun, buffer: Buffer) -> Selection | None:
    """Return the rows that `sampling.source` selects now; None for a run that samples for itself.

    Raises:
        QueryError: see `rftdata.attempts.stored_selection.select`.
        ConfigError: the algorithm cannot learn from the selected rows; see also `refuse_untrainable`.
    """
    source = resolved.config.sampling.source
    if source is None:
        return None
    sampling = resolved.config.sampling
    exponent = sampling.priority.exponent if sampling.order == "prioritized" else None
    selected = select(
        buffer.database,
        source.sql,
        pin_labels=source.pin_labels,
        priority_exponent=exponent,
        include_dropped=source.include_dropped,
        min_rollouts=resolved.algorithm.min_group_size,
    )
    check_selected(resolved.algorithm, selected.kind)
    refuse_untrainable(resolved.algorithm, buffer, selected)
    return selected


def planned_steps(config: RunConfig, num_selected: int | None) -> int:
    """Return the trainer steps of a run; `num_selected` is the number of rows of its stored selection, or None.

    Raises:
        ConfigError: there are more steps than the selection provides.
    """
    if num_selected is None:
        assert config.steps is not None  # the configuration's own check
        return config.steps
    batch, epochs = config.trainer.batch_groups, config.sampling.epochs
    last = num_steps(num_selected, batch, epochs)
    if config.steps is not None and config.steps > last:
        raise ConfigError(
            f"steps exceeds what the stored selection provides: {num_selected} rows, trainer.batch_groups {batch}, sampling.epochs {epochs}",
            value=config.steps,
            allowed=f"up to {last}",
            todo="raise sampling.epochs, or omit steps",
        )
    return config.steps or last


def _refuse_another_source(config: RunConfig, resumed: Run) -> None:
    """Refuse changes that would give a run on a stored selection other batches.

    Raises:
        ConfigError: the selection or the division into batches has changed.
    """
    source, stored = config.sampling.source, resumed.source_sql is not None
    weighted = config.sampling.order == "prioritized"
    facts = {
        "sampling.source.sql": (source and source.sql, resumed.source_sql),
        "sampling.source.pin_labels": (
            source and source.pin_labels,
            resumed.label_cut is not None if stored else None,
        ),
        "sampling.source.include_dropped": (
            source and source.include_dropped,
            resumed.config["sampling"]["source"].get("include_dropped", False) if stored else None,
        ),
        "sampling.epochs": (source and config.sampling.epochs, resumed.source_epochs),
        "sampling.order": (source and weighted and "prioritized", resumed.source_weighted and "prioritized"),
        "sampling.priority.exponent": (
            (source and weighted and config.sampling.priority.exponent) or None,
            (resumed.source_weighted and resumed.config["sampling"]["priority"]["exponent"]) or None,
        ),
        "trainer.batch_groups": (
            source and config.trainer.batch_groups,
            (stored and int(resumed.config["trainer"]["batch_groups"])) or None,
        ),
    }
    for key, (asked, begun) in facts.items():
        if asked != begun:
            raise ConfigError(
                f"the run {resumed.name!r} continues with the batches it began with, but {key} has changed",
                value=asked,
                allowed=str(begun),
                todo="set it back, or start a new run from the checkpoint",
            )


def find_resumable(config: RunConfig, buffer: Buffer, name: str | None) -> Run:
    """Return the run to continue: the named one, else the newest of the configuration's name.

    Raises:
        QueryError: there is none.
        ConfigError: the run was imported.
    """
    found = buffer.runs(config.run.name, imported=False) if name is None else []
    return found[0] if found else named_resumable(buffer, name or config.run.name)


def named_resumable(buffer: Buffer, name: str | None) -> Run:
    """Return the run of a name or an id, by default the newest that was not imported.

    Raises:
        QueryError: there is none.
        ConfigError: the run was imported.
    """
    own = buffer.runs(imported=False) if name is None else []
    run = own[0] if own else buffer.find_run(name)
    if run.was_imported:
        raise ConfigError(
            f"the run {run.name!r} was imported: it has no checkpoint and no configuration with which it could continue",
            todo="start a run of another name; `sampling.source` in its configuration trains on what was imported (rft docs train-on-chats)",
        )
    return run


@dataclass(frozen=True)
class GoBack:
    """The point from which a resumed run continues instead of its newest checkpoint.

    Attributes:
        step: the trainer step; None for the newest with a checkpoint (a fork only).
        keep_rollouts: whether groups planned after the step are used.
        fork: name of the new run that begins there; None to take the run itself back.
    """

    step: int | None
    keep_rollouts: bool = False
    fork: str | None = None


def take_back(resolved: ResolvedRun, buffer: Buffer, run: Run, go_back: GoBack) -> tuple[ResolvedRun, Run]:
    """Take a stored run, or a new fork of it, to an earlier step; return its configuration and the run.

    Raises:
        ConfigError: there is no such checkpoint, or the configuration has no step beyond it.
    """
    steps = planned_steps(resolved.config, run.source_rows)
    if go_back.step is not None and go_back.step >= steps:
        raise ConfigError(
            "no step would be left to train after going back",
            value=f"--at-step {go_back.step} with steps: {steps}",
            todo="name an earlier step, or raise steps: --set steps=N",
        )
    if go_back.fork is None:
        assert go_back.step is not None
        buffer.rewind(run, go_back.step, keep_rollouts=go_back.keep_rollouts)
        return resolved, run.refreshed()
    forked = resolved.renamed(go_back.fork)
    new = buffer.fork(
        run,
        name=go_back.fork,
        step=go_back.step,
        keep_rollouts=go_back.keep_rollouts,
        config=stored_config(forked.config),
        steps=steps,
        pipeline_version=forked.experience_chain.version,
    )
    return forked, new


def has_finished(config: RunConfig, run: Run) -> bool:
    """Return whether a stored run has done all steps of the configuration."""
    return run.status == "finished" and run.planned_steps >= planned_steps(config, run.source_rows)


def stored_config(config: RunConfig) -> dict[str, Any]:
    """Return the configuration for the run's row: resolved, with the folder of its relative paths, without passwords."""
    dumped = config.model_dump(mode="json")
    dumped["buffer"]["uri"] = redacted(config.buffer.uri)
    return {**dumped, "base_dir": str(config.base_dir)}
