"""Aggregators: results of an operator about a whole group of rows, as columns; on tasks, a new task per group.

The result (`dj_entity_attribute`, the same for all rows of a group) is a score: it is stored, and reused while the group is unchanged. On
tasks the last aggregator of a grouping drops the rows of a group and creates one task from them, with its result as the prompt. The
metadata holds the results of all aggregators of the grouping. `meta_tags_aggregator` has no result per group: it changes the tags of the
rows, which continue. On experiences rows always continue.

These operators swallow endpoint errors and leave out the failed part, or everything. Such a group has no result, and is asked about again.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa

from operators.base import CreatedTask, Place, StageContext, StageOutcome
from operators.data_juicer import runtime
from operators.data_juicer.base import JuicerOperator, on_tasks, with_columns
from operators.data_juicer.columns import Source, column_name, column_of, plain, reference_source, unpacked
from operators.data_juicer.filters import NO_ANSWER, no_answer
from operators.data_juicer.groupers import (
    FOUND,
    GROUP,
    GrouperStage,
    ReverseGrouperStage,
    found_about,
    group_position,
    grouping,
)
from operators.data_juicer.runtime import BATCH_META, META
from rftdata.errors import ConfigError, OperatorError

_TAGS = "meta_tag_key"
_OF_TASKS = frozenset({"task_key", "taskset"})


class AggregatorStage(JuicerOperator):
    """One aggregator. On tasks, the last one of a grouping that has a result creates a task from every group."""

    def __init__(self, name: str, args: object) -> None:
        super().__init__(name, args)
        self.group_column = self.prefix + GROUP
        self._why_column = self.error_column = f"{self.prefix}{name}_error"
        self._input: Source | None = None
        self._besides: Sequence[str] = ()
        self._is_last = False

    def join_chain(self, place: Place) -> None:
        """Check whether a later stage of the grouping has a result, or lets the rows continue."""
        super().join_chain(place)
        behind = [one for one in place.behind if isinstance(one, JuicerOperator) and one.prefix == self.prefix]
        rest = itertools.takewhile(lambda one: not isinstance(one, GrouperStage), behind)
        self._is_last = self.may_make and not any(
            isinstance(one, ReverseGrouperStage) or (isinstance(one, AggregatorStage) and one.may_make) for one in rest
        )

    @property
    def may_make(self) -> bool:
        """Whether it has a result per group; the other kind changes the rows' tags."""
        return _TAGS not in (self.facts.arguments or ())

    @property
    def _input_name(self) -> str:
        """The tag under which the operator looks for its input."""
        argument = "input_key" if self.may_make else _TAGS
        return str(self.args.get(argument, self.facts.defaults.get(argument)) or self.args.get("text_key") or "text")

    @property
    def _output_name(self) -> str:
        return str(self.args.get("output_key") or self.facts.defaults.get("output_key") or self._input_name)

    @property
    def _found_column(self) -> str:
        if not self.may_make:
            return self.input.column
        return column_name(self.prefix, re.sub(r"\W+", "_", self._output_name))

    @property
    def input(self) -> Source:
        """Where it reads what it aggregates; known after `validate_schema`."""
        assert self._input is not None
        return self._input

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        group_position(schema, self.prefix)
        self._input = found = reference_source(self._input_name, self.prefix, schema)
        if found is None:
            argument = "input_key" if self.may_make else _TAGS
            raise ConfigError(
                f"{argument} is neither a column of the batch nor a tag that an earlier stage finds",
                value=self._input_name,
                allowed=", ".join(schema.names),
                todo=f"set {argument} to the column or tag to aggregate",
            )
        if not self.may_make and (found.path or not pa.types.is_string(schema.field(found.column).type)):
            raise ConfigError(f"{_TAGS} is not a column of tags", value=self._input_name, allowed="a column of text")
        if self.may_make and self._found_column in schema.names:
            raise ConfigError(
                "an earlier stage has the same output column", value=self._found_column, todo="set its output_key"
            )
        self._besides = found_about(schema, self.prefix) if on_tasks(schema) else ()
        if self._is_last and on_tasks(schema):
            names = [self.group_column, *self._besides, self._found_column]
            self.replaces_with = [f"metadata.{name.removeprefix(self.prefix)}" for name in names]
        self.reads = frozenset({found.column, self.group_column, *self._besides}) | (_OF_TASKS & set(schema.names))
        self.writes = frozenset()
        self.scores = {self._found_column: pa.string(), self._why_column: pa.string()}
        return self._noted(with_columns(schema, self.scores))

    def _noted(self, schema: pa.Schema) -> pa.Schema:
        """Mark the result column in the schema as belonging to this grouping."""
        if not self.may_make:
            return schema
        position = schema.get_field_index(self._found_column)
        return schema.set(position, schema.field(position).with_metadata({FOUND: grouping(schema, self.prefix)}))

    def score_spec(self) -> dict[str, Any]:
        return {**self.spec(), "columns": [self.input.column, *self.input.path]}

    def prepare(self, context: StageContext) -> None:
        if self.op is None:
            folder = context.base_dir / (context.model_path or "")
            model_path = str(folder) if context.model_path and folder.is_dir() else context.model_path
            self.op = runtime.make_aggregator(self.name, self.args, model_path)
            _count_lost(self.op)

    def apply(self, table: pa.Table) -> StageOutcome:
        if self.op is None:
            self.prepare(StageContext())
        values = self._values(table)
        groups = [rows for rows in _groups(table[self.group_column]).values() if any(values[row] for row in rows)]
        workers = self.args.get("num_proc")
        with runtime.missing_package_named():
            if isinstance(workers, int) and workers > 1 and len(groups) > 1:
                with ThreadPoolExecutor(workers, thread_name_prefix=self.name) as pool:
                    found = list(pool.map(lambda rows: self._aggregated(values, rows), groups))
            else:
                found = [self._aggregated(values, rows) for rows in groups]
        asked = [one for one in found if one.asked]
        if asked and all(one.values is None for one in asked):
            raise no_answer(self, f"{len(asked)} groups", is_silent=not any(one.heard for one in asked))
        results: list[Any] = [None] * table.num_rows if self.may_make else list(values)
        errors: list[str | None] = [None] * table.num_rows
        for rows, one in zip(groups, found):
            for place, row in enumerate(rows):
                if one.values is None:
                    errors[row] = NO_ANSWER
                elif self.may_make:
                    results[row] = one.values[0]
                elif values[row]:
                    results[row] = one.values[place]
        return StageOutcome.keep_all(
            table.num_rows,
            {self._found_column: column_of(results, pa.string()), self._why_column: pa.array(errors, pa.string())},
        )

    def _values(self, table: pa.Table) -> list[Any]:
        """Return its input for every row: a text, for tags also a list of texts; None where there is none.

        Raises:
            OperatorError: the input is of another type.
        """
        values = self.input.read(table)
        if not self.may_make:
            values = [unpacked(value) for value in values]
        for value in values:
            texts = value if isinstance(value, list) and not self.may_make else [value]
            if any(text is not None and not isinstance(text, str) for text in texts):
                raise OperatorError(
                    f"{self._input_name} holds something that {self.name} cannot aggregate",
                    value=value,
                    allowed="a text" if self.may_make else "a text, or a list of texts",
                )
        return values

    def _aggregated(self, values: Sequence[Any], rows: Sequence[int]) -> _Finding:
        """Run the operator on a group."""
        name = self._input_name
        # The operator needs a tag in every row of a group; a row without tags has an empty list.
        sample = {META: [{name: values[row] or []} for row in rows], BATCH_META: {}}
        if self.may_make:
            sample[META] = [{name: values[row]} for row in rows if values[row]]
        _CALLS.made = _CALLS.heard = _CALLS.lost = _CALLS.in_vain = 0
        result = self.op.process_single(sample)
        found: list[Any] | None = None
        if not _CALLS.lost and not self.may_make:
            found = [plain(tags[name]) for tags in result[META]]
        elif not _CALLS.lost:
            one = plain(result[BATCH_META].get(self._output_name))
            found = [one] if one else None
        return _Finding(found, _CALLS.made > 0, _CALLS.heard > 0)

    def decide(self, table: pa.Table) -> StageOutcome:
        """Drop every row where the stage ends a grouping: a task was created from its group, or could not be."""
        if not self.replaces_with:
            return super().decide(table)
        values, found = self._values(table), table[self._found_column].to_pylist()
        reasons: list[str | None] = []
        groups = {
            name: [row for row in rows if values[row]] for name, rows in _groups(table[self.group_column]).items()
        }
        for value, text, why, name in zip(
            values, found, table[self._why_column].to_pylist(), table[self.group_column].to_pylist()
        ):
            if not value:
                reasons.append(f"{self._input_name} is empty, which {self.name} cannot aggregate")
            elif text is None:
                reasons.append(f"{self.name} made nothing of its group" + (f": {why}" if why else ""))
            else:
                reasons.append(f"{self.name} made one task of its group of {len(groups[name])}")
        created = [
            self._task(table, name, rows, values, unpacked(found[rows[0]]))
            for name, rows in groups.items()
            if rows and found[rows[0]] is not None
        ]
        return StageOutcome(pa.array(reasons, pa.string()), created=created)

    def _task(self, table: pa.Table, group: str, rows: Sequence[int], values: Sequence[Any], found: Any) -> CreatedTask:
        parents = table["experience_id"].take(pa.array(rows)).to_pylist()
        keys = table["task_key"].take(pa.array(rows)).to_pylist()
        given = json.dumps([self.score_spec(), group, sorted(zip(keys, (values[row] for row in rows)))], sort_keys=True)
        key = f"{self.name}/{hashlib.sha256(given.encode()).hexdigest()[:16]}"
        prompt = ", ".join(str(one) for one in found) if isinstance(found, list) else str(found)
        besides = {name.removeprefix(self.prefix): unpacked(table[name][rows[0]].as_py()) for name in self._besides}
        metadata = {GROUP: unpacked(group), **besides, self._found_column.removeprefix(self.prefix): found}
        return CreatedTask(
            str(table["taskset"][rows[0]]),
            key,
            {"prompt": prompt, "metadata": metadata},
            parents[0],
            {"parent_task_ids": parents},
        )


class _Finding(NamedTuple):
    """The result for a group: one value, or the tags of its rows; None if a call was lost. Whether calls were made, and any returned a text."""

    values: list[Any] | None
    asked: bool
    heard: bool


def _groups(names: pa.ChunkedArray) -> dict[str, list[int]]:
    """Return the rows of every group, in the order of the table."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names.to_pylist()):
        found.setdefault(name, []).append(row)
    return found


class _Calls(threading.local):
    """Counts for the group that this thread works on: calls, calls with a text, parts without an answer, failed tries of the last part."""

    made = 0
    heard = 0
    lost = 0
    in_vain = 0


_CALLS = _Calls()


def _count_lost(op: Any) -> None:
    """Count the parts of a group that an operator gives up on without an error.

    It tries a part `try_num` times until `parse_output` extracts something from the answer, which is empty where the call failed.
    """
    for one in _with_parsers(op):
        one.parse_output = _counting(one.parse_output, int(one.try_num))


def _with_parsers(op: Any) -> Iterable[Any]:
    yield op
    if hasattr(op, "nested_sum"):
        yield op.nested_sum


def _counting(parse: Any, tries: int) -> Any:
    def counted(response: Any) -> Any:
        found = parse(response)
        _CALLS.made += 1
        _CALLS.heard += bool(response)
        _CALLS.in_vain = 0 if len(found) else _CALLS.in_vain + 1
        if _CALLS.in_vain == tries:
            _CALLS.lost, _CALLS.in_vain = _CALLS.lost + 1, 0
        return found

    return counted
