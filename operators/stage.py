"""One entry of a chain at work: which columns it is given, what is known already, in which parts and how often it is tried."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from operators.base import (
    IDENTITY_COLUMNS,
    CreatedGroup,
    CreatedTask,
    Operator,
    Review,
    StageConfig,
    StageOutcome,
)
from operators.digests import input_digests
from rftdata.database import storable
from rftdata.errors import ConfigError, OperatorError, RftError
from rftdata.verdicts import KnownScore

_RETRY_AFTER_S = 0.2

Known = Mapping[str, Mapping[int, KnownScore]]
"""Scores stored already: score key -> experience_id -> what was scored, and the score."""


class RunOptions(StageConfig):
    """How a stage is run; written under its key `run`, and no part of what it decides."""

    batch_rows: int | None = Field(default=None, ge=1, description="Most rows of a part; the batch is cut into parts.")
    concurrency: int = Field(default=1, ge=1, le=256, description="Parts that run at the same time.")
    retries: int = Field(default=0, ge=0, le=20, description="Further tries of a part that failed.")


@dataclass(frozen=True)
class Stage:
    """One entry of a chain: its place (from 1), the operator, and how it is run.

    Attributes:
        name: in verdicts and reports: as written in YAML; `sql#2` where another stage before it is called `sql`.
        score_key: digest of what determines its scores besides its input; empty where it has none.
        written: the name in YAML.
    """

    index: int
    name: str
    operator: Operator
    options: RunOptions = field(default_factory=RunOptions)
    score_key: str = ""
    written: str = ""


@dataclass(frozen=True)
class StageRun:
    """One stage over one batch: a row of `operator_run`. Stages count from 1; 0 and n+1 are the chain's own rules."""

    stage: str
    index: int
    rows_in: int
    rows_kept: int
    rows_dropped: int
    seconds: float
    rows_created: int = 0
    error: str | None = None


@dataclass(frozen=True)
class StageScores:
    """What a stage computed now.

    Attributes:
        table: `experience_id` and its score columns, one row per experience.
        input_digests: of what each of them was scored by (see `operators.digests`); null: the score is never used again.
    """

    stage: str
    score_key: str
    table: pa.Table
    input_digests: pa.Array


@dataclass(frozen=True)
class WaitingRow:
    """A row that a person is asked about; its group is decided once that is answered or too late."""

    experience_id: int
    group_id: int
    stage: str
    review: Review


class StageError(OperatorError):
    """A stage raised.

    Attributes:
        run: its row for `operator_run`.
        stages: those that ran before it.
        scores: what they computed: the next try need not do it again.
    """

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        allowed: str | None = None,
        todo: str | None = None,
        run: StageRun | None = None,
        stages: Sequence[StageRun] = (),
    ) -> None:
        super().__init__(what, value=value, allowed=allowed, todo=todo)
        self.run = run
        self.stages = list(stages)
        self.scores: list[StageScores] = []

    def __reduce__(self) -> tuple[object, ...]:
        options: dict[str, Any] = {
            "value": self.value,
            "allowed": self.allowed,
            "todo": self.todo,
            "run": self.run,
            "stages": self.stages,
        }
        return functools.partial(StageError, **options), (self.what,), {"scores": self.scores}


def at(index: int, name: str, error: RftError) -> RftError:
    """The same error, saying which stage it is about."""
    kind = type(error) if isinstance(error, ConfigError) else OperatorError
    return kind(
        f"stage {index} of the pipeline ({name}): {error.what}",
        value=error.value,
        allowed=error.allowed,
        todo=error.todo,
    )


def identify(index: int, name: str, operator: Operator, options: RunOptions, before: Sequence[Stage]) -> Stage:
    """The stage after `before`, with the key of its scores.

    The key covers the stage itself and those before it that changed what it reads, directly or through others. Which rows and values
    they leave it is not in the key: that is compared score by score.
    """
    shown = _name_among(name, before)
    if not operator.scores:
        return Stage(index, shown, operator, options, written=name)
    reads, behind = operator.reads, []
    for stage in reversed(before):
        written = _written(stage.operator)
        if reads is None or written is None or written & reads:
            behind.append([stage.written, stage.operator.spec()])
            reads = None if reads is None or stage.operator.reads is None else reads | stage.operator.reads
    what: list[Any] = [name, operator.score_spec(), behind]
    if not operator.rowwise:
        # The same stage again finds fewer siblings, and has other scores.
        again = sum(stage.written == name and stage.operator.score_spec() == what[1] for stage in before)
        what += [again] if again else []
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return Stage(index, shown, operator, options, hashlib.sha256(text.encode()).hexdigest()[:16], name)


def _name_among(name: str, before: Sequence[Stage]) -> str:
    again = sum(stage.written == name for stage in before)
    return f"{name}#{again + 1}" if again else name


def _written(operator: Operator) -> frozenset[str] | None:
    return None if operator.writes is None else operator.writes | frozenset(operator.scores)


@dataclass
class Applied:
    """What a stage made of a table, and which scores it computed for it."""

    outcome: StageOutcome
    scores: StageScores | None = None


def apply_stage(stage: Stage, table: pa.Table, known: Known) -> Applied:
    """Run one stage over a table that has rows; what it may not do is refused.

    Raises:
        OperatorError: it broke a rule. Anything else: what it raised itself in the last of its tries.
    """
    given = _given(stage.operator, table)
    if not stage.operator.scores:
        return Applied(_checked(stage, _in_parts(stage, given), table))
    columns, scores = _scored(stage, given, known.get(stage.score_key, {}))
    for name, values in columns.items():
        position = given.schema.get_field_index(name)
        given = given.append_column(name, values) if position < 0 else given.set_column(position, name, values)
    made = stage.operator.make_tasks(given)
    for one in made:
        _check_created(one)
    return Applied(_checked_reasons(StageOutcome(stage.operator.decide(given), columns, created=made), table), scores)


def _scored(
    stage: Stage, given: pa.Table, known: Mapping[int, KnownScore]
) -> tuple[dict[str, pa.Array], StageScores | None]:
    """The stage's score columns for all rows, and what was computed now."""
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
    computed = _checked(stage, _in_parts(stage, todo), todo)
    fresh = {name: as_stored(pc.cast(computed.columns[name], kind)) for name, kind in operator.scores.items()}
    table = pa.table({"experience_id": todo["experience_id"], **fresh})
    scores = StageScores(stage.written, stage.score_key, table, digests if missing is None else digests.filter(missing))
    if todo.num_rows < given.num_rows:
        merged = {**stored, **{row.pop("experience_id"): row for row in table.to_pylist()}}
        fresh = _stored_columns(stage, ids, merged)
    return fresh, scores


def as_stored(values: pa.Array) -> pa.Array:
    """Values as they come back from the database: no NaN or infinity, no NUL in texts. Later stages see the same the first time."""
    kind = values.type
    if pa.types.is_floating(kind):
        return pc.if_else(pc.fill_null(pc.is_finite(values), False), values, pa.scalar(None, kind))
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return values
    if pa.types.is_string(kind) and not pc.any(pc.match_substring(values, "\x00")).as_py():
        return values
    return pa.array([storable(value) for value in values.to_pylist()], kind)


def _of_the_same(
    digests: pa.Array, ids: Sequence[int], known: Mapping[int, KnownScore]
) -> dict[int, Mapping[str, Any]]:
    """Stored scores of what the rows are now."""
    if not known or digests.null_count:
        return {}
    pairs = zip(ids, digests.to_pylist(), strict=True)
    return {key: known[key].scores for key, digest in pairs if key in known and known[key].input_digest == digest}


def _missing(stage: Stage, table: pa.Table, ids: Sequence[int], stored: Mapping[int, Mapping[str, Any]]) -> pa.Array:
    """Which rows are to be scored: those without a score and, where groups are scored, their siblings."""
    missing = pa.array([key not in stored for key in ids], pa.bool_())
    if stage.operator.rowwise:
        return missing
    groups = table[stage.operator.group_column].combine_chunks()
    return pc.is_in(groups, value_set=pc.unique(groups.filter(missing)))


def _given(operator: Operator, table: pa.Table) -> pa.Table:
    """Only the columns that the stage declared: one that reads another is found out in its first test."""
    if operator.reads is None:
        return table
    return table.select([name for name in table.column_names if name in operator.reads | IDENTITY_COLUMNS])


def _stored_columns(stage: Stage, ids: Sequence[int], values: Mapping[int, Mapping[str, Any]]) -> dict[str, pa.Array]:
    return {
        name: pa.array([values[key].get(name) for key in ids], kind) for name, kind in stage.operator.scores.items()
    }


def _in_parts(stage: Stage, table: pa.Table) -> StageOutcome:
    """The stage over the table: cut where rows are decided one by one, and its parts at the same time."""
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
    """A part's values of a column; those it had where this part changed none, nulls where the column is new."""
    values = outcome.columns.get(name)
    if values is None:
        num_rows = min(size, table.num_rows - start)
        values = table[name].slice(start, size) if name in table.column_names else pa.nulls(num_rows)
    return values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values


def _joined(parts: Sequence[pa.Array]) -> pa.Array:
    """Parts of a column as one, of the type that holds them all: one without values has none of its own."""
    schemas = [pa.schema([("values", part.type)]) for part in parts]
    kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    return pa.concat_arrays([part.cast(kind) for part in parts])


def _try(stage: Stage, table: pa.Table) -> StageOutcome:
    for number in range(stage.options.retries + 1):
        try:
            return stage.operator.apply(table)
        except Exception:
            if number == stage.options.retries:
                raise
            time.sleep(_RETRY_AFTER_S * 2**number)
    raise AssertionError("unreachable")


def _checked(stage: Stage, outcome: StageOutcome, table: pa.Table) -> StageOutcome:
    """The outcome, if it keeps the rules that hold for all stages."""
    _checked_reasons(outcome, table)
    _check_waiting(outcome, table.num_rows)
    for made in outcome.created:
        _check_created(made)
    written = _written(stage.operator)
    for name, values in outcome.columns.items():
        if name in IDENTITY_COLUMNS:
            raise OperatorError(f"changes {name}, which says where a row belongs and is fixed")
        if written is not None and name not in written:
            raise OperatorError(
                f"returned the column {name}, which it does not declare", allowed=", ".join(sorted(written)) or "none",
                todo="add it to `writes` of the operator",
            )  # fmt: skip
        if len(values) != table.num_rows:
            raise OperatorError(f"returned {len(values)} values of {name} for {table.num_rows} rows")
    missing = sorted(set(stage.operator.scores) - set(outcome.columns))
    if missing:
        raise OperatorError(f"scores {missing[0]}, and did not return it")
    if stage.operator.scores and outcome.reasons.null_count < table.num_rows:
        raise OperatorError(
            "drops rows while it scores", todo="let `apply` score, and `decide` or a stage after it decide"
        )
    return outcome


def _checked_reasons(outcome: StageOutcome, table: pa.Table) -> StageOutcome:
    if len(outcome.reasons) != table.num_rows:
        raise OperatorError(f"decided on {len(outcome.reasons)} rows of {table.num_rows}")
    kind = outcome.reasons.type
    if not (pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise OperatorError(
            "gives reasons that are no texts", value=str(kind), allowed="a text, or null where a row stays"
        )
    return outcome


def _check_waiting(outcome: StageOutcome, num_rows: int) -> None:
    waiting: Mapping[Any, Any] = outcome.waiting  # whatever the stage made it
    for row, review in waiting.items():
        if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < num_rows:
            raise OperatorError("lets a row wait that it was not given", value=row, allowed=f"0 to {num_rows - 1}")
        if not isinstance(review, Review) or not (
            review.name and review.otherwise in ("pass", "drop") and 0 < review.timeout_s < math.inf
        ):
            raise OperatorError(
                "asks something that cannot be asked", value=review,
                allowed="a Review with a name, a finite timeout_s above 0, and otherwise: pass or drop",
            )  # fmt: skip


def _check_created(made: object) -> None:
    """What is made is stored as JSON."""
    if not isinstance(made, CreatedTask | CreatedGroup):
        raise OperatorError("made something that is neither a task nor a group", value=type(made).__name__)
    task = made.task if isinstance(made, CreatedGroup) else made
    answers = [[list(answer.messages), answer.response, answer.reward] for answer in getattr(made, "answers", ())]
    try:
        json.dumps([dict(task.payload), dict(task.features), answers])
    except (TypeError, ValueError) as error:
        raise OperatorError(
            f"made a task that JSON cannot hold: {error}", value=task.task_key,
            allowed="texts, numbers, true, false, null, lists and mappings of these",
        ) from error  # fmt: skip


@dataclass
class Findings:
    """What a pass collects beside its decisions."""

    runs: list[StageRun] = field(default_factory=list)
    scores: list[StageScores] = field(default_factory=list)
    waiting: list[WaitingRow] = field(default_factory=list)
    created: list[CreatedTask | CreatedGroup] = field(default_factory=list)


def failed(stage: Stage, error: Exception, rows_in: int, seconds: float, found: Findings) -> StageError:
    """The error that says which stage raised on how many rows."""
    made = _failed(stage, error, rows_in, seconds, found.runs)
    made.scores = list(found.scores)
    return made


def _failed(stage: Stage, error: Exception, rows_in: int, seconds: float, done: Sequence[StageRun]) -> StageError:
    run = StageRun(stage.name, stage.index, rows_in, 0, 0, seconds, error=f"{type(error).__name__}: {error}")
    what = f"stage {stage.index} of the pipeline ({stage.name}) failed on a batch of {rows_in} rows: "
    if isinstance(error, RftError):
        return StageError(
            what + error.what, value=error.value, allowed=error.allowed, todo=error.todo, run=run, stages=done
        )
    return StageError(
        f"{what}{type(error).__name__}: {error}", run=run, stages=done,
        todo="run smaller batches to find the row that does it, or mend the stage",
    )  # fmt: skip
