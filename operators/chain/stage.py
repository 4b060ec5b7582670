"""One entry of a chain: its operator, how it is run, and the errors that name it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from pydantic import Field

from operators.base import Operator, StageConfig
from rftdata.errors import ConfigError, OperatorError, RftError, TimeLimitError
from rftdata.pipeline.records import StageRun, Verdicts
from rftdata.pipeline.scores import StageScores
from rftdata.pipeline.verdicts import STAGE_FAILED

MAX_REASON = 500


class RunOptions(StageConfig):
    """How a stage is run, set under its key `run`; not part of what it decides."""

    batch_rows: int | None = Field(
        default=None, ge=1, description="Largest number of rows in a part; the batch is cut into parts."
    )
    concurrency: int = Field(default=1, ge=1, le=256, description="Number of parts that run concurrently.")
    retries: int = Field(default=0, ge=0, le=20, description="Retries of a failed part; the pauses double up to 10 s.")
    timeout_s: float | None = Field(
        default=None,
        gt=0,
        description="Time limit of one call; 600 s by default, more for stages that run or ask a model.",
    )


@dataclass(frozen=True)
class Stage:
    """One entry of a chain: its position (from 1), the operator, and how it is run.

    Attributes:
        name: its name in verdicts and reports: as in YAML, or `sql#2` where an earlier stage is also called `sql`.
        score_key: digest of what determines its scores besides the input; empty for a stage without scores.
        written: the name in YAML.
    """

    index: int
    name: str
    operator: Operator
    options: RunOptions = field(default_factory=RunOptions)
    score_key: str = ""
    written: str = ""

    def timeout_s(self, num_rows: int) -> float:
        """Return the time limit of one call on `num_rows` rows."""
        if self.options.timeout_s is not None:
            return self.options.timeout_s
        return self.operator.timeout_s + self.operator.seconds_per_row * num_rows

    def on_rows(self, table: pa.Table) -> str:
        """Describe the stage and its rows, as the subject of a sentence."""
        ids = table["experience_id"]
        rows = f"{ids[0].as_py()} to {ids[-1].as_py()}" if len(ids) > 1 else ids[0].as_py()
        return f"stage {self.index} of the pipeline ({self.name}) on {len(ids)} row{'s' * (len(ids) > 1)} ({rows})"


class StageError(OperatorError):
    """A stage raised.

    Attributes:
        run: its row for `operator_run`.
        stages: the stages that ran before it.
        scores: what those computed, which the next try reuses.
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

    @property
    def reason(self) -> str:
        """The reason with which a row is dropped when the stage raised on it."""
        return f"{STAGE_FAILED}{self.what}"[:MAX_REASON]


def error_at_stage(index: int, name: str, error: RftError) -> RftError:
    """Return the same error with the stage added to its message."""
    stage = f"stage {index} of the pipeline ({name})"
    if isinstance(error, ConfigError):
        return error.about(stage)
    return OperatorError(f"{stage}: {error.what}", value=error.value, allowed=error.allowed, todo=error.todo)


def identify(index: int, name: str, operator: Operator, options: RunOptions, before: Sequence[Stage]) -> Stage:
    """Return the stage that follows `before`, with the key of its scores.

    The key covers the stage itself and the earlier stages that changed what it reads, directly or through others. It does not cover
    the rows and values that they leave: input digests compare these score by score.
    """
    unique_name = name_among(name, [stage.written for stage in before])
    if not operator.scores:
        return Stage(index, unique_name, operator, options, written=name)
    reads, behind = operator.reads, []
    for stage in reversed(before):
        written = written_columns(stage.operator)
        if reads is None or written is None or written & reads:
            behind.append([stage.written, stage.operator.spec()])
            reads = None if reads is None or stage.operator.reads is None else reads | stage.operator.reads
    what: list[Any] = [name, operator.score_spec(), behind]
    if not operator.rowwise:
        # The same stage a second time finds fewer siblings, so its scores differ.
        again = sum(stage.written == name and stage.operator.score_spec() == what[1] for stage in before)
        what += [again] if again else []
    text = json.dumps(what, sort_keys=True, separators=(",", ":"))
    return Stage(index, unique_name, operator, options, hashlib.sha256(text.encode()).hexdigest()[:16], name)


def name_among(name: str, before: Sequence[str]) -> str:
    """Return a stage's name in verdicts and reports, numbered if an earlier stage has the same name in YAML."""
    return f"{name}#{before.count(name) + 1}" if name in before else name


def written_columns(operator: Operator) -> frozenset[str] | None:
    """Return the columns that a stage may return; None: any."""
    return None if operator.writes is None else operator.writes | frozenset(operator.scores)


def failed(stage: Stage, error: Exception, rows_in: int, seconds: float, verdicts: Verdicts) -> StageError:
    """Return the error that names the stage and the number of rows it raised on."""
    stage_error = _failed(stage, error, rows_in, seconds, verdicts.stages)
    stage_error.scores = list(verdicts.scores)
    return stage_error


def _failed(stage: Stage, error: Exception, rows_in: int, seconds: float, done: Sequence[StageRun]) -> StageError:
    run = StageRun(stage.name, stage.index, rows_in, 0, 0, seconds, error=f"{type(error).__name__}: {error}")
    if isinstance(error, TimeLimitError):  # it names the stage itself
        return StageError(error.what, value=error.value, allowed=error.allowed, todo=error.todo, run=run, stages=done)
    what = f"stage {stage.index} of the pipeline ({stage.name}) failed on a batch of {rows_in} rows: "
    if isinstance(error, RftError):
        return StageError(
            what + error.what, value=error.value, allowed=error.allowed, todo=error.todo, run=run, stages=done
        )
    return StageError(
        f"{what}{type(error).__name__}: {error}",
        run=run,
        stages=done,
        todo="run smaller batches to find the failing row, or fix the stage",
    )
