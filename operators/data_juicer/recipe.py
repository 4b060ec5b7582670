"""A whole Data-Juicer recipe as an entry of a chain: each of its operators becomes a separate stage.

    - data_juicer: {recipe: recipe.yaml}
    - data_juicer: {process: [{clean_links_mapper: {}}, {text_length_filter: {min_len: 10}}], mode: ray}
    - data_juicer: {recipe: recipe.yaml, keys: {text: prompt, images: metadata.images}}

Of a recipe's settings, the ones that name columns (`text_keys`, `image_key`, …), `executor_type` and `process` are used.
Settings for input, output, caches, checkpoints and processes do not apply here; the ignored settings are logged.
`keys` maps a column's name in the recipe to its name in the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from operators.base import StageConfig
from operators.data_juicer.catalogue import AGGREGATED, COLUMN_ARGUMENTS, DATA_KEYS, facts, operator_names
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError
from rftdata.yaml_text import read_yaml

NAME = "data_juicer"
"""The stage name of a recipe."""

logger = logging.getLogger(__name__)


class RecipeConfig(StageConfig):
    """`recipe`: a Data-Juicer YAML file. `process`: a list of operators in place of a file. `mode`: default or ray; without it the recipe's
    `executor_type`. `prefix`: prefix of the columns that hold statistics. `keys`: name of a column in the recipe -> its name in the
    batch. `run`: how each of its stages is run, see the key `run` at the end."""

    recipe: str | None = None
    process: list[Any] | None = None
    mode: Literal["default", "ray"] | None = None
    prefix: str = "dj_"
    keys: dict[str, str] = Field(default_factory=dict)
    run: dict[str, Any] = Field(default_factory=dict)


def expand(name: str, args: object, base_dir: Path | None) -> list[tuple[str, object]]:
    """Return the stages that one entry of a chain stands for: the entry itself, unless it is a recipe.

    Raises:
        ConfigError: the recipe cannot be read, or is not a recipe.
    """
    if name != NAME:
        return [(name, args)]
    config = parse_section(RecipeConfig, args)
    if (config.recipe is None) == (config.process is None):
        raise ConfigError(
            "it takes a recipe file or a list of operators", allowed="recipe: FILE, or process: [{operator: arguments}]"
        )
    settings = {"process": config.process} if config.recipe is None else _read(config.recipe, base_dir)
    mode = config.mode or ("ray" if str(settings.get("executor_type", "")).startswith("ray") else "default")
    return [
        _stage(place, entry, settings, config, mode)
        for place, entry in enumerate(_process(settings, config.recipe), start=1)
    ]


def _read(recipe: str, base_dir: Path | None) -> Mapping[str, Any]:
    path = (base_dir or Path.cwd()) / recipe
    try:
        settings = read_yaml(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError("the recipe cannot be read", value=str(path), todo=error.strerror) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the recipe is not YAML: {error}", value=str(path)) from error
    if not isinstance(settings, Mapping):
        raise ConfigError(
            "the recipe is not a mapping", value=str(path), allowed="a Data-Juicer configuration with the key process"
        )
    used = {"process", "executor_type", "text_keys", *DATA_KEYS}
    ignored = sorted(str(key) for key in settings if key not in used)
    if ignored:
        logger.warning("%s: these settings have no effect in a chain: %s", recipe, ", ".join(ignored))
    return settings


def _process(settings: Mapping[str, Any], recipe: str | None) -> Sequence[Any]:
    process = settings.get("process")
    if not isinstance(process, list) or not process:
        raise ConfigError(
            "process is not a list of operators",
            value=process if recipe is None else recipe,
            allowed="process: [{operator: arguments}, …]",
        )
    return process


def _stage(
    place: int, entry: object, settings: Mapping[str, Any], config: RecipeConfig, mode: str
) -> tuple[str, object]:
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(f"entry {place} of process is not one operator with its arguments", value=entry)
    name, args = next(iter(entry.items()))
    if name not in operator_names():
        raise ConfigError(
            f"entry {place} of process is not an operator of Data-Juicer",
            value=name,
            todo="put other stages in the chain itself, before or after data_juicer",
        )
    if not isinstance(args, Mapping | None):
        raise ConfigError(f"entry {place} of process ({name}): the arguments are not a mapping", value=args)
    own = _with_columns(str(name), dict(args or {}), settings, config.keys)
    rowwise = facts(str(name)).kind in ("filter", "mapper") and not facts(str(name)).draws
    run = config.run if rowwise else {key: value for key, value in config.run.items() if key == "retries"}
    own = {"prefix": config.prefix, "mode": mode, **own}
    return str(name), {**own, "run": run} if run else own


def _with_columns(
    name: str, args: dict[str, Any], settings: Mapping[str, Any], keys: Mapping[str, str]
) -> dict[str, Any]:
    """Return the arguments with the column names of the batch."""
    operator_facts = facts(name)
    for key, usual in DATA_KEYS.items():
        if key not in operator_facts.data_keys and not operator_facts.reads_all and key not in args:
            continue
        named = args.get(key) or settings.get(key) or (settings.get("text_keys") if key == "text_key" else None)
        if isinstance(named, list):
            named = named[0] if named else None
        wanted = keys.get(named or usual) or (named if named != usual else None)
        args.pop(key, None)
        if wanted:
            args[key] = wanted
    named = COLUMN_ARGUMENTS | (AGGREGATED if operator_facts.kind == "aggregator" else frozenset())
    for argument in named & set(args):
        values = args[argument]
        renamed = [_renamed(value, keys) for value in ([values] if isinstance(values, str) else values)]
        args[argument] = renamed[0] if isinstance(values, str) else renamed
    return args


def _renamed(reference: str, keys: Mapping[str, str]) -> str:
    root, dot, rest = reference.partition(".")
    return keys.get(root, root) + dot + rest
