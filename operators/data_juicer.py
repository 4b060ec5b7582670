"""Any Data-Juicer operator by its own name as a stage, with its own arguments.

    - text_length_filter: {min_len: 10, max_len: 2000}
    - clean_links_mapper: {}
    - document_deduplicator: {lowercase: true, text_key: prompt}
    - image_aspect_ratio_filter: {image_key: metadata.images}

`text_key`, `query_key`, `image_key` and so on name the columns to read; by default a text is the `response` (of a task the `prompt`).
The operator's own methods are called on the batch as it stands, without JSON or a Hugging Face data set in between.

A filter's statistics become columns (`dj_text_len`; `prefix: prompt_` makes it `prompt_text_len`) that later stages read. They are
scores: stored, and not computed again when only the bounds change, since bounds are looked at in `decide`. So are the tags of
a mapper that only tags. Other mappers change columns for the later stages only: what was sampled stays as it is in the
buffer. A deduplicator or selector decides within the batch it is given. A mapper that makes several rows of one is refused on
experiences; on tasks each becomes a new task, and the old one is dropped. Groupers, aggregators and pipelines are refused.

`mode: ray` spreads a stage over a Ray cluster (`operators.data_juicer_ray`). Whole recipes: `operators.data_juicer_recipe`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators import data_juicer_runtime as runtime
from operators.base import CreatedTask, Operator, StageConfig, StageContext, StageOutcome, unknown_key
from operators.data_juicer_columns import TEXT_KEYS, Plan, column_name, column_of, make_plan, plain
from operators.data_juicer_making import made_tasks, reasons_of
from operators.data_juicer_runtime import META, ROW, STATS, Samples
from operators.data_juicer_source import DATA_KEYS, RUNNING, facts, meta_type, stat_type
from rftdata.errors import ConfigError, OperatorError, PluginError

ROW_MAKING_KINDS = ("grouper", "aggregator", "pipeline")
MODES = ("default", "ray")
OWN_ARGUMENTS = ("prefix", "mode")
_NOTHING: tuple[Any, ...] = (None, "", [], {})
_OF_NEW_TASKS = frozenset({"task_key", "taskset", "prompt", "answer", "metadata"})


@dataclass
class Found:
    """What an operator made of a table whose texts are all there: what `StageOutcome` holds, before nulls are put back."""

    reasons: list[str | None] | None = None
    columns: dict[str, pa.Array] = field(default_factory=dict)
    created: list[CreatedTask] = field(default_factory=list)


class DataJuicerStage(Operator):
    """One Data-Juicer operator; see the module's text for what each kind does."""

    def __init__(self, name: str, args: object) -> None:
        super().__init__(StageConfig())
        if not isinstance(args, Mapping | None):
            raise ConfigError("its arguments are not a mapping", value=args)
        self.name = name
        self.facts = facts(name)
        self.args: dict[str, Any] = {str(key): value for key, value in (args or {}).items()}
        self.mode = self.args.pop("mode", "default")
        self.prefix = self.args.pop("prefix", "dj_")
        self._check()
        self.rowwise = self.facts.kind in ("filter", "mapper") and not self.facts.draws and not name.startswith("ray_")
        self.reads = None
        self.writes = None
        self._plan: Plan | None = None
        self._schema: pa.Schema | None = None
        self._op: Any = None

    def _check(self) -> None:
        if self.facts.kind in ROW_MAKING_KINDS:
            raise PluginError(
                f"the Data-Juicer operator {self.name!r} is one of those that make other rows ({self.facts.kind})",
                allowed="filters, mappers, deduplicators and selectors",
                todo="run it in a Data-Juicer job of its own before the tasks are loaded",
            )
        known = self.facts.known_arguments
        for key in self.args if known is not None else ():
            if known is not None and key not in known:
                raise unknown_key(key, [*(self.facts.arguments or ()), "text_key", *OWN_ARGUMENTS])
        if self.mode not in MODES:
            raise ConfigError("there is no such mode", value=self.mode, allowed=", ".join(MODES))
        if not isinstance(self.prefix, str) or not re.fullmatch(r"[A-Za-z_]\w*", self.prefix):
            raise ConfigError(
                "prefix does not start a column's name", value=self.prefix, allowed="letters, digits and _"
            )

    def spec(self) -> dict[str, Any]:
        args = {key: _without_secrets(value) for key, value in self.args.items() if key not in RUNNING}
        return {"args": args, "prefix": self.prefix, runtime.PACKAGE: runtime.version()}

    def depends_on(self) -> str | None:
        """Where it draws, the other rows of the batch, too: such scores are not used again."""
        return None if self.facts.draws else ""

    def score_spec(self) -> dict[str, Any]:
        spec = self.spec()
        spec["args"] = {key: value for key, value in spec["args"].items() if key not in self.facts.bounds}
        columns = self._plan.sources if self._plan and not self.facts.reads_all else ()
        return {**spec, "columns": [[source.name, source.column, *source.path] for source in columns]}

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        self._schema = schema
        self._plan = plan = make_plan(self.facts, self.args, self.prefix, schema)
        self.reads = None if self.facts.reads_all else plan.reads
        if self.facts.kind == "mapper" and "task_key" in schema.names and self.reads is not None:
            self.reads |= _OF_NEW_TASKS & set(schema.names)
        found = self._found_columns(plan)
        if self.facts.splits or (self.facts.metas and not self._rewrites):
            self.scores = found
            self.writes = frozenset()
        elif self.facts.kind in ("filter", "selector"):
            self.writes = frozenset()
        elif self.facts.kind == "mapper" and (self.facts.reads_all or self.facts.data_keys - TEXT_KEYS):
            self.writes = None
        else:
            self.writes = frozenset(source.column for source in plan.sources) | frozenset(found)
        for name, kind in found.items():
            position = schema.get_field_index(name)
            added = pa.field(name, kind)
            schema = schema.append(added) if position < 0 else schema.set(position, added)
        return schema

    @property
    def _rewrites(self) -> bool:
        return self.facts.rewrites or bool(self.args.get("drop_text"))

    def _found_columns(self, plan: Plan) -> dict[str, pa.DataType]:
        """Columns of what the operator finds out about a row, with their types."""
        if self.facts.splits:
            found = {column_name(self.prefix, name): stat_type(name) for name in self.facts.stats}
            if self.facts.asks:
                self.error_column = f"{self.prefix}{self.name}_error"
                found[self.error_column] = pa.string()
            return found
        given = {column for _, _, column in plan.nested}
        found = {column: meta_type(name) for name, column in plan.made.items() if column not in given or self._rewrites}
        if found and self.facts.asks and not self._rewrites:
            self.error_column = f"{self.prefix}{self.name}_error"
            found[self.error_column] = pa.string()
        return found

    def prepare(self, context: StageContext) -> None:
        if self._op is None:
            self._op = self._make()
            self._probe()

    def close(self) -> None:
        self._op = None

    def _make(self) -> Any:
        keys = {key: DATA_KEYS[key] for key in self.facts.data_keys}
        return runtime.make_operator(self.name, {**self.args, **keys})

    def _probe(self) -> None:
        """Run one line of text through, so that a missing package is found before the first batch."""
        known = self.facts
        if known.data_keys != {"text_key"} or known.asks or known.reads_all or self.name.startswith("ray_"):
            return
        try:
            samples: Samples = {"text": ["Two plain sentences. This is the second one."]}
            with runtime.missing_package_named():
                if known.kind == "filter":
                    runtime.compute_stats(self._op, samples, 1)
                elif known.kind == "mapper":
                    runtime.process(self._op, samples, 1, tags=known.tags)
                else:
                    runtime.select(self._op, known.kind, samples, 1)
        except PluginError:
            raise
        except Exception:  # noqa: BLE001 - whatever else a line of plain text provokes says nothing about real batches
            return

    @property
    def whole_schema(self) -> pa.Schema:
        """The columns of the batches of its chain at this place."""
        assert self._schema is not None
        return self._schema

    @property
    def plan(self) -> Plan:
        """The columns it reads and makes; known once the schema is."""
        assert self._plan is not None
        return self._plan

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._plan is None:
            self.validate_schema(table.schema)
        if self._op is None:
            self.prepare(StageContext())
        unread = [name for name in self.plan.texts if table[name].null_count]
        if not unread:
            found = self._compute(table)
            reasons = (
                pa.nulls(table.num_rows, pa.string()) if found.reasons is None else pa.array(found.reasons, pa.string())
            )
            return StageOutcome(reasons, found.columns, created=found.created)
        readable = pc.is_valid(table[unread[0]].combine_chunks())
        for name in unread[1:]:
            readable = pc.and_(readable, pc.is_valid(table[name].combine_chunks()))
        part = table.filter(readable)
        found = self._compute(part) if part.num_rows else Found()
        return self._with_unread(table, readable, found, unread[0])

    def _with_unread(self, table: pa.Table, readable: pa.Array, found: Found, unread: str) -> StageOutcome:
        """The outcome for all rows: those with a null text are kept by a mapper, unscored by a filter, else dropped."""
        mask = readable.to_numpy(zero_copy_only=False)
        place = pa.array(np.cumsum(mask) - 1, mask=~mask)
        keeps = self.facts.kind == "mapper" or bool(self.scores)
        reasons = np.full(table.num_rows, None if keeps else self._unreadable(unread), object)
        reasons[mask] = found.reasons
        columns = {}
        for name, kind in self.scores.items():
            columns[name] = found.columns[name].take(place) if name in found.columns else pa.nulls(table.num_rows, kind)
        for name, values in found.columns.items():
            if name in columns:
                continue
            columns[name] = values.take(place)
            if name in table.column_names:
                columns[name] = pc.if_else(readable, columns[name], table[name].combine_chunks())
        return StageOutcome(pa.array(reasons, pa.string()), columns, created=found.created)

    def _unreadable(self, column: str) -> str:
        return f"{column} is null, which {self.name} cannot read"

    def _compute(self, table: pa.Table) -> Found:
        """What the operator makes of rows that it can read."""
        if self.mode == "ray" and self.rowwise:
            from operators.data_juicer_ray import spread

            return spread(self, table)
        if self.name.startswith("ray_"):
            from operators.data_juicer_ray import keeps_first

            return Found(keeps_first(self._make(), self.name, self.plan.samples(table), table.num_rows))
        return self.compute_here(table)

    def compute_here(self, table: pa.Table) -> Found:
        """The same, in this process."""
        samples = self.plan.samples(table)
        with runtime.missing_package_named():
            if self.facts.asks or self.facts.plain:
                return self._decided(samples, table)
            with runtime.repeatable():
                return self._decided(samples, table)

    def _decided(self, samples: Samples, table: pa.Table) -> Found:
        num_rows = table.num_rows
        if self.facts.kind == "filter":
            return self._filter(samples, num_rows)
        if self.facts.kind == "mapper":
            return self._map(samples, table)
        kept, left = runtime.select(self._op, self.facts.kind, samples, num_rows)
        reason = f"not selected by {self.name}"
        if self.facts.kind == "deduplicator":
            reason = f"duplicate of an earlier row of the batch ({self.name})"
        found = Found([None if row in kept else reason for row in range(num_rows)])
        if self.facts.kind == "deduplicator":
            rows = left.get(ROW, [])
            for source in self.plan.sources:
                values = list(samples[source.name])
                for row, value in zip(rows, left.get(source.name, [])):
                    values[row] = value
                if values != samples[source.name]:
                    found.columns[source.column] = source.write(table, values)
        return found

    def _filter(self, samples: Samples, num_rows: int) -> Found:
        given = samples.pop(STATS, None)
        samples = runtime.compute_stats(self._op, samples, num_rows, given)
        if not self.facts.splits:
            kept = runtime.keeps(self._op, samples, num_rows)
            reason = reasons_of(self._op, self.name, self.args)
            return Found([None if keep else reason(stats) for keep, stats in zip(kept, samples[STATS])])
        stats = samples[STATS]
        columns: dict[str, pa.Array] = {}
        if self.facts.asks:
            stats, errors = self._answered(stats)
            columns[str(self.error_column)] = pa.array(errors, pa.string())
        for name in self.facts.stats:
            kind = stat_type(name)
            columns[column_name(self.prefix, name)] = column_of([row.get(name) for row in stats], kind)
        return Found(None, columns)

    def _answered(self, stats: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str | None]]:
        """Statistics without those that stand for a call that failed, and what to say of these.

        Data-Juicer's operators swallow what an endpoint raises and give zero or false.
        """
        failed = [not _has_answer(row) for row in stats]
        if stats and all(failed):
            raise OperatorError(
                f"{self.name} got no answer that it understands for any of {len(stats)} rows", value=self._endpoint(),
                todo="check that the endpoint runs and knows the model (api_endpoint, model_params.base_url, OPENAI_BASE_URL)",
            )  # fmt: skip
        errors = ["the endpoint gave no answer that the operator understands" if bad else None for bad in failed]
        return [{} if bad else dict(row) for row, bad in zip(stats, failed)], errors

    def _endpoint(self) -> object:
        return (
            self.args.get("api_or_hf_model") or self.args.get("api_model") or self.facts.defaults.get("api_or_hf_model")
        )

    def decide(self, table: pa.Table) -> pa.Array:
        """A filter's own decision on its statistics, as stored; rows without are dropped. A tagging mapper keeps all."""
        if self.facts.kind != "filter":
            return pa.nulls(table.num_rows, pa.string())
        if self._op is None:
            self.prepare(StageContext())
        values = {name: table[column_name(self.prefix, name)] for name in self.facts.stats}
        found = {name: column for name, column in values.items() if column.null_count < table.num_rows}
        if len(found) == 1 and not next(iter(found.values())).null_count:
            ((name, column),) = found.items()
            stats = [{name: value} for value in column.to_pylist()]
        else:
            rows = {name: column.to_pylist() for name, column in found.items()}
            stats = [
                {name: column[row] for name, column in rows.items() if column[row] is not None}
                for row in range(table.num_rows)
            ]
        scored = [row for row in stats if row]
        with runtime.missing_package_named():
            kept = runtime.keeps(self._op, {STATS: scored}, len(scored)) if scored else []
        reason = reasons_of(self._op, self.name, self.args)
        if len(scored) == table.num_rows:
            return pa.array([None if keep else reason(row) for keep, row in zip(kept, stats)], pa.string())
        answers = iter(kept)
        reasons = [
            (None if next(answers) else reason(row)) if row else self._unscored(table, position)
            for position, row in enumerate(stats)
        ]
        return pa.array(reasons, pa.string())

    def _unscored(self, table: pa.Table, position: int) -> str:
        for name in self.plan.texts:
            if not table[name][position].is_valid:
                return self._unreadable(name)
        why = table[self.error_column][position].as_py() if self.error_column else None
        return f"{self.name} has no statistic for it" + (f": {why}" if why else "")

    def _map(self, samples: Samples, table: pa.Table) -> Found:
        num_rows, is_task = table.num_rows, "task_key" in table.column_names
        marks = {ROW: list(range(num_rows))} if is_task else {}
        result = runtime.process(self._op, {**samples, **marks}, num_rows, tags=self.facts.tags)
        rows = list(result.pop(ROW, range(num_rows)))
        lengths = {len(values) for name, values in result.items() if name in samples} or {num_rows}
        if lengths != {num_rows} or rows != list(range(num_rows)):
            if not is_task:
                raise OperatorError(
                    f"{self.name} made {max(lengths)} rows of {num_rows}",
                    allowed="on experiences, mappers that give one row for one row",
                    todo="use it on tasks (pipelines.task), where each becomes a task",
                )
            return Found(*made_tasks(self.name, self.plan, samples, result, rows, table))
        return Found(None, self._changed(samples, result, table))

    def _changed(self, samples: Samples, result: Samples, table: pa.Table) -> dict[str, pa.Array]:
        """Columns that a mapper changed or added."""
        columns = {}
        for source in self.plan.sources:
            values = result.get(source.name) if source.name in samples else None
            if values is not None and list(values) != samples[source.name]:
                columns[source.column] = source.write(table, list(values))
        metas = result.get(META, [])
        for name, column in self.plan.made.items():
            if column in self.scores or any(name in meta for meta in metas):
                columns[column] = column_of([plain(meta.get(name)) for meta in metas], meta_type(name))
        if self.error_column:
            empty = [all(plain(meta.get(name)) in _NOTHING for name in self.plan.made) for meta in metas]
            columns[self.error_column] = pa.array(
                ["the endpoint gave nothing" if bad else None for bad in empty], pa.string()
            )
        known = {*samples, META, STATS}
        for name in result.keys() - known if self.writes is None else ():
            columns[name] = _new_column([plain(value) for value in result[name]])
        return columns


def _has_answer(stats: Mapping[str, Any]) -> bool:
    """Whether a model's answer stands behind statistics: there is a record of it, or tokens were counted."""
    records = [value for name, value in stats.items() if name.endswith("_record")]
    usage = stats.get("llm_semantic_usage")
    if isinstance(usage, Mapping):
        return bool(usage.get("total_tokens"))
    return any(records) if records else bool(stats)


def _without_secrets(value: Any) -> Any:
    """An argument as it may be stored with a pipeline's version."""
    if isinstance(value, Mapping):
        return {key: _without_secrets(inner) for key, inner in value.items() if key != "api_key"}
    return value


def _new_column(values: list[Any]) -> pa.Array:
    """A column that a mapper added under a name of its own."""
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return pa.array(
            [value if isinstance(value, str | None) else json.dumps(value) for value in values], pa.string()
        )
