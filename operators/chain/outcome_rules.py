"""Rules for what a stage may return: declared columns, one decision per row, storable questions and new rows."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from operators.base import IDENTITY_COLUMNS, CreatedGroup, CreatedTask, Review, StageOutcome
from operators.chain.stage import Stage, written_columns
from rftdata.errors import OperatorError, QueryError
from rftdata.limits import check_name, check_task_name


def checked_outcome(stage: Stage, outcome: StageOutcome, table: pa.Table) -> StageOutcome:
    """Return the outcome if it obeys the rules for all stages.

    Raises:
        OperatorError: names the broken rule.
    """
    checked_reasons(outcome, table)
    _check_waiting(stage, outcome, table.num_rows)
    for made in outcome.created:
        check_created(made)
    written = written_columns(stage.operator)
    for name, values in outcome.columns.items():
        if name in IDENTITY_COLUMNS:
            raise OperatorError(f"changes {name}, which identifies a row and must not change")
        if written is not None and name not in written:
            raise OperatorError(
                f"returned the column {name}, which it does not declare",
                allowed=", ".join(sorted(written)) or "none",
                todo="add it to `writes` of the operator",
            )
        if len(values) != table.num_rows:
            raise OperatorError(f"returned {len(values)} values of {name} for {table.num_rows} rows")
    missing = sorted(set(stage.operator.scores) - set(outcome.columns))
    if missing:
        raise OperatorError(f"scores {missing[0]}, but did not return it")
    if stage.operator.scores and outcome.reasons.null_count < table.num_rows:
        raise OperatorError(
            "drops rows while it scores", todo="let `apply` score, and `decide` or a stage after it decide"
        )
    return outcome


def checked_reasons(outcome: StageOutcome, table: pa.Table) -> StageOutcome:
    """Return the outcome if it has a reason or null for every row."""
    if len(outcome.reasons) != table.num_rows:
        raise OperatorError(f"decided on {len(outcome.reasons)} rows of {table.num_rows}")
    kind = outcome.reasons.type
    if not (pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise OperatorError(
            "returned reasons that are not texts", value=str(kind), allowed="a text, or null where a row stays"
        )
    return outcome


def _check_waiting(stage: Stage, outcome: StageOutcome, num_rows: int) -> None:
    waiting: Mapping[Any, Any] = outcome.waiting  # a stage may return anything
    for row, review in waiting.items():
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < num_rows:
            raise OperatorError("makes a row wait that it was not given", value=row, allowed=f"0 to {num_rows - 1}")
        if not isinstance(review, Review) or not (
            review.name and review.otherwise in ("pass", "drop") and 0 < review.timeout_s < math.inf
        ):
            raise OperatorError(
                "asks a question that is not valid",
                value=review,
                allowed="a Review with a name, a finite timeout_s above 0, and otherwise: pass or drop",
            )
        try:
            check_name("the name of a question", review.name)
        except QueryError as error:
            raise OperatorError(error.what, value=error.value, allowed=error.allowed) from error
        declared = stage.operator.asks
        if declared is not None and review.name not in declared:
            raise OperatorError(
                f"asks the question {review.name!r}, which it does not declare",
                allowed=", ".join(sorted(declared)) or "none",
                todo="add it to `asks` of the operator",
            )


def check_created(made: object) -> None:
    """Refuse new tasks and groups that cannot be stored: their names, and contents that JSON cannot hold."""
    if not isinstance(made, CreatedTask | CreatedGroup):
        raise OperatorError("created something that is neither a task nor a group", value=type(made).__name__)
    task = made.task if isinstance(made, CreatedGroup) else made
    try:
        if task:
            check_task_name(task.taskset, task.task_key)
        if isinstance(made, CreatedGroup):
            check_name("the key of a group", made.key)
    except QueryError as error:
        raise OperatorError(
            f"created something that cannot be stored: {error.what}", value=error.value, allowed=error.allowed
        ) from error
    answers = [
        [list(one.messages), one.response, one.reward, dict(one.metrics)] for one in getattr(made, "answers", ())
    ]
    try:
        json.dumps([[dict(task.payload), dict(task.features)] if task else None, answers])
    except (TypeError, ValueError) as error:
        raise OperatorError(
            f"created a task that JSON cannot hold: {error}",
            value=task.task_key if task else made.parent_id,
            allowed="texts, numbers, true, false, null, lists and mappings of these",
        ) from error
