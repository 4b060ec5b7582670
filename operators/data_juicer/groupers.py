"""Groupers, which put rows into groups for aggregators, and the stage that ends such a grouping.

    - key_value_grouper: {group_by_keys: [metadata.topic]}
    - entity_attribute_aggregator: {input_key: prompt, entity: the river, attribute: its course, …}

A grouper of Data-Juicer turns rows into fewer rows of lists. Here rows stay rows: `dj_group` names each row's group by its keys, as JSON
text, and later aggregators compute results per group. On tasks the last aggregator ends the grouping: it creates a task from every
group and drops the rows of the group. `naive_reverse_grouper` ends the grouping earlier, and the rows continue one by one.

A group must be complete where it is aggregated. A task pipeline gives a grouper all tasks of the set at once, and again when the set has
grown. A batch of experiences contains the rollout groups that were ready, so a grouper that groups across them is refused.
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
"""Name (after the prefix) of the column that identifies a row's group."""

GROUPING_KEY = b"rft.grouping"
"""Metadata key of a field: the grouping to which a result column belongs."""

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
                "on experiences a group must lie within one rollout group: a batch contains the rollout groups that were ready, "
                "so another batch would divide it differently",
                value=keys or self.name,
                allowed="key_value_grouper: {group_by_keys: [group_id, …]}",
                todo="add group_id to its group_by_keys, or group the tasks (pipelines.task)",
            )
        # With its own keys it reads no other column.
        reads = replace(self.facts, data_keys=frozenset()) if keys or self.name == "naive_grouper" else self.facts
        self._plan = make_plan(reads, self.args, self.prefix, schema)
        self.reads = self._plan.reads
        self.writes = frozenset({self.group_column})
        # The number of columns distinguishes a grouping from an earlier one of the same name.
        named = pa.field(self.group_column, pa.string(), metadata={GROUPING_KEY: str(len(schema.names))})
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
        """Return the keys that the rows of a group share, or their digest if they are long."""
        if self.name == "naive_grouper":
            return "{}"
        keys = self._keys or ["text"]
        text = json.dumps({key: _value(row, key) for key in keys}, ensure_ascii=False, sort_keys=True)
        return text if len(text) <= _LONGEST_NAME else hashlib.sha256(text.encode()).hexdigest()[:32]


class ReverseGrouperStage(JuicerOperator):
    """`naive_reverse_grouper`: rows continue one by one, with the aggregators' results as columns."""

    reads = frozenset()
    writes = frozenset()

    def _check(self) -> None:
        super()._check()
        if "batch_meta_export_path" in self.args:
            raise ConfigError(
                "it writes no file here; the results of aggregators are columns",
                value=self.args["batch_meta_export_path"],
                todo="leave batch_meta_export_path out",
            )

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        position = group_position(schema, self.prefix)
        self.reads, self.writes = frozenset(), frozenset()
        return schema.remove(position)

    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome.keep_all(table.num_rows)


def group_position(schema: pa.Schema, prefix: str) -> int:
    """Return the position of the group column.

    Raises:
        ConfigError: no grouping exists at this point of the chain.
    """
    position: int = schema.get_field_index(prefix + GROUP)
    if position < 0:
        raise ConfigError(
            "no stage before it groups the rows",
            allowed="a place after key_value_grouper or naive_grouper",
            todo="put a grouper with the same prefix before it",
        )
    return position


def grouping(schema: pa.Schema, prefix: str) -> bytes:
    """Return the identifier of the grouping at this point of the chain."""
    identifier: bytes = (schema.field(group_position(schema, prefix)).metadata or {}).get(GROUPING_KEY, b"")
    return identifier


def earlier_results(schema: pa.Schema, prefix: str) -> list[str]:
    """Return the result columns of earlier aggregators of the same grouping."""
    this = grouping(schema, prefix)
    return [
        field.name
        for field in schema
        if field.name != prefix + GROUP and this and (field.metadata or {}).get(GROUPING_KEY) == this
    ]


def _value(row: Mapping[str, Any], path: str) -> Any:
    """Return an operator's value at a path; None if the path does not exist."""
    value: Any = row
    for key in path.split("."):
        if isinstance(value, list) and key.isdigit() and int(key) < len(value):
            value = value[int(key)]
        elif isinstance(value, Mapping):
            value = value.get(key)
        else:
            return None
    return plain(value)
