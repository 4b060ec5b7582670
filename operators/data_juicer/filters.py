"""Filters: computing their statistics as columns, and applying their own decision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from operators.base import StageContext, UnavailableError
from operators.data_juicer import runtime
from operators.data_juicer.base import JuicerOperator, JuicerOutcome
from operators.data_juicer.catalogue import DATA_KEYS
from operators.data_juicer.columns import column_name, column_of
from operators.data_juicer.runtime import STATS, Samples
from rftdata.errors import OperatorError


def statistics(stage: JuicerOperator, samples: Samples, num_rows: int) -> JuicerOutcome:
    """Compute a filter's columns, or its reasons if it does not decide on its statistics alone."""
    earlier_stats = samples.pop(STATS, None)
    samples = runtime.compute_stats(stage.op, samples, num_rows, earlier_stats)
    if not stage.facts.splits:
        kept = runtime.keeps(stage.op, samples, num_rows)
        reason = _reasons_of(stage.op, stage.name, stage.args)
        return JuicerOutcome([None if keep else reason(stats) for keep, stats in zip(kept, samples[STATS])])
    stats = samples[STATS]
    columns: dict[str, pa.Array] = {}
    if stage.facts.asks:
        stats, errors = _answered(stage, stats)
        columns[str(stage.error_column)] = pa.array(errors, pa.string())
    for name, kind in stage.facts.stats.items():
        columns[column_name(stage.prefix, name)] = column_of([row.get(name) for row in stats], kind)
    return JuicerOutcome(None, columns)


def _answered(stage: JuicerOperator, stats: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str | None]]:
    """Separate statistics of failed calls from the others; return the statistics and an error per row.

    Data-Juicer's operators swallow endpoint errors and return zero or false.
    """
    failed = [not _has_answer(row) for row in stats]
    if stats and all(failed):
        raise no_answer(stage, f"{len(stats)} rows")
    errors = [NO_ANSWER if bad else None for bad in failed]
    return [{} if bad else dict(row) for row, bad in zip(stats, failed)], errors


NO_ANSWER = "the endpoint gave no answer that the operator understands"


def no_answer(stage: JuicerOperator, what: str, *, is_silent: bool = False) -> OperatorError:
    """Return the error for a batch in which no call succeeded; `is_silent`: no call returned any text."""
    model = (
        stage.args.get("api_or_hf_model") or stage.args.get("api_model") or stage.facts.defaults.get("api_or_hf_model")
    )
    kind = UnavailableError if is_silent else OperatorError
    return kind(
        f"{stage.name} got no answer that it understands for any of {what}",
        value=model,
        todo="check that the endpoint runs and knows the model (api_endpoint, model_params.base_url, OPENAI_BASE_URL)",
    )


def _has_answer(stats: Mapping[str, Any]) -> bool:
    """Return whether statistics come from a model's answer: it has a record, or tokens were counted."""
    records = [value for name, value in stats.items() if name.endswith("_record")]
    usage = stats.get("llm_semantic_usage")
    if isinstance(usage, Mapping):
        return bool(usage.get("total_tokens"))
    return any(records) if records else bool(stats)


def decisions(stage: JuicerOperator, table: pa.Table) -> pa.Array:
    """Apply a filter's own decision to its stored statistics; rows without statistics are dropped."""
    if stage.op is None:
        stage.prepare(StageContext())
    values = {name: table[column_name(stage.prefix, name)] for name in stage.facts.stats}
    columns = {name: column for name, column in values.items() if column.null_count < table.num_rows}
    if len(columns) == 1 and not next(iter(columns.values())).null_count:
        ((name, column),) = columns.items()
        stats = [{name: value} for value in column.to_pylist()]
    else:
        rows = {name: column.to_pylist() for name, column in columns.items()}
        stats = [
            {name: column[row] for name, column in rows.items() if column[row] is not None}
            for row in range(table.num_rows)
        ]
    scored = [row for row in stats if row]
    with runtime.missing_package_named():
        kept = runtime.keeps(stage.op, {STATS: scored}, len(scored)) if scored else []
    reason = _reasons_of(stage.op, stage.name, stage.args)
    if len(scored) == table.num_rows:
        return pa.array([None if keep else reason(row) for keep, row in zip(kept, stats)], pa.string())
    answers = iter(kept)
    reasons = [
        (None if next(answers) else reason(row)) if row else _unscored(stage, table, position)
        for position, row in enumerate(stats)
    ]
    return pa.array(reasons, pa.string())


def _unscored(stage: JuicerOperator, table: pa.Table, position: int) -> str:
    for source in stage.plan.texts:
        if not source.is_there(table.slice(position, 1))[0].as_py():
            return stage.unreadable(source.written)
    why = table[stage.error_column][position].as_py() if stage.error_column else None
    return f"{stage.name} has no statistic for it" + (f": {why}" if why else "")


def _reasons_of(op: Any, name: str, args: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """Return a function that describes a drop by the broken bound, as in `text_len 3 < min_len 10`."""
    bounds = {
        key: value
        for key, value in vars(op).items()
        if key.startswith(("min_", "max_")) and isinstance(value, int | float) and not isinstance(value, bool)
    }
    lower = [(f"< {key} {_number(value)}", value) for key, value in bounds.items() if key.startswith("min_")]
    upper = [(f"> {key} {_number(value)}", value) for key, value in bounds.items() if key.startswith("max_")]
    wanted = ", ".join(f"{key} {value}" for key, value in (args or bounds).items() if key not in DATA_KEYS)

    def reason(stats: Mapping[str, Any]) -> str:
        if len(stats) == 1:
            ((statistic, value),) = stats.items()
            if isinstance(value, int | float):
                for bound, limit in lower:
                    if value < limit:
                        return f"{statistic} {_number(value)} {bound}"
                for bound, limit in upper:
                    if value > limit:
                        return f"{statistic} {_number(value)} {bound}"
        values = ", ".join(
            f"{key} is {_number(value)}" for key, value in stats.items() if isinstance(value, int | float | str | list)
        )
        return f"{name}: {values or 'its condition is false'}" + (f" ({wanted})" if wanted else "")

    return reason


def _number(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(_number(inner) for inner in value) + "]"
    if isinstance(value, float):
        return f"{int(value)}" if value.is_integer() and abs(value) < 1e15 else f"{value:.6g}"
    return str(value)
