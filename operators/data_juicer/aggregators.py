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
    GROUP,
    GROUPING_KEY,
    GrouperStage,
    ReverseGrouperStage,
    earlier_results,
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
        self._more_columns: Sequence[str] = ()
        self._is_last = False

    def join_chain(self, place: Place) -> None:
        """Check whether a later stage of the grouping has a result, or lets the rows continue."""
        super().join_chain(place)
        behind = [one for one in place.behind if isinstance(one, JuicerOperator) and one.prefix == self.prefix]
        rest = itertools.takewhile(lambda one: not isinstance(one, GrouperStage), behind)
        self._is_last = self.has_group_result and not any(
            isinstance(one, ReverseGrouperStage) or (isinstance(one, AggregatorStage) and one.has_group_result)
            for one in rest
        )

    @property
    def has_group_result(self) -> bool:
        """Whether it has a result per group; the other kind changes the rows' tags."""
        return _TAGS not in (self.facts.arguments or ())

    @property
    def _input_name(self) -> str:
        """The tag under which the operator looks for its input."""
        argument = "input_key" if self.has_group_result else _TAGS
        return str(self.args.get(argument, self.facts.defaults.get(argument)) or self.args.get("text_key") or "text")

    @property
    def _output_name(self) -> str:
        return str(self.args.get("output_key") or self.facts.defaults.get("output_key") or self._input_name)

    @property
    def _result_column(self) -> str:
        if not self.has_group_result:
            return self.input.column
        return column_name(self.prefix, re.sub(r"\W+", "_", self._output_name))

    @property
    def input(self) -> Source:
        """Where it reads what it aggregates; known after `validate_schema`."""
        assert self._input is not None
        return self._input

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        group_position(schema, self.prefix)
        self._input = source = reference_source(self._input_name, self.prefix, schema)
        if source is None:
            argument = "input_key" if self.has_group_result else _TAGS
            raise ConfigError(
                f"{argument} is neither a column of the batch nor a tag that an earlier stage finds",
                value=self._input_name,
                allowed=", ".join(schema.names),
                todo=f"set {argument} to the column or tag to aggregate",
            )
        if not self.has_group_result and (source.path or not pa.types.is_string(schema.field(source.column).type)):
            raise ConfigError(f"{_TAGS} is not a column of tags", value=self._input_name, allowed="a column of text")
        if self.has_group_result and self._result_column in schema.names:
            raise ConfigError(
                "an earlier stage has the same output column", value=self._result_column, todo="set its output_key"
            )
        self._more_columns = earlier_results(schema, self.prefix) if on_tasks(schema) else ()
        if self._is_last and on_tasks(schema):
            names = [self.group_column, *self._more_columns, self._result_column]
            self.replaces_with = [f"metadata.{name.removeprefix(self.prefix)}" for name in names]
        self.reads = frozenset({source.column, self.group_column, *self._more_columns}) | (
            _OF_TASKS & set(schema.names)
        )
        self.writes = frozenset()
        self.scores = {self._result_column: pa.string(), self._why_column: pa.string()}
        return self._with_grouping(with_columns(schema, self.scores))

    def _with_grouping(self, schema: pa.Schema) -> pa.Schema:
        """Mark the result column in the schema as belonging to this grouping."""
        if not self.has_group_result:
            return schema
        position = schema.get_field_index(self._result_column)
        return schema.set(position, schema.field(position).with_metadata({GROUPING_KEY: grouping(schema, self.prefix)}))

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
                    group_results = list(pool.map(lambda rows: self._aggregated(values, rows), groups))
            else:
                group_results = [self._aggregated(values, rows) for rows in groups]
        asked = [one for one in group_results if one.asked]
        if asked and all(one.values is None for one in asked):
            raise no_answer(self, f"{len(asked)} groups", is_silent=not any(one.answered for one in asked))
        results: list[Any] = [None] * table.num_rows if self.has_group_result else list(values)
        errors: list[str | None] = [None] * table.num_rows
        for rows, one in zip(groups, group_results):
            for place, row in enumerate(rows):
                if one.values is None:
                    errors[row] = NO_ANSWER
                elif self.has_group_result:
                    results[row] = one.values[0]
                elif values[row]:
                    results[row] = one.values[place]
        return StageOutcome.keep_all(
            table.num_rows,
            {self._result_column: column_of(results, pa.string()), self._why_column: pa.array(errors, pa.string())},
        )

    def _values(self, table: pa.Table) -> list[Any]:
        """Return its input for every row: a text, for tags also a list of texts; None where there is none.

        Raises:
            OperatorError: the input is of another type.
        """
        values = self.input.read(table)
        if not self.has_group_result:
            values = [unpacked(value) for value in values]
        for value in values:
            texts = value if isinstance(value, list) and not self.has_group_result else [value]
            if any(text is not None and not isinstance(text, str) for text in texts):
                raise OperatorError(
                    f"{self._input_name} holds something that {self.name} cannot aggregate",
                    value=value,
                    allowed="a text" if self.has_group_result else "a text, or a list of texts",
                )
        return values

    def _aggregated(self, values: Sequence[Any], rows: Sequence[int]) -> _GroupResult:
        """Run the operator on a group."""
        name = self._input_name
        # The operator needs a tag in every row of a group; a row without tags has an empty list.
        sample = {META: [{name: values[row] or []} for row in rows], BATCH_META: {}}
        if self.has_group_result:
            sample[META] = [{name: values[row]} for row in rows if values[row]]
        _CALLS.made = _CALLS.answered = _CALLS.lost = _CALLS.failed_tries = 0
        result = self.op.process_single(sample)
        values_of_group: list[Any] | None = None
        if not _CALLS.lost and not self.has_group_result:
            values_of_group = [plain(tags[name]) for tags in result[META]]
        elif not _CALLS.lost:
            one = plain(result[BATCH_META].get(self._output_name))
            values_of_group = [one] if one else None
        return _GroupResult(values_of_group, _CALLS.made > 0, _CALLS.answered > 0)

    def decide(self, table: pa.Table) -> StageOutcome:
        """Drop every row where the stage ends a grouping: a task was created from its group, or could not be."""
        if not self.replaces_with:
            return super().decide(table)
        values, results = self._values(table), table[self._result_column].to_pylist()
        reasons: list[str | None] = []
        groups = {
            name: [row for row in rows if values[row]] for name, rows in _groups(table[self.group_column]).items()
        }
        for value, text, why, name in zip(
            values, results, table[self._why_column].to_pylist(), table[self.group_column].to_pylist()
        ):
            if not value:
                reasons.append(f"{self._input_name} is empty, which {self.name} cannot aggregate")
            elif text is None:
                reasons.append(f"{self.name} made nothing of its group" + (f": {why}" if why else ""))
            else:
                reasons.append(f"{self.name} made one task of its group of {len(groups[name])}")
        created = [
            self._task(table, name, rows, values, unpacked(results[rows[0]]))
            for name, rows in groups.items()
            if rows and results[rows[0]] is not None
        ]
        return StageOutcome(pa.array(reasons, pa.string()), created=created)

    def _task(
        self, table: pa.Table, group: str, rows: Sequence[int], values: Sequence[Any], result: Any
    ) -> CreatedTask:
        parents = table["experience_id"].take(pa.array(rows)).to_pylist()
        keys = table["task_key"].take(pa.array(rows)).to_pylist()
        identity = json.dumps(
            [self.score_spec(), group, sorted(zip(keys, (values[row] for row in rows)))], sort_keys=True
        )
        key = f"{self.name}/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
        prompt = ", ".join(str(one) for one in result) if isinstance(result, list) else str(result)
        more_results = {
            name.removeprefix(self.prefix): unpacked(table[name][rows[0]].as_py()) for name in self._more_columns
        }
        metadata = {GROUP: unpacked(group), **more_results, self._result_column.removeprefix(self.prefix): result}
        return CreatedTask(
            str(table["taskset"][rows[0]]),
            key,
            {"prompt": prompt, "metadata": metadata},
            parents[0],
            {"parent_task_ids": parents},
        )


class _GroupResult(NamedTuple):
    """The result for a group: one value, or the tags of its rows; None if a call was lost. Also whether calls were made and one was answered."""

    values: list[Any] | None
    asked: bool
    answered: bool


def _groups(names: pa.ChunkedArray) -> dict[str, list[int]]:
    """Return the rows of every group, in the order of the table."""
    rows_of_groups: dict[str, list[int]] = {}
    for row, name in enumerate(names.to_pylist()):
        rows_of_groups.setdefault(name, []).append(row)
    return rows_of_groups


class _Calls(threading.local):
    """Counts for the group that this thread works on: calls, calls answered with a text, lost parts, and failed tries of the last part."""

    made = 0
    answered = 0
    lost = 0
    failed_tries = 0


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
        parsed = parse(response)
        _CALLS.made += 1
        _CALLS.answered += bool(response)
        _CALLS.failed_tries = 0 if len(parsed) else _CALLS.failed_tries + 1
        if _CALLS.failed_tries == tries:
            _CALLS.lost, _CALLS.failed_tries = _CALLS.lost + 1, 0
        return parsed

    return counted
