"""Groupers: they say which rows belong together, in a column that aggregators read; and what ends such a grouping.

    - key_value_grouper: {group_by_keys: [metadata.topic]}
    - entity_attribute_aggregator: {input_key: prompt, entity: the river, attribute: its course, …}

A grouper of Data-Juicer turns rows into fewer rows of lists. Here rows stay rows: `dj_group` names the group of each by its keys, as JSON
text, and aggregators that follow find out something about each group. On tasks the last of them ends the grouping: it
makes a task of every group and drops the rows it was made of. `naive_reverse_grouper` ends it before: the rows go on one by one.

A group must be whole where it is aggregated. A task pipeline gives a grouper all tasks of the set at once, again when the set has
grown. A batch of experiences holds whichever rollout groups were ready: a grouper that would group across them is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from operators.base import StageContext, StageOutcome
from operators.data_juicer import runtime
from operators.data_juicer.base import JuicerOperator, on_tasks
from operators.data_juicer.columns import make_plan, plain
from operators.data_juicer.runtime import ROW
from rftdata.errors import ConfigError

GROUP = "group"
"""The column that names a row's group, behind the prefix."""

FOUND = b"rft.grouping"
"""Key in a field's metadata: which grouping a column of findings belongs to."""

_LONGEST_NAME = 200


class GrouperStage(JuicerOperator):
    """`key_value_grouper` and `naive_grouper`."""

    def __init__(self, name: str, args: object) -> None:
        super().__init__(name, args)
        self.group_column = self.prefix + GROUP

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        keys = self._keys
        if not on_tasks(schema) and "group_id" not in keys:
            raise ConfigError(
                "on experiences a group must lie within one rollout group: a batch holds whichever of those were ready, "
                "and another batch would cut it elsewhere",
                value=keys or self.name, allowed="key_value_grouper: {group_by_keys: [group_id, …]}",
                todo="add group_id to its group_by_keys, or group the tasks (pipelines.task)",
            )  # fmt: skip
        # With keys of its own it looks at nothing else.
        reads = replace(self.facts, data_keys=frozenset()) if keys or self.name == "naive_grouper" else self.facts
        self._plan = make_plan(reads, self.args, self.prefix, schema)
        self.reads = self._plan.reads
        self.writes = frozenset({self.group_column})
        # How many columns there are tells one grouping from an earlier one under the same name.
        named = pa.field(self.group_column, pa.string(), metadata={FOUND: str(len(schema.names))})
        position = schema.get_field_index(named.name)
        return schema.append(named) if position < 0 else schema.set(position, named)

    @property
    def _keys(self) -> list[str]:
        return list(self.args.get("group_by_keys") or ())

    def prepare(self, context: StageContext) -> None:
        if self.op is None:
            self.op = self.make()

    def apply(self, table: pa.Table) -> StageOutcome:
        if self.op is None:
            self.prepare(StageContext())
        samples = {**self.plan.samples(table), ROW: list(range(table.num_rows))}
        rows = list(runtime.rows_of(samples, table.num_rows))
        with runtime.missing_package_named():
            batched = self.op.process(rows)
        names: list[str | None] = [None] * table.num_rows
        for group in batched:
            name = self._name_of(rows[group[ROW][0]])
            for row in group[ROW]:
                names[row] = name
        return StageOutcome.keep_all(table.num_rows, {self.group_column: pa.array(names, pa.string())})

    def _name_of(self, row: Mapping[str, Any]) -> str:
        """The keys that the rows of a group have in common; where these are long, their digest."""
        if self.name == "naive_grouper":
            return "{}"
        keys = self._keys or ["text"]
        text = json.dumps({key: _value(row, key) for key in keys}, ensure_ascii=False, sort_keys=True)
        return text if len(text) <= _LONGEST_NAME else hashlib.sha256(text.encode()).hexdigest()[:32]


class ReverseGrouperStage(JuicerOperator):
    """`naive_reverse_grouper`: rows go on one by one, with what the aggregators found as columns."""

    reads = frozenset()
    writes = frozenset()

    def _check(self) -> None:
        super()._check()
        if "batch_meta_export_path" in self.args:
            raise ConfigError(
                "it writes no file here: what aggregators found are columns", value=self.args["batch_meta_export_path"],
                todo="leave batch_meta_export_path out",
            )  # fmt: skip

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        position = group_position(schema, self.prefix)
        self.reads, self.writes = frozenset(), frozenset()
        return schema.remove(position)

    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome.keep_all(table.num_rows)


def group_position(schema: pa.Schema, prefix: str) -> int:
    """Where the column stands that names the groups.

    Raises:
        ConfigError: nothing is grouped at this place of the chain.
    """
    position: int = schema.get_field_index(prefix + GROUP)
    if position < 0:
        raise ConfigError(
            "no stage before it groups the rows", allowed="a place after key_value_grouper or naive_grouper",
            todo="put a grouper with the same prefix before it",
        )  # fmt: skip
    return position


def grouping(schema: pa.Schema, prefix: str) -> bytes:
    """What tells the grouping at this place of the chain from others."""
    found: bytes = (schema.field(group_position(schema, prefix)).metadata or {}).get(FOUND, b"")
    return found


def found_about(schema: pa.Schema, prefix: str) -> list[str]:
    """Columns that earlier aggregators of the same grouping found."""
    this = grouping(schema, prefix)
    return [
        field.name
        for field in schema
        if field.name != prefix + GROUP and this and (field.metadata or {}).get(FOUND) == this
    ]


def _value(row: Mapping[str, Any], path: str) -> Any:
    """What an operator finds under a path; None where it leads nowhere."""
    value: Any = row
    for key in path.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping):
            value = value.get(key)
        else:
            return None
    return plain(value)
