"""Apply one stage to one table: select its columns, reuse stored scores, and compute the missing ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from operators.base import IDENTITY_COLUMNS, Operator, StageOutcome
from operators.chain.checks import check_created, checked, checked_reasons
from operators.chain.input_digests import input_digests
from operators.chain.parts import in_parts
from operators.chain.stage import Stage
from rftdata.errors import OperatorError
from rftdata.pipeline.records import Known, KnownScore, StageScores, as_stored
from rftdata.user_code.time_limits import call


@dataclass
class Applied:
    """The outcome of a stage on a table, and the scores it computed."""

    outcome: StageOutcome
    scores: StageScores | None = None


def apply_stage(stage: Stage, table: pa.Table, known: Known) -> Applied:
    """Run one stage over a table that has rows, and check what it returns.

    Raises:
        OperatorError: the stage broke a rule. Otherwise whatever the stage raised in its last try.
    """
    given = _given(stage.operator, table)
    if not stage.operator.scores:
        return Applied(checked(stage, in_parts(stage, given), table))
    columns, scores = _scored(stage, given, known.get(stage.score_key, {}))
    for name, values in columns.items():
        position = given.schema.get_field_index(name)
        given = given.append_column(name, values) if position < 0 else given.set_column(position, name, values)
    decided = call(lambda: stage.operator.decide(given), stage.timeout_s(given.num_rows), stage.on_rows(given))
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
    stage: Stage, given: pa.Table, known: Mapping[int, KnownScore]
) -> tuple[dict[str, pa.Array], StageScores | None]:
    """Return the stage's score columns for all rows, and the scores computed now."""
    operator, besides = stage.operator, stage.operator.depends_on()
    if besides is None:
        digests = pa.nulls(given.num_rows, pa.int64())
    else:
        digests = input_digests(given, rowwise=operator.rowwise, besides=besides, group_column=operator.group_column)
    ids = given["experience_id"].to_pylist()
    stored = _of_the_same(digests, ids, known)
    missing = _missing(stage, given, ids, stored) if stored else None
    if missing is not None and not pc.any(missing).as_py():
        return _stored_columns(stage, ids, stored), None
    todo = given if missing is None else given.filter(missing)
    computed = checked(stage, in_parts(stage, todo), todo)
    fresh = {name: as_stored(pc.cast(computed.columns[name], kind)) for name, kind in operator.scores.items()}
    table = pa.table({"experience_id": todo["experience_id"], **fresh})
    of_table = digests if missing is None else digests.filter(missing)
    scores = StageScores(stage.written, stage.score_key, table, of_table, operator.error_column)
    if todo.num_rows < given.num_rows:
        merged = {**stored, **{row.pop("experience_id"): row for row in table.to_pylist()}}
        fresh = _stored_columns(stage, ids, merged)
    return fresh, scores


def _of_the_same(
    digests: pa.Array, ids: Sequence[int], known: Mapping[int, KnownScore]
) -> dict[int, Mapping[str, Any]]:
    """Return the stored scores whose input digest matches the rows as they are now."""
    if not known or digests.null_count:
        return {}
    pairs = zip(ids, digests.to_pylist(), strict=True)
    return {key: known[key].scores for key, digest in pairs if key in known and known[key].input_digest == digest}


def _missing(stage: Stage, table: pa.Table, ids: Sequence[int], stored: Mapping[int, Mapping[str, Any]]) -> pa.Array:
    """Return which rows must be scored: those without a score and, where groups are scored, their siblings."""
    missing = pa.array([key not in stored for key in ids], pa.bool_())
    if stage.operator.rowwise:
        return missing
    groups = table[stage.operator.group_column].combine_chunks()
    return pc.is_in(groups, value_set=pc.unique(groups.filter(missing)))


def _given(operator: Operator, table: pa.Table) -> pa.Table:
    """Return only the declared columns, so that reading an undeclared one fails in the stage's first test."""
    if operator.reads is None:
        return table
    return table.select([name for name in table.column_names if name in operator.reads | IDENTITY_COLUMNS])


def _stored_columns(stage: Stage, ids: Sequence[int], values: Mapping[int, Mapping[str, Any]]) -> dict[str, pa.Array]:
    return {
        name: pa.array([values[key].get(name) for key in ids], kind) for name, kind in stage.operator.scores.items()
    }
