"""Trial of a chain on a few rows, to find a stage that fails on its first row before a run.

Every stage sees all rows, whatever earlier stages decided about them. Decisions, scores, questions and created tasks are discarded.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pyarrow as pa

from operators.base import UnavailableError
from operators.chain.apply import apply_stage
from operators.chain.chain import Chain
from operators.chain.stage import Stage, error_at_stage, failed, written_columns
from rftdata.errors import PluginError
from rftdata.pipeline.records import Verdicts

_ASKS_A_MODEL = "it may run or ask a model"


def try_stages(chain: Chain, table: pa.Table) -> dict[str, str]:
    """Apply the stages of a prepared chain to all rows.

    Args:
        table: as for `Chain.run`.

    Returns:
        The stages that were not tried, with the reason: they run or ask a model, need something that does not respond, or read
        columns of such a stage.

    Raises:
        StageError, PluginError: a stage fails.
    """
    table = chain.checked(table)
    skipped: dict[str, str] = {}
    for stage in chain.stages:
        operator = stage.operator
        missing = bool(skipped) and (operator.reads is None or not operator.reads <= set(table.column_names))
        if missing or operator.seconds_per_row:
            skipped[stage.name] = "it reads columns of a stage that was not tried" if missing else _ASKS_A_MODEL
            continue
        try:
            table = _applied(stage, table)
        except UnavailableError as error:
            skipped[stage.name] = error.what
            if written_columns(operator) is None:
                break  # any column may be missing
    return skipped


def _applied(stage: Stage, table: pa.Table) -> pa.Table:
    """Return the table with the stage's columns."""
    once = replace(stage, options=stage.options.model_copy(update={"retries": 0}))
    started = time.perf_counter()
    try:
        outcome = apply_stage(once, table, {}).outcome
    except PluginError as error:
        raise error_at_stage(stage.index, stage.name, error) from error
    except Exception as error:
        for cause in (error, error.__cause__):  # an error of a row function is the cause of ours
            if isinstance(cause, UnavailableError):
                raise cause from None
        raise failed(stage, error, table.num_rows, time.perf_counter() - started, Verdicts()) from error
    for name, values in outcome.columns.items():
        position = table.schema.get_field_index(name)
        table = table.append_column(name, values) if position < 0 else table.set_column(position, name, values)
    return table
