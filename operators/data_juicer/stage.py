"""Data-Juicer operators by their own names as stages, with their own arguments.

    - text_length_filter: {min_len: 10, max_len: 2000}
    - clean_links_mapper: {}
    - document_deduplicator: {lowercase: true, text_key: prompt}
    - image_aspect_ratio_filter: {image_key: metadata.images}

`text_key`, `query_key`, `image_key` and so on name the columns to read; by default the text is the `response` (of a task the `prompt`).
The operator's own methods are called on the batch itself, without converting it to JSON or a Hugging Face data set.

A filter's statistics become columns (`dj_text_len`; `prefix: prompt_` makes it `prompt_text_len`) that later stages read. They are
scores: stored, and not recomputed when only the bounds change, since only `decide` uses bounds. The same holds for the tags of a
mapper that only sets tags. Other mappers change columns for the later stages only; the buffer keeps what was sampled. A
deduplicator or selector decides within its batch. A mapper that makes several rows of one is refused on experiences. On tasks
each row becomes a new task, and the old task is dropped. Groupers and aggregators have their own modules; pipelines are refused.

`mode: ray` spreads a stage over a Ray cluster (`operators.data_juicer.over_ray`). Whole recipes: `operators.data_juicer.recipe`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import ReadArrays, StageContext, StageOutcome
from operators.data_juicer import over_ray, runtime
from operators.data_juicer.aggregators import AggregatorStage
from operators.data_juicer.base import JuicerOperator, JuicerOutcome, on_tasks, with_columns
from operators.data_juicer.catalogue import facts
from operators.data_juicer.columns import TEXT_KEYS, Plan, column_name, make_plan
from operators.data_juicer.filters import decisions, statistics
from operators.data_juicer.groupers import GrouperStage, ReverseGrouperStage
from operators.data_juicer.images import check_arrays
from operators.data_juicer.mappers import mapped
from operators.data_juicer.runtime import ROW, Samples
from rftdata.errors import ConfigError, PluginError

_INSTEAD = {
    "ray_repartition_pipeline": "leave it out: a stage with mode: ray cuts its rows itself, one part per CPU",
}
_OF_NEW_TASKS = frozenset({"task_key", "taskset", "prompt", "answer", "metadata"})


def juicer_stage(name: str, args: object) -> JuicerOperator:
    """Return the stage for an operator.

    Raises:
        ConfigError: its arguments are wrong.
        PluginError: operators of its kind cannot be stages.
    """
    kind = facts(name).kind
    if kind == "grouper":
        return (ReverseGrouperStage if name == "naive_reverse_grouper" else GrouperStage)(name, args)
    if kind == "aggregator":
        return AggregatorStage(name, args)
    if kind == "pipeline":
        raise PluginError(
            f"the Data-Juicer operator {name!r} works on a whole Ray data set, not on a batch of rows ({kind})",
            allowed="filters, mappers, deduplicators, selectors, groupers and aggregators",
            todo=_INSTEAD.get(name, "run it in a separate Data-Juicer job before the tasks are loaded"),
        )
    return DataJuicerStage(name, args)


class DataJuicerStage(JuicerOperator):
    """A filter, mapper, deduplicator or selector; the module header describes each."""

    def __init__(self, name: str, args: object) -> None:
        super().__init__(name, args)
        self._read_arrays: ReadArrays | None = None
        self._schema: pa.Schema | None = None
        self.rowwise = self.facts.kind in ("filter", "mapper") and not self.facts.draws and not name.startswith("ray_")

    def depends_on(self) -> str | None:
        """Return None if it draws random numbers: its scores then depend on the other rows of the batch and are not reused."""
        return None if self.facts.draws else ""

    def score_spec(self) -> dict[str, Any]:
        spec = self.spec()
        spec["args"] = {key: value for key, value in spec["args"].items() if key not in self.facts.bounds}
        columns = self._plan.sources if self._plan and not self.facts.reads_all else ()
        return {**spec, "columns": [source.identity for source in columns]}

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self._refuse_to_make_rows(schema)
        self._schema = schema
        self._plan = plan = make_plan(self.facts, self.args, self.prefix, schema)
        if any(source.array for source in plan.sources):
            check_arrays(self.facts, self.mode, is_task=on_tasks(schema))
        self.reads = None if self.facts.reads_all else plan.reads
        if self.facts.kind == "mapper" and "task_key" in schema.names and self.reads is not None:
            self.reads |= _OF_NEW_TASKS & set(schema.names)
        results = self._result_columns(plan)
        if self.facts.splits or (self.facts.metas and not self._rewrites and not self.facts.makes_rows):
            self.scores = results
            self.writes = frozenset()
        elif self.facts.kind in ("filter", "selector"):
            self.writes = frozenset()
        elif self.facts.kind == "mapper" and (self.facts.reads_all or self.facts.data_keys - TEXT_KEYS):
            self.writes = None
        else:
            self.writes = plan.columns | frozenset(results)
        return with_columns(schema, results)

    def _refuse_to_make_rows(self, schema: pa.Schema) -> None:
        """Refuse mappers that make several rows of an experience, since experiences are what was sampled.

        Some mappers make one row of one if they leave out the original. This is only checked when they run.
        """
        if self.facts.makes_rows and not on_tasks(schema) and self.args.get("keep_original_sample") is not False:
            raise ConfigError(
                "it makes several rows from one",
                allowed="on experiences, mappers that give one row for one row",
                todo="use it on tasks (pipelines.task), where each row becomes a task",
            )

    @property
    def _rewrites(self) -> bool:
        return self.facts.rewrites or bool(self.args.get("drop_text"))

    def _result_columns(self, plan: Plan) -> dict[str, pa.DataType]:
        """Return the columns of the operator's results about a row, with their types."""
        if self.facts.splits:
            columns = {column_name(self.prefix, name): kind for name, kind in self.facts.stats.items()}
            if self.facts.asks:
                self.error_column = f"{self.prefix}{self.name}_error"
                columns[self.error_column] = pa.string()
            return columns
        earlier = {column for _, _, column in plan.nested}
        columns = {one.name: one.type for one in plan.made.values() if one.name not in earlier or self._rewrites}
        if columns and self.facts.asks and not self._rewrites and not self.facts.makes_rows:
            self.error_column = f"{self.prefix}{self.name}_error"
            columns[self.error_column] = pa.string()
        return columns

    def prepare(self, context: StageContext) -> None:
        self._read_arrays = context.read_arrays
        if self.op is None:
            self.op = self.make()
            self._probe()

    def _probe(self) -> None:
        """Process one line of text, so that a missing package is found before the first batch."""
        facts = self.facts
        if facts.data_keys != {"text_key"} or facts.asks or facts.reads_all or self.name.startswith("ray_"):
            return
        try:
            samples: Samples = {"text": ["Two plain sentences. This is the second one."]}
            with runtime.missing_package_named():
                if facts.kind == "filter":
                    runtime.compute_stats(self.op, samples, 1)
                elif facts.kind == "mapper":
                    runtime.process(self.op, samples, 1, tags=facts.tags)
                else:
                    runtime.select(self.op, facts.kind, samples, 1)
        except PluginError:
            raise
        except Exception:  # noqa: BLE001 - other errors on a line of plain text do not predict those on real batches
            return

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._plan is None:
            self.validate_schema(table.schema)
        if self.op is None:
            self.prepare(StageContext())
        readable_by_column = {source.written: source.is_there(table) for source in self.plan.texts}
        unread = [name for name, is_there in readable_by_column.items() if is_there.false_count]
        if not unread:
            outcome = self._compute(table)
            reasons = (
                pa.nulls(table.num_rows, pa.string())
                if outcome.reasons is None
                else pa.array(outcome.reasons, pa.string())
            )
            return StageOutcome(reasons, outcome.columns, created=outcome.created)
        readable = functools.reduce(pc.and_, (readable_by_column[name] for name in unread))
        part = table.filter(readable)
        outcome = self._compute(part) if part.num_rows else JuicerOutcome()
        return self._with_unread(table, readable, outcome, unread[0])

    def _with_unread(self, table: pa.Table, readable: pa.Array, outcome: JuicerOutcome, unread: str) -> StageOutcome:
        """Return the outcome for all rows. Rows with a null text are kept by a mapper, left unscored by a filter, else dropped."""
        mask = readable.to_numpy(zero_copy_only=False)
        place = pa.array(np.cumsum(mask) - 1, mask=~mask)
        keeps = self.facts.kind == "mapper" or bool(self.scores)
        reasons = np.full(table.num_rows, None if keeps else self.unreadable(unread), object)
        reasons[mask] = outcome.reasons
        columns = {}
        for name, kind in self.scores.items():
            columns[name] = (
                outcome.columns[name].take(place) if name in outcome.columns else pa.nulls(table.num_rows, kind)
            )
        for name, values in outcome.columns.items():
            if name in columns:
                continue
            columns[name] = values.take(place)
            if name in table.column_names:
                columns[name] = pc.if_else(readable, columns[name], table[name].combine_chunks())
        return StageOutcome(pa.array(reasons, pa.string()), columns, created=outcome.created)

    def _compute(self, table: pa.Table) -> JuicerOutcome:
        """Run the operator on rows that it can read."""
        if self.mode == "ray" and self.rowwise:
            return over_ray.spread(_Copy(self.name, {**self.args, "prefix": self.prefix}, self._schema), table)
        if self.name.startswith("ray_"):
            return JuicerOutcome(over_ray.keeps_first(self.make(), self.name, self.plan.samples(table), table.num_rows))
        return self.compute_here(table)

    def compute_here(self, table: pa.Table) -> JuicerOutcome:
        """Run the operator in this process."""
        samples = self.plan.samples(table, self._read_arrays)
        with runtime.missing_package_named():
            if self.facts.asks or self.facts.plain:
                return self._decided(samples, table)
            with runtime.repeatable():
                return self._decided(samples, table)

    def _decided(self, samples: Samples, table: pa.Table) -> JuicerOutcome:
        num_rows = table.num_rows
        if self.facts.kind == "filter":
            return statistics(self, samples, num_rows)
        if self.facts.kind == "mapper":
            return mapped(self, samples, table)
        kept, left = runtime.select(self.op, self.facts.kind, samples, num_rows)
        reason = f"not selected by {self.name}"
        if self.facts.kind == "deduplicator":
            reason = f"duplicate of an earlier row of the batch ({self.name})"
        outcome = JuicerOutcome([None if row in kept else reason for row in range(num_rows)])
        if self.facts.kind == "deduplicator":
            rows = left.get(ROW, [])
            for source in self.plan.sources:
                values = list(samples[source.name])
                for row, value in zip(rows, left.get(source.name, [])):
                    values[row] = value
                if values != samples[source.name]:
                    outcome.columns[source.column] = source.write(table, values)
        return outcome

    def decide(self, table: pa.Table) -> StageOutcome:
        """Apply a filter's own decision to its statistics. A tagging mapper keeps all rows."""
        return StageOutcome(decisions(self, table)) if self.facts.kind == "filter" else super().decide(table)


@dataclass(frozen=True)
class _Copy:
    """What another process needs to create a stage with the first call, since operators cannot be pickled."""

    name: str
    args: Mapping[str, Any]
    schema: pa.Schema

    def __call__(self, table: pa.Table) -> JuicerOutcome:
        return _made(json.dumps([self.name, self.args], sort_keys=True), self.schema).compute_here(table)


@functools.lru_cache(maxsize=32)
def _made(what: str, schema: pa.Schema) -> DataJuicerStage:
    name, args = json.loads(what)
    stage = DataJuicerStage(name, args)
    stage.validate_schema(schema)
    stage.prepare(StageContext())
    return stage
