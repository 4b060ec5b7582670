"""Conversion between Arrow columns and the samples of Data-Juicer's operators: which columns, under which names, and back.

An operator sees its columns under Data-Juicer's names (`text`, `query`, `images`, …), whatever their names in the batch, and no
others. A text column is converted once per batch. A path such as `metadata.images` leads into a column of JSON text.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from operators.base import ReadArrays
from operators.data_juicer.catalogue import COLUMN_ARGUMENTS, DATA_KEYS, Facts
from operators.data_juicer.images import ARRAYS, array_name, read_images
from operators.data_juicer.runtime import META, STATS, Samples
from rftdata.errors import ConfigError

DEFAULT_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "text_key": ("response", "prompt", "text"),
    "query_key": ("prompt", "query"),
    "prompt_key": ("prompt",),
    "response_key": ("response", "answer"),
    "system_key": ("system",),
    "instruction_key": ("instruction",),
    "history_key": ("history",),
    "image_key": ("images", "metadata.images"),
    "image_bytes_key": ("image_bytes",),
    "audio_key": ("audios", "metadata.audios"),
    "video_key": ("videos", "metadata.videos"),
}
"""Default columns of an operator's arguments: the first of these that the batch has."""

NEEDED = frozenset({"text_key", "query_key", "response_key", "image_key", "audio_key", "video_key"})
TEXT_KEYS = frozenset({"text_key", "query_key", "response_key", "prompt_key", "system_key", "instruction_key"})
JSON_COLUMNS = frozenset({"metrics", "messages", "reward_parts", "metadata", "features", "reviews", "payload"})
IMAGE_BYTES = DATA_KEYS["image_bytes_key"]
FILE_KEYS = frozenset({"image_key", "audio_key", "video_key"})


@dataclass(frozen=True)
class Source:
    """The source of a name that an operator uses: a column of the batch, a path into one, or an array of the experience."""

    name: str
    column: str
    path: tuple[str, ...] = ()
    parsed: bool = False
    files: bool = False
    optional: bool = False
    array: str | None = None

    @property
    def identity(self) -> list[str]:
        """Its name and source, as plain values."""
        return [self.name, ARRAYS, self.array] if self.array else [self.name, self.column, *self.path]

    @property
    def written(self) -> str:
        """Its source, as written in an argument."""
        return ".".join((self.column, *self.path))

    def is_there(self, table: pa.Table) -> pa.Array:
        """Return, for each row, whether the value in the column or at the path is not null."""
        if not self.path:
            return pc.is_valid(table[self.column].combine_chunks())
        return pa.array([value is not None for value in self.read(table)], pa.bool_())

    def read(self, table: pa.Table) -> list[Any]:
        """Return its values, one per row; a missing list of files is empty."""
        values: list[Any] = table[self.column].to_pylist()
        if self.parsed:
            values = [json.loads(value) if isinstance(value, str) and value else value for value in values]
        for key in self.path:
            values = [value.get(key) if isinstance(value, Mapping) else None for value in values]
        if self.files:
            values = [[] if value is None else [value] if isinstance(value, str) else value for value in values]
        return values

    def write(self, table: pa.Table, values: Sequence[Any]) -> pa.Array:
        """Return the column with these values written into it."""
        kind = table.schema.field(self.column).type
        if not self.path and not self.parsed:
            return pa.array(values, kind)
        rows = table[self.column].to_pylist()
        if self.parsed:
            rows = [json.loads(row) if row else {} for row in rows]
        if not self.path:
            rows = list(values)
        for row, value in zip(rows, values) if self.path else ():
            for key in self.path[:-1]:
                row = row.setdefault(key, {})
            row[self.path[-1]] = value
        return pa.array([json.dumps(plain(row)) for row in rows] if self.parsed else rows, kind)


@dataclass(frozen=True)
class Plan:
    """The columns of one operator in one schema.

    Attributes:
        sources: what it reads, in order.
        texts: the sources whose null values it cannot read.
        nested: statistics and tags of earlier stages that it reads: `STATS` or `META`, the name there, our column.
        made: tags that it sets: the name in Data-Juicer, our column and its type.
    """

    sources: tuple[Source, ...]
    texts: tuple[Source, ...]
    nested: tuple[tuple[str, str, str], ...]
    made: Mapping[str, pa.Field]

    @property
    def reads(self) -> frozenset[str]:
        """Columns of the batch that the operator receives."""
        return frozenset({source.column for source in self.sources} | {column for _, _, column in self.nested})

    @property
    def columns(self) -> frozenset[str]:
        """Columns of the batch that contain its sources."""
        return frozenset(source.column for source in self.sources if source.array is None)

    def samples(self, table: pa.Table, read_arrays: ReadArrays | None = None) -> Samples:
        """Return a table in the operator's format: a list of values per name."""
        here = set(table.column_names)
        samples: Samples = {}
        for source in self.sources:
            if source.array is not None:
                ids = table[source.column].to_pylist()
                samples[source.name], samples[IMAGE_BYTES] = read_images(read_arrays, ids, source.array)
            elif not source.optional or source.column in here:
                samples[source.name] = source.read(table)
        for place, name, column in self.nested:
            rows = samples.setdefault(place, [{} for _ in range(table.num_rows)])
            for row, value in zip(rows, table[column].to_pylist()):
                if value is not None:
                    row[name] = unpacked(value)
        return samples


def column_name(prefix: str, name: str) -> str:
    """Return the column of a statistic or tag: `dj_text_len` for `text_len`."""
    return prefix + name.removeprefix("__dj__").removesuffix("__")


def make_plan(facts: Facts, args: Mapping[str, Any], prefix: str, schema: pa.Schema) -> Plan:
    """Return the columns that an operator with these arguments reads and writes.

    Raises:
        ConfigError: the batch lacks a required column, or its type is wrong.
    """
    sources: dict[str, Source] = {}
    for key in sorted(facts.data_keys | (set(args) & set(DATA_KEYS))):
        source = _data_source(key, args.get(key), schema)
        if source is not None:
            sources[source.name] = source
    texts = tuple(sources[DATA_KEYS[key]] for key in sorted(TEXT_KEYS & NEEDED) if DATA_KEYS[key] in sources)
    nested: list[tuple[str, str, str]] = []
    for reference, must in _references(facts, args):
        _add_reference(reference, must, prefix, schema, sources, nested)
    made: dict[str, pa.Field] = {}
    for argument, meta, kind in facts.metas:
        name = str(args.get(argument, meta)) if argument else meta
        column = column_name(prefix, name)
        if column in schema.names:
            nested.append((META, name, column))
        made[name] = pa.field(column, kind)
    if facts.reads_all:
        text = _data_source("text_key", None, schema) if "text" not in schema.names else None
        if text is not None:
            sources.setdefault("text", text)
        for name in schema.names:
            sources.setdefault(name, Source(name, name, optional=True))
    return Plan(tuple(sources.values()), texts, tuple(nested), made)


def _data_source(key: str, wanted: object, schema: pa.Schema) -> Source | None:
    name = DATA_KEYS[key]
    candidates = (str(wanted),) if wanted else DEFAULT_COLUMNS[key]
    array = array_name(wanted) if key == "image_key" and ARRAYS not in schema.names else None
    if array is not None:
        return Source(name, "experience_id", files=True, array=array)
    for candidate in candidates:
        column, *path = candidate.split(".")
        if column in schema.names:
            source = Source(name, column, tuple(path), _is_json(schema, column, bool(path), key), key in FILE_KEYS)
            if key in TEXT_KEYS and not path and not pa.types.is_string(schema.field(column).type):
                raise ConfigError(f"{key} is not a column of text", value=candidate)
            return source
    if wanted or key in NEEDED:
        raise ConfigError(
            f"{key} is not a column of the batch",
            value=wanted or " or ".join(candidates),
            allowed=", ".join(schema.names),
            todo=None if wanted else f"set {key} to the column to read",
        )
    return None


def _is_json(schema: pa.Schema, column: str, has_path: bool, key: str) -> bool:
    if not pa.types.is_string(schema.field(column).type):
        return False
    return has_path or (column in JSON_COLUMNS and key not in TEXT_KEYS)


def _references(facts: Facts, args: Mapping[str, Any]) -> Iterable[tuple[str, bool]]:
    """Yield the columns that an operator's own arguments name, and whether the batch must have them (some name its output)."""
    for argument in sorted(facts.columns):
        value = args.get(argument, facts.defaults.get(argument))
        for name in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
            if name and isinstance(name, str):
                yield name, argument in COLUMN_ARGUMENTS and argument in args
    if "filter_condition" in args:
        try:
            tree = ast.parse(str(args["filter_condition"]), mode="eval")
        except SyntaxError as error:
            raise ConfigError(
                f"filter_condition is not an expression: {error.msg}", value=args["filter_condition"]
            ) from error
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute | ast.Name):
                yield ast.unparse(node), True


def reference_source(name: str, prefix: str, schema: pa.Schema) -> Source | None:
    """Return the source of a column, a path into one, or a tag of an earlier stage; None if there is none."""
    root, _, rest = name.partition(".")
    for column in (name, column_name(prefix, name)):
        if column in schema.names:
            return Source(name, column)
    if root in schema.names:
        return Source(name, root, tuple(rest.split(".")), _is_json(schema, root, True, "field_key"))
    return None


def _add_reference(
    reference: str,
    must: bool,
    prefix: str,
    schema: pa.Schema,
    sources: dict[str, Source],
    nested: list[tuple[str, str, str]],
) -> None:
    root, _, rest = reference.partition(".")
    if root in (STATS, META):
        column = column_name(prefix, rest.partition(".")[0])
        if rest and column not in schema.names:
            raise ConfigError(
                "it reads a statistic or tag that no earlier stage computes",
                value=reference,
                allowed=", ".join(schema.names),
                todo=f"put the operator that computes {column} before it",
            )
        if rest:
            nested.append((root, rest.partition(".")[0], column))
        return
    if root in sources:
        return
    data_key = next((key for key, name in DATA_KEYS.items() if name == root), None)
    if root in schema.names:
        sources[root] = Source(root, root, (), _is_json(schema, root, bool(rest), "field_key"))
    elif data_key:
        source = _data_source(data_key, None, schema)
        if source is not None:
            sources[root] = source
    elif must:
        raise ConfigError(
            "it reads a column that the batch does not have", value=reference, allowed=", ".join(schema.names)
        )


def plain(value: Any) -> Any:
    """Convert a Data-Juicer value to Python's own types; NaN and infinities become None, since JSON has neither."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(inner) for inner in value]
    return value


def column_of(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return a column of statistics or tags. Values of another type are converted, to JSON text where the type is text."""
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array([_fitted(plain(value), kind) for value in values], kind)


def _fitted(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    if pa.types.is_list(kind):
        values = value if isinstance(value, list) else [value]
        return [None if inner is None else float(inner) for inner in values]
    if isinstance(value, list):
        value = value[0] if len(value) == 1 else None
    if pa.types.is_boolean(kind):
        return None if value is None else bool(value)
    return None if value is None else float(value)


def unpacked(value: Any) -> Any:
    """Return a tag in the form in which its operator set it."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
