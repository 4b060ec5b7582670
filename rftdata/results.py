"""What a run has led to: evaluations of its present history, its curve, steps and groups, and what was dropped and why."""

from __future__ import annotations

from dataclasses import dataclass

from rftdata.postgres.database import Row, records
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """A finished evaluation, over the questions of a taskset; `error`: how many of them could not be scored and count 0."""

    evaluation_id: int
    purpose: str
    taskset: str
    decoding: str
    trainer_step: int
    num_questions: int
    mean: float
    standard_error: float | None
    num_tokens: int
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two evaluations over the questions that both were asked; the means and the difference are None where there is none."""

    num_questions: int
    before: float
    after: float
    difference: float
    standard_error: float | None


@dataclass(frozen=True, kw_only=True)
class Point:
    """Rewards of a step: how many, and their mean."""

    step: int
    num: int
    mean: float
    standard_error: float | None
    pass_rate: float | None = None


@dataclass(frozen=True)
class Loss:
    """The training loss of a step."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Trainer steps of the present history; groups, tokens and seconds are without those before a fork."""

    trained: int
    skipped: int
    without_gradient: int
    before_fork: int
    num_groups: int
    num_tokens: int
    wait_seconds: float
    train_seconds: float
    publish_seconds: float


@dataclass(frozen=True, kw_only=True)
class GroupTotals:
    """Groups of a run: planned, planned in the place of a dropped one, closed without being trained on."""

    planned: int
    refilled: int
    closed: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Experiences and tokens that the run sampled itself, its lives, and the time in which a process worked for it."""

    num_experiences: int
    sampled_tokens: int
    num_attempts: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Experiences that a stage dropped for a reason; reasons that differ only in the rows they name are one."""

    stage: str
    reason: str
    num_experiences: int
    num_groups: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A checkpoint of the present history whose files are there."""

    trainer_step: int
    uri: str


class RunResults:
    """Reads the results of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def evaluations(self) -> list[EvaluationResult]:
        """Finished evaluations of the present history, one per purpose, taskset, decoding and step, in this order."""
        return records(EvaluationResult, self._rows("report_evaluations"))

    def paired(self, before: EvaluationResult, after: EvaluationResult) -> Paired:
        """Two evaluations, which may be of two runs, compared question by question."""
        ids = {"before": before.evaluation_id, "after": after.evaluation_id}
        return records(Paired, self._run.database.fetch("report_paired", **ids))[0]

    def train_curve(self) -> list[Point]:
        """Rewards as sampled, by explorer step: groups dropped later count."""
        return records(Point, self._rows("report_train_curve"))

    def loss_curve(self) -> list[Loss]:
        """The training loss by trainer step."""
        return records(Loss, self._rows("report_losses"))

    def totals(self) -> Totals:
        """See `Totals`."""
        return records(Totals, [self._rows("report_tokens")[0] | self._rows("run_seconds")[0]])[0]

    def steps(self) -> StepTotals:
        """See `StepTotals`."""
        return records(StepTotals, self._rows("report_steps"))[0]

    def skipped_because(self) -> dict[str, int]:
        """Steps that were skipped by reason, the most frequent first."""
        return {row["reason"]: row["num_steps"] for row in self._rows("report_skipped")}

    def rollouts(self) -> dict[str, int]:
        """Rollouts by outcome."""
        return {row["outcome"]: row["num"] for row in self._rows("report_outcomes")}

    def failed_because(self) -> dict[str, int]:
        """Failed rollouts by an error of each kind, the commonest kind first."""
        return {row["error"]: row["num"] for row in self._rows("report_failures")}

    def groups(self) -> GroupTotals:
        """See `GroupTotals`."""
        return records(GroupTotals, self._rows("report_groups"))[0]

    def closed_because(self) -> dict[str, int]:
        """Closed groups by reason, the most frequent first."""
        return {row["reason"]: row["num_groups"] for row in self._rows("report_closed")}

    def dropped(self) -> list[Dropped]:
        """What the stages of the run's pipeline dropped, the most frequent first."""
        return records(Dropped, self._rows("report_dropped"))

    def checkpoints(self) -> list[CheckpointFolder]:
        """Checkpoints of the present history whose files are there, by step."""
        return records(CheckpointFolder, self._rows("report_checkpoints"))

    def _rows(self, name: str) -> list[Row]:
        return self._run.database.fetch(name, run_id=self._run.run_id)
