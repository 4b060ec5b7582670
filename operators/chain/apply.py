"""Apply one stage to one table: select its columns, reuse stored scores, and compute the missing ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from operators.base import IDENTITY_COLUMNS, Operator, StageOutcome
from operators.chain.input_digests import input_digests
from operators.chain.outcome_rules import check_created, checked_outcome, checked_reasons
from operators.chain.parts import in_parts
from operators.chain.stage import Stage
from rftdata.errors import OperatorError
from rftdata.pipeline.records import as_stored
from rftdata.pipeline.scores import StageScores, StoredScore, StoredScores
from rftdata.user_code.time_limits import call


@dataclass
class Applied:
    """The outcome of a stage on a table, and the scores it computed."""

    outcome: StageOutcome
    scores: StageScores | None = None


def apply_stage(stage: Stage, table: pa.Table, stored_scores: StoredScores) -> Applied:
    """Run one stage over a table that has rows, and check what it returns.

    Raises:
        OperatorError: the stage broke a rule. Otherwise whatever the stage raised in its last try.
    """
    declared = _declared_columns(stage.operator, table)
    if not stage.operator.scores:
        return Applied(checked_outcome(stage, in_parts(stage, declared), table))
    columns, scores = _scored(stage, declared, stored_scores.get(stage.score_key, {}))
    for name, values in columns.items():
        position = declared.schema.get_field_index(name)
        declared = declared.append_column(name, values) if position < 0 else declared.set_column(position, name, values)
    decided = call(lambda: stage.operator.decide(declared), stage.timeout_s(declared.num_rows), stage.on_rows(declared))
    if not isinstance(decided, StageOutcome):
        raise OperatorError(
            "`decide` returned no StageOutcome", value=type(decided).__name__, todo="return StageOutcome(reasons)"
        )
    if decided.columns or decided.waiting:
        raise OperatorError(
            "`decide` of a stage that scores changes columns or asks a person",
            allowed="reasons, and new tasks or groups",
            todo="let a stage after it do that",
        )
    for one in decided.created:
        check_created(one)
    outcome = StageOutcome(decided.reasons, columns, created=decided.created)
    return Applied(checked_reasons(outcome, table), scores)


def _scored(
    stage: Stage, declared: pa.Table, stored_scores: Mapping[int, StoredScore]
) -> tuple[dict[str, pa.Array], StageScores | None]:
    """Return the stage's score columns for all rows, and the scores computed now."""
    operator, more_input = stage.operator, stage.operator.depends_on()
    if more_input is None:
        digests = pa.nulls(declared.num_rows, pa.int64())
    else:
        digests = input_digests(
            declared, rowwise=operator.rowwise, more_input=more_input, group_column=operator.group_column
        )
    ids = declared["experience_id"].to_pylist()
    stored = _of_the_same(digests, ids, stored_scores)
    missing = _missing(stage, declared, ids, stored) if stored else None
    if missing is not None and not pc.any(missing).as_py():
        return _stored_columns(stage, ids, stored), None
    todo = declared if missing is None else declared.filter(missing)
    computed = checked_outcome(stage, in_parts(stage, todo), todo)
    fresh = {name: as_stored(pc.cast(computed.columns[name], kind)) for name, kind in operator.scores.items()}
    table = pa.table({"experience_id": todo["experience_id"], **fresh})
    of_table = digests if missing is None else digests.filter(missing)
    scores = StageScores(stage.written, stage.score_key, table, of_table, operator.error_column)
    if todo.num_rows < declared.num_rows:
        merged = {**stored, **{row.pop("experience_id"): row for row in table.to_pylist()}}
        fresh = _stored_columns(stage, ids, merged)
    return fresh, scores


def _of_the_same(
    digests: pa.Array, ids: Sequence[int], stored: Mapping[int, StoredScore]
) -> dict[int, Mapping[str, Any]]:
    """Return the stored scores whose input digest matches the rows as they are now."""
    if not stored or digests.null_count:
        return {}
    pairs = zip(ids, digests.to_pylist(), strict=True)
    return {key: stored[key].scores for key, digest in pairs if key in stored and stored[key].input_digest == digest}


def _missing(stage: Stage, table: pa.Table, ids: Sequence[int], stored: Mapping[int, Mapping[str, Any]]) -> pa.Array:
    """Return which rows must be scored: those without a score and, where groups are scored, their siblings."""
    missing = pa.array([key not in stored for key in ids], pa.bool_())
    if stage.operator.rowwise:
        return missing
    groups = table[stage.operator.group_column].combine_chunks()
    return pc.is_in(groups, value_set=pc.unique(groups.filter(missing)))


def _declared_columns(operator: Operator, table: pa.Table) -> pa.Table:
    """Return only the declared columns, so that reading an undeclared one fails in the stage's first test."""
    if operator.reads is None:
        return table
    return table.select([name for name in table.column_names if name in operator.reads | IDENTITY_COLUMNS])


def _stored_columns(stage: Stage, ids: Sequence[int], values: Mapping[int, Mapping[str, Any]]) -> dict[str, pa.Array]:
    columns = {name: ([values[key].get(name) for key in ids], kind) for name, kind in stage.operator.scores.items()}
    return {
        name: pa.array(_as_floats(found) if pa.types.is_floating(kind) else found, kind)
        for name, (found, kind) in columns.items()
    }


def _as_floats(values: Sequence[float | None]) -> list[float | None]:
    """Return numbers of JSON, in which PostgreSQL writes 1e16 as an integer, and Arrow converts none that large."""
    return [None if value is None else float(value) for value in values]
