"""Data-Juicer's operators as listed in `catalogue.json`: names, kinds, arguments, columns and statistics.

The list describes one version of py-data-juicer. It finds a misspelt operator or argument in milliseconds, without importing
Data-Juicer, which costs seconds and hundreds of megabytes and whose operators accept any keyword. scripts/data_juicer_catalogue.py
generates it. Another installed version is refused, since its operators, bounds and statistics may differ.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from rftdata.errors import PluginError

FILE = Path(__file__).with_name("catalogue.json")
PACKAGE = "py-data-juicer"

DATA_KEYS: Mapping[str, str] = {
    "text_key": "text",
    "query_key": "query",
    "response_key": "response",
    "prompt_key": "prompt",
    "system_key": "system",
    "instruction_key": "instruction",
    "history_key": "history",
    "image_key": "images",
    "image_bytes_key": "image_bytes",
    "audio_key": "audios",
    "video_key": "videos",
}
"""Arguments of all operators that name a column, with its default name in Data-Juicer."""

COLUMN_ARGUMENTS = frozenset(
    {"field_key", "input_keys", "knowledge_grounding_key", "messages_key", "context_key", "group_by_keys"}
)
"""Arguments of single operators that name columns."""

AGGREGATED = frozenset({"input_key", "meta_tag_key"})
"""Arguments of aggregators that name a tag; here they may also name a column."""

RUNNING = frozenset(
    {
        "num_proc",
        "batch_size",
        "batch_mode",
        "skip_op_error",
        "auto_op_parallelism",
        "adaptive_batching",
        "turbo",
        "work_dir",
    }
    | {
        "cpu_required",
        "gpu_required",
        "mem_required",
        "num_cpus",
        "num_gpus",
        "memory",
        "runtime_env",
        "ray_execution_mode",
    }
    | {"accelerator", "stats_export_path", "input_columns", "output_columns"}
)
"""Arguments that change where or how an operator runs, but not its results."""

_TYPES = {"double": pa.float64(), "string": pa.string(), "bool": pa.bool_(), "list<double>": pa.list_(pa.float64())}


class Meta(NamedTuple):
    """A tag that a mapper sets: the argument that names it (or ""), its default name, and its type. Anything but text and numbers is JSON text."""

    argument: str
    name: str
    type: pa.DataType


@dataclass(frozen=True)
class Facts:
    """The catalogue entry of one operator.

    Attributes:
        kind: filter, mapper, deduplicator, selector, grouper, aggregator or pipeline.
        arguments: arguments of its constructor; None if it takes any.
        known_arguments: these and the arguments of all operators of its kind; None as above.
        defaults: default values of the arguments, where they are plain values.
        types: Python annotations of the known arguments that can be checked.
        data_keys: which of `DATA_KEYS` it reads.
        columns: other arguments that name columns it reads.
        reads_all: whether it may read any column.
        stats: statistics that a filter computes, in order, with their column types.
        metas: tags that a mapper sets on a row.
        bounds: arguments that its statistics do not depend on.
        splits: whether its decision depends on its statistics alone.
        draws: whether it may draw random numbers.
        asks: whether it can call an endpoint.
        rewrites: whether it may change columns that it reads.
        tags: whether it uses tags at all.
        makes_rows: whether it is a mapper that may return more or fewer rows than it receives.
    """

    name: str
    kind: str
    arguments: tuple[str, ...] | None
    known_arguments: tuple[str, ...] | None
    defaults: Mapping[str, Any]
    types: Mapping[str, str]
    data_keys: frozenset[str]
    columns: frozenset[str]
    stats: Mapping[str, pa.DataType]
    metas: tuple[Meta, ...]
    bounds: frozenset[str]
    reads_all: bool = False
    splits: bool = False
    draws: bool = False
    asks: bool = False
    rewrites: bool = False
    tags: bool = False
    makes_rows: bool = False

    @property
    def plain(self) -> bool:
        """Whether it only reads texts: it draws no random numbers, and runs no user code."""
        return not (self.draws or self.asks or self.reads_all) and self.data_keys == {"text_key"}


@functools.cache
def _catalogue() -> Mapping[str, Any]:
    catalogue: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return catalogue


@functools.cache
def operator_names() -> list[str]:
    """Return the names of all operators, sorted."""
    return sorted(_catalogue()["operators"])


@functools.cache
def facts(name: str) -> Facts:
    """Return an operator's catalogue entry.

    Raises:
        KeyError: no operator has this name.
    """
    entry = dict(_catalogue()["operators"][name])
    kind, arguments = entry.pop("kind"), entry.pop("arguments")
    general: Mapping[str, str] = _catalogue()["general_arguments"][kind]
    described: Mapping[str, Mapping[str, Any]] = arguments or {}
    return Facts(
        name=name,
        kind=kind,
        arguments=None if arguments is None else tuple(arguments),
        known_arguments=None if arguments is None else (*arguments, *general),
        defaults={key: one["default"] for key, one in described.items() if "default" in one},
        types={
            **{key: kind for key, kind in general.items() if kind and key not in described},
            **{key: one["type"] for key, one in described.items() if "type" in one},
        },
        data_keys=frozenset(entry.pop("data_keys", ())),
        columns=frozenset(entry.pop("columns", ())),
        stats={stat: _TYPES[kind] for stat, kind in entry.pop("stats", {}).items()},
        metas=tuple(Meta(argument, meta, _TYPES[kind]) for argument, meta, kind in entry.pop("metas", ())),
        bounds=frozenset(entry.pop("bounds", ())),
        **entry,
    )


def installed_version() -> str:
    """Return the installed version of Data-Juicer, which must be the one that the catalogue describes.

    Raises:
        PluginError: Data-Juicer is not installed, or is another version.
    """
    described = str(_catalogue()["version"])
    todo = f"pip install '{PACKAGE}=={described}', which rftdata[train] brings"
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise PluginError(
            "this operator needs Data-Juicer, which is not installed", value=PACKAGE, todo=todo
        ) from error
    if version != described:
        raise PluginError(
            "the installed Data-Juicer is not the version that the catalogue describes: arguments, bounds and "
            "statistics may differ",
            value=f"{PACKAGE} {version}",
            allowed=f"{PACKAGE} {described}",
            todo=f"{todo}, or generate the catalogue for the other version in a checkout with scripts/data_juicer_catalogue.py",
        )
    return version
