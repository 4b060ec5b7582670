"""Preparation of a checked run: its tasks loaded, its row in `rft.run` stored or changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rftcore.checks.algorithm import check_steps
from rftcore.checks.selections import planned_steps, select_source
from rftcore.config.run import RunConfig
from rftcore.pipeline.panels import check_panels
from rftcore.pipeline.suggestions import check_suggestions
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata.annotations.kinds import define_kinds
from rftdata.attempts.run_models import record_models
from rftdata.attempts.sampling import checked_formula
from rftdata.buffer import Buffer
from rftdata.errors import ConfigError
from rftdata.pipeline.label_columns import check_kinds
from rftdata.run import Run
from rftdata.uri import redacted

_SHARED = (
    "algorithm.group_size",
    "explorer.max_refill",
    "sampling",
    "steps",
    "sync.interval",
    "sync.offset",
    "trainer.batch_groups",
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
        report: called with sentences about what a stored selection leaves out, and about kinds of labels that are new or changed.

    Raises:
        ConfigError: the database rejects the priority formula, or the run is too short for its algorithm.
        TaskSourceError: a taskset cannot be loaded, or the task pipeline excludes all its tasks.
    """
    config = resolved.config
    _load(resolved, buffer, report)
    if resumed is None:
        selected = select_source(resolved, buffer)
        if selected is not None and (sentence := selected.describe_dropped()) is not None:
            report(sentence)
        steps = planned_steps(config, len(selected.item_ids) if selected else None)
        if not config.only_evaluates:
            check_steps(resolved.algorithm, steps)
        before_storing()
        run = buffer.create_run(
            name=config.run.name,
            config=stored_config(config),
            seed=config.run.seed,
            steps=steps,
            pipeline_version=resolved.experience_chain.version,
            mode=_mode(config),
            selected=selected,
            parent=parent,
        )
    else:
        steps = _steps_of(resolved, resumed)
        before_storing()
        run = _continue(resolved, resumed, steps)
    _record_models(resolved, run)
    return run


def _mode(config: RunConfig) -> str:
    if config.only_evaluates:
        return "eval"
    return "both" if config.has_explorer else "train"


def prepare_at_step(
    resolved: ResolvedRun,
    buffer: Buffer,
    stored: Run,
    go_back: GoBack,
    *,
    before_storing: Callable[[], object] = lambda: None,
    report: Callable[[str], object] = lambda sentence: None,
) -> tuple[ResolvedRun, Run]:
    """Load a checked configuration's tasksets, and then take a stored run, or a new fork of it, to an earlier step.

    Mistakes are found before: they would leave a fork, or a run without its later steps, and no process to continue it.

    Returns:
        the configuration, with the fork's name, and the run that continues.

    Raises:
        ConfigError: there is no such checkpoint, the configuration has no step beyond it, or see `prepare_run`.
        TaskSourceError: see `prepare_run`.
    """
    begun = resolved if go_back.fork is None else resolved.renamed(go_back.fork)
    of_fork = stored if go_back.fork is None else replace(stored, config=stored_config(begun.config))
    steps = _steps_of(begun, of_fork)
    if go_back.step is not None and go_back.step >= steps:
        raise ConfigError(
            "no step would be left to train after going back",
            value=f"--at-step {go_back.step} with steps: {steps}",
            todo="name an earlier step, or raise steps: --set steps=N",
        )
    _load(begun, buffer, report)
    before_storing()
    run = _continue(begun, _taken_back(begun, buffer, stored, go_back, steps), steps)
    _record_models(begun, run)
    return begun, run


def _load(resolved: ResolvedRun, buffer: Buffer, report: Callable[[str], object]) -> None:
    checked_formula(buffer.database, resolved.config.sampling.priority.formula)
    _ = resolved.experience_chain  # is built before anything is stored
    kinds = [kind.definition for kind in resolved.config.labels.kinds]
    for made in define_kinds(buffer, kinds, author=f"run {resolved.config.run.name}"):
        what = "is new" if made.version == 1 else f"was changed: people label with version {made.version} from now on"
        report(f"the kind of label {made.kind} {what}")
    check_kinds(buffer.database, resolved.experience_chain.label_kinds)
    check_suggestions(buffer, resolved.experience_chain)
    check_panels(buffer, resolved.experience_chain)
    load_tasks(resolved, buffer)


def _steps_of(resolved: ResolvedRun, stored: Run) -> int:
    """Return the number of steps with which a stored run continues."""
    _refuse_another_source(resolved.config, stored)
    steps = planned_steps(resolved.config, stored.source_rows)
    if not resolved.config.only_evaluates:
        check_steps(resolved.algorithm, steps)
    return steps


def continue_by_hand(resolved: ResolvedRun, run: Run) -> Run:
    """Store the settings with which a trainer that was started by hand continues an ended run; return the updated run.

    Raises:
        ConfigError: they would give a run on a stored selection other batches.
        FencedError: another trainer is at work.
    """
    return _continue(resolved, run, _steps_of(resolved, run))


def shared_settings_that_differ(config: RunConfig, run: Run) -> dict[str, tuple[Any, Any]]:
    """Return the settings that all roles of a run must share and that differ from those stored with it: key -> (given, stored).

    Explorers plan the groups that the trainer draws. If they count differently, each waits for the other.
    """
    given = stored_config(config)
    pairs = ((key, _value_at(given, key), _value_at(run.config, key)) for key in _SHARED)
    return dict(leaf for pair in pairs for leaf in _differing_leaves(*pair))


def _value_at(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if isinstance(config, dict) else None
    return config


def _differing_leaves(key: str, given: Any, stored: Any) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if isinstance(given, dict) and isinstance(stored, dict):
        for name in given.keys() & stored.keys():
            yield from _differing_leaves(f"{key}.{name}", given[name], stored[name])
    elif stored is not None and given != stored:
        yield key, (given, stored)


def _continue(resolved: ResolvedRun, run: Run, steps: int) -> Run:
    version = resolved.experience_chain.version
    return run.continue_with(stored_config(resolved.config), steps=steps, pipeline_version=version)


def _record_models(resolved: ResolvedRun, run: Run) -> None:
    record_models(run, [(model.used_as, model.folder) for model in resolved.models])


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
    """Return the run of a name or an id, by default the newest that was not imported, a training run if there is one.

    Raises:
        QueryError: there is none.
        ConfigError: the run was imported.
    """
    own = buffer.runs(imported=False) if name is None else []
    own.sort(key=lambda run: run.mode == "eval")  # stable: the newest of each kind first
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


@dataclass(frozen=True)
class Beginning:
    """Where a run begins.

    Attributes:
        resume: whether it continues a stored run.
        name: of the run to resume; None for the newest of the configuration's name.
        go_back: the point from which it resumes instead of the newest checkpoint.
        parent: the run from whose checkpoint a new run starts.
    """

    resume: bool = False
    name: str | None = None
    go_back: GoBack | None = None
    parent: Run | None = None


def _taken_back(resolved: ResolvedRun, buffer: Buffer, run: Run, go_back: GoBack, steps: int) -> Run:
    """Take a stored run to an earlier step, or begin a fork of it there; return the run that continues."""
    if go_back.fork is None:
        assert go_back.step is not None
        buffer.rewind(run, go_back.step, keep_rollouts=go_back.keep_rollouts)
        return run.refreshed()
    return buffer.fork(
        run,
        name=go_back.fork,
        step=go_back.step,
        keep_rollouts=go_back.keep_rollouts,
        config=stored_config(resolved.config),
        steps=steps,
        pipeline_version=resolved.experience_chain.version,
    )


def has_finished(config: RunConfig, run: Run) -> bool:
    """Return whether a stored run has done all steps of the configuration."""
    return run.status == "finished" and run.planned_steps >= planned_steps(config, run.source_rows)


def stored_config(config: RunConfig) -> dict[str, Any]:
    """Return the configuration for the run's row: resolved, with the folder of its relative paths, without passwords."""
    dumped = config.model_dump(mode="json")
    dumped["buffer"]["uri"] = redacted(config.buffer.uri)
    return {**dumped, "base_dir": str(config.base_dir)}
