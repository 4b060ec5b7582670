"""Build a chain from the list of stages in YAML, with every check that needs no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from operators.base import BATCH_SCHEMA, Operator, Place
from operators.chain.chain import Chain
from operators.chain.groupings import fitted_to_created
from operators.chain.resolve import resolve_stage
from operators.chain.stage import RunOptions, Stage, error_at_stage, identify, name_among
from operators.data_juicer.recipe import expand
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError, RftError, TimeLimitError, refuse
from rftdata.pipeline.label_columns import label_column, label_field, label_kinds
from rftdata.user_code.time_limits import DEFAULT_S, LOADING_S, call


def build_chain(
    spec: Sequence[Mapping[str, object]] | None,
    base_dir: Path | None = None,
    *,
    min_group_size: int = 1,
    require_reward: bool = True,
    schema: pa.Schema = BATCH_SCHEMA,
    reads_labels: bool = True,
) -> Chain:
    """Build a chain from the YAML list of stages, with every check that needs no data.

    Args:
        spec: single-key mappings {stage name: arguments}; None or [] is the chain that keeps everything. The key `run` among the
            arguments sets how the stage is run: batch_rows, concurrency, retries, timeout_s.
        base_dir: folder of the configuration file; `./file.py:attr` is relative to it.
        min_group_size: see `Chain`.
        require_reward: see `Chain`.
        schema: the columns that batches will have, without those of labels.
        reads_labels: whether stages may read labels.

    Raises:
        PluginError: a stage name is unknown, or the stage does not load.
        ConfigError: wrong arguments or a missing column; names the stage and its position (from 1).
        TimeLimitError: a stage whose file, constructor or query exceeds its time limit.
        SeveralErrors: several stages do not load.
    """
    operators = _load_stages(spec, base_dir)
    folder, names = base_dir or Path.cwd(), [name for name, _, _ in operators]
    stages: list[Stage] = []
    batch_schema = schema
    kinds: set[str] = set()
    for index, (name, operator, options) in enumerate(operators, start=1):
        with _named(index, name):
            unique_name = name_among(name, names[: index - 1])
            operator.join_chain(Place(unique_name, folder, [behind for _, behind, _ in operators[index:]]))
            _check_rowwise(operator, options)
            _check_questions(operator, stages)
            if reads_labels:
                added = label_kinds(operator.label_columns() - set(schema.names))
                kinds.update(added)
                schema, batch_schema = _with_labels(schema, added), _with_labels(batch_schema, added)
            schema = _validate(index, name, operator, schema)
        stages.append(identify(index, name, operator, options, stages))
    return Chain(fitted_to_created(stages, batch_schema), min_group_size, require_reward, sorted(kinds))


def _with_labels(schema: pa.Schema, kinds: Sequence[str]) -> pa.Schema:
    """Return the columns with those of kinds of labels."""
    for kind in kinds:
        schema = schema.append(label_field(label_column(kind)))
    return schema


def _load_stages(
    spec: Sequence[Mapping[str, object]] | None, base_dir: Path | None
) -> list[tuple[str, Operator, RunOptions]]:
    """Load the operator of every stage; a stage that does not load keeps none of the others from being tried."""
    operators: list[tuple[str, Operator, RunOptions]] = []
    errors: list[RftError] = []
    index = 0
    for place, entry in enumerate(_entries(spec), start=1):
        try:
            name, args = _name_and_args(place, entry)
            try:
                parts = expand(name, args, base_dir)
            except RftError as error:
                raise error_at_stage(place, name, error) from error
        except RftError as error:
            errors.append(error)
            index += 1
            continue
        # The operators of a recipe are separate stages, and counted as such.
        for name, args in parts:
            index += 1
            try:
                with _named(index, name):
                    args, options = _options(args)
                    operators.append((name, _resolve(index, name, args, base_dir), options))
            except RftError as error:
                errors.append(error)
    refuse(errors)
    return operators


@contextlib.contextmanager
def _named(index: int, name: str) -> Iterator[None]:
    """Add the stage's name to errors."""
    try:
        yield
    except TimeLimitError:
        raise  # it names the stage itself
    except RftError as error:
        raise error_at_stage(index, name, error) from error


def _resolve(index: int, name: str, args: object, base_dir: Path | None) -> Operator:
    """Import the operator's file and call its constructor."""
    what = f"building stage {index} of the pipeline ({name})"
    return call(lambda: resolve_stage(name, args, base_dir), LOADING_S, what, cap=False)


def _validate(index: int, name: str, operator: Operator, schema: pa.Schema) -> pa.Schema:
    """Return the columns after the stage. For this a query runs on an empty table, also under a time limit."""
    what = f"checking stage {index} of the pipeline ({name}) on a batch without rows"
    return call(lambda: operator.validate_schema(schema), DEFAULT_S, what)


def _options(args: object) -> tuple[object, RunOptions]:
    """Separate a stage's own arguments from the options for running it."""
    if not isinstance(args, Mapping) or "run" not in args:
        return args, RunOptions()
    try:
        options = parse_section(RunOptions, args["run"])
    except ConfigError as error:
        raise error.about("run") from error
    return {key: value for key, value in args.items() if key != "run"}, options


def _check_rowwise(operator: Operator, options: RunOptions) -> None:
    if not operator.rowwise and (options.concurrency > 1 or options.batch_rows is not None):
        raise ConfigError(
            "this stage sees whole groups, so its batches cannot be cut",
            value={"run": options.model_dump(exclude_defaults=True)},
            allowed="run: {retries: N, timeout_s: SECONDS}",
            todo="leave run.batch_rows and run.concurrency out",
        )


def _check_questions(operator: Operator, before: Sequence[Stage]) -> None:
    """Refuse two stages with a question of the same name: an answer counts for the name, so the second stage would take the first's."""
    for stage in before:
        twice = (operator.asks or frozenset()) & (stage.operator.asks or frozenset())
        if twice:
            raise ConfigError(
                f"asks a question of a name that stage {stage.index} ({stage.name}) asks already",
                value=min(twice),
                todo="set another name with the argument name",
            )


def _entries(spec: object) -> Sequence[object]:
    if spec is None:
        return []
    if isinstance(spec, str | Mapping) or not isinstance(spec, Sequence):
        raise ConfigError(
            "a pipeline is not a list of stages",
            value=spec,
            allowed="a list of {stage name: arguments}",
            todo="put '- ' before each stage",
        )
    return spec


def _name_and_args(index: int, entry: object) -> tuple[str, object]:
    if isinstance(entry, str):
        return entry, None
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(
            f"stage {index} of the pipeline is not one stage name with its arguments",
            value=entry,
            allowed="one {stage name: arguments} per list entry",
            todo="start each stage with its own '- ' and indent its arguments below its name",
        )
    name, args = next(iter(entry.items()))
    return str(name), args
