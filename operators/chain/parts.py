"""Run a stage over a table in parts: part sizes, concurrency, and retries."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from operators.base import StageOutcome
from operators.chain.stage import Stage
from rftdata.errors import ConfigError, PluginError, TimeLimitError
from rftdata.user_code.time_limits import call

_RETRY_AFTER_S = 0.2
_LONGEST_PAUSE_S = 10.0


def in_parts(stage: Stage, table: pa.Table) -> StageOutcome:
    """Run the stage over the table; cut a rowwise stage's table into parts that run concurrently."""
    options, num_rows = stage.options, table.num_rows
    size = options.batch_rows or -(-num_rows // options.concurrency)
    if not stage.operator.rowwise or size >= num_rows:
        return _try(stage, table)
    starts = range(0, num_rows, size)
    with ThreadPoolExecutor(options.concurrency, thread_name_prefix=stage.name) as pool:
        outcomes = list(pool.map(lambda start: _try(stage, table.slice(start, size).combine_chunks()), starts))
    names = list(dict.fromkeys(name for outcome in outcomes for name in outcome.columns))
    columns = {
        name: _joined([_part(outcome, name, table, start, size) for outcome, start in zip(outcomes, starts)])
        for name in names
    }
    return StageOutcome(
        pa.chunked_array([outcome.reasons for outcome in outcomes], pa.string()).combine_chunks(),
        columns,
        {start + row: review for outcome, start in zip(outcomes, starts) for row, review in outcome.waiting.items()},
        [made for outcome in outcomes for made in outcome.created],
    )


def _part(outcome: StageOutcome, name: str, table: pa.Table, start: int, size: int) -> pa.Array:
    """Return a part's values of a column: unchanged if this part did not set it, nulls where the column is new."""
    values = outcome.columns.get(name)
    if values is None:
        num_rows = min(size, table.num_rows - start)
        values = table[name].slice(start, size) if name in table.column_names else pa.nulls(num_rows)
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _joined(parts: Sequence[pa.Array]) -> pa.Array:
    """Concatenate parts of a column in the type that holds them all (a part of nulls has no type)."""
    schemas = [pa.schema([("values", part.type)]) for part in parts]
    kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    return pa.concat_arrays([part.cast(kind) for part in parts])


def _try(stage: Stage, table: pa.Table) -> StageOutcome:
    for number in range(stage.options.retries + 1):
        try:
            return call(lambda: stage.operator.apply(table), stage.timeout_s(table.num_rows), stage.on_rows(table))
        except (ConfigError, PluginError, TimeLimitError):
            raise  # a wrong argument, a missing package or an endless loop would fail again
        except Exception:
            if number == stage.options.retries:
                raise
            time.sleep(min(_LONGEST_PAUSE_S, _RETRY_AFTER_S * 2**number))
    raise AssertionError("unreachable")
