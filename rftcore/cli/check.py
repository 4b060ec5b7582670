"""`rft check`: resolve and validate a configuration without starting anything."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.roles import ConfigArgument
from rftcore.cli.run import SetOption, configuration
from rftcore.cli.session import ConfigBufferOption, JsonOption
from rftdata.errors import BufferUnavailableError, ConfigError, ModelError, RftError

if TYPE_CHECKING:
    import pyarrow as pa

    from operators.chain import Chain
    from rftcore.config import RunConfig
    from rftcore.feature_checks import FeatureCheck
    from rftdata.config import TasksetConfig
    from rftdata.database import Database


def check(
    config: ConfigArgument,
    overrides: SetOption = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also open the model, the task sources, the database, and what stages need.")
    ] = False,
    buffer: ConfigBufferOption = None,
    as_json: JsonOption = False,
) -> None:
    """Validate a configuration and every plug-in it names; print it with all defaults filled in."""
    import yaml

    from rftcore.cli.output import print_json, warn

    resolved = configuration(config, overrides, buffer)
    from rftcore.launch.prepare import check_plugins

    chain = check_plugins(resolved)
    for sentence in _open_inputs(resolved, chain) if deep else ():
        warn(sentence)
    plain = resolved.model_dump(mode="json")
    if as_json:
        print_json(plain)
    else:
        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
    warn(f"{config} is valid" + ("" if deep else "; --deep also opens model, tasks, database and what stages need"))


def _open_inputs(config: RunConfig, experience_chain: Chain) -> Iterator[str]:
    """Open what the run will read; a sentence for each.

    Raises:
        ModelError, TaskSourceError, BufferUnavailableError: what cannot be opened.
        PluginError, ConfigError: what a stage needs is not there, or refuses the stage's arguments.
        QueryError, ConfigError: a priority formula that the database does not take, a selection that cannot be trained on, tasks without
            what their selector chooses by.
    """
    from rftcore.feature_checks import FeatureCheck
    from rftcore.task_pipeline import build_task_chain

    chain = build_task_chain(config)
    yield _describe_model(config)
    with _stored(config) as database:
        for taskset in config.tasks:
            yield from _describe_tasks(config, taskset, FeatureCheck(config, taskset, chain, database))
        for taskset in (*config.eval.tasks, *config.eval.test):
            yield from _describe_tasks(config, taskset)
        yield from _describe_stages(config, {"task": chain, "experience": experience_chain}, database)
    yield _describe_database(config)
    if config.sampling.source is not None:
        yield _describe_selection(config)


def _describe_tasks(config: RunConfig, taskset: TasksetConfig, features: FeatureCheck | None = None) -> Iterator[str]:
    from rftcore.task_checks import no_task
    from rftdata.tasks import read_tasks
    from rftdata.tasks.query import asks_buffer
    from rftdata.tasks.rows import Repeats

    if asks_buffer(taskset):
        yield f"taskset {taskset.name}: its query on the buffer is asked when it is loaded"
        return
    # To the end: the run reads every row, and refuses the source for any of them.
    num_tasks, first, repeats = 0, None, Repeats()
    for task in read_tasks(taskset, config.base_dir, repeats=repeats):
        num_tasks, first = num_tasks + 1, first or task
        if features is not None:
            features.see(task)
    if first is None:
        raise no_task(taskset)
    prompt = str(first["payload"].get("prompt") or first["payload"].get("messages"))
    yield f"taskset {taskset.name}: {num_tasks:,} tasks, the first prompt is {prompt[:80]!r}"
    if repeats.rows:
        yield f"taskset {taskset.name}: {repeats.sentence()}"
    if features is not None:
        yield from features.verdict()


def _describe_stages(config: RunConfig, chains: Mapping[str, Chain], database: Database | None) -> Iterator[str]:
    """Make every stage ready for its first batch, as the processes of a run do when they start."""
    from operators.base import StageContext

    context = StageContext(
        config.base_dir, model_path=config.model.path, generate=_ask_nobody,
        read_taskset=functools.partial(_task_texts, config, database),
    )  # fmt: skip
    for name, chain in chains.items():
        try:
            chain.prepare(context)
        except RftError as error:
            raise error.about(f"pipelines.{name}") from error
        finally:
            chain.close()
        if chain.stages:
            yield f"pipelines.{name}: {', '.join(stage.name for stage in chain.stages)}: ready"


def _ask_nobody(*_: object) -> list[str]:
    raise AssertionError("a stage asks the policy before its first batch")


def _task_texts(config: RunConfig, database: Database | None, name: str) -> pa.Table:
    """The tasks of a set from its source where the configuration has one of that name, else from the buffer.

    Raises:
        ConfigError: neither has.
    """
    from rftdata.tasks import read_tasks
    from rftdata.tasks.loading import taskset_texts
    from rftdata.tasks.verdicts import source_batch

    tasksets = (*config.tasks, *config.eval.tasks, *config.eval.test)
    for taskset in tasksets:
        if taskset.name == name:
            table: pa.Table = source_batch(name, list(read_tasks(taskset, config.base_dir, database)))
            return table.select(["task_key", "prompt", "answer"])
    if database is None:
        known = ", ".join(taskset.name for taskset in tasksets)
        raise ConfigError("there is no buffer yet that could hold this set", value=name, allowed=known)
    return taskset_texts(database, name)


@contextmanager
def _stored(config: RunConfig) -> Iterator[Database | None]:
    """The database of the configuration's buffer; None where that is still to be made."""
    import rftdata
    from rftdata.buffer import exists

    if not exists(config.buffer):
        yield None
        return
    with rftdata.open(config.buffer, create=False, application="rft check") as found:
        yield found.database


def _describe_selection(config: RunConfig) -> str:
    """What the run would train on if it were made now."""
    import rftdata
    from rftcore.launch.prepare import planned_steps, select_source

    with rftdata.open(config.buffer, create=False, application="rft check") as found:
        selected = select_source(config, found)
    assert selected is not None
    steps = planned_steps(config, len(selected.item_ids))
    return f"sampling.source: {len(selected.item_ids):,} {selected.kind}s, {steps} steps, hash {selected.content_hash[:12]}"


def _describe_model(config: RunConfig) -> str:
    from rftcore.launch.prepare import model_folder

    folder = model_folder(config)
    from transformers import AutoConfig, AutoTokenizer

    try:
        model = AutoConfig.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:400]
        raise ModelError(f"the model in {folder} does not open: {reason}", todo="correct model.path") from error
    return f"model {config.model.path}: a {model.model_type} with {len(tokenizer):,} tokens, in {folder}"


def _describe_database(config: RunConfig) -> str:
    import rftdata
    from rftdata.buffer import exists
    from rftdata.database import schema_version
    from rftdata.sampling import checked_formula

    buffer, formula = config.buffer, config.sampling.priority.formula
    if not exists(buffer):
        later = "; sampling.priority.formula is checked there when the run starts" if formula else ""
        return f"buffer: {_makeable(Path(buffer.uri).resolve())} will be made{later}"
    with rftdata.open(buffer, create=False, application="rft check") as found:
        checked_formula(found.database, formula)
        return f"buffer: {found.location} answers, schema {schema_version(found.database)}"


def _makeable(folder: Path) -> Path:
    """The folder, if it can be made; nothing is written to find out.

    Raises:
        BufferUnavailableError: what is there already is no folder, or not ours to write.
    """
    above = next(path for path in (folder, *folder.parents) if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise BufferUnavailableError(
            f"the buffer's folder cannot be made or written: {above} is {'not writable' if above.is_dir() else 'no folder'}",
            value=str(folder),
            todo="correct buffer.uri",
        )
    return folder
