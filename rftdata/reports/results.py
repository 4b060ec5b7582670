"""The results of a run: evaluations of its current history, curves, steps and groups, and dropped rows with reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rftdata.postgres.database import Row, records
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """A finished evaluation over the questions of a taskset. `error`: how many of them could not be scored and count as 0."""

    evaluation_id: int
    purpose: str
    taskset: str
    decoding: str
    trainer_step: int
    checksum: str
    num_answers: int
    num_questions: int
    mean: float
    standard_error: float | None
    num_tokens: int
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Two evaluations over their common questions; the means and the difference are None if there are none.

    Attributes:
        num_better, num_worse: questions with a greater or a smaller mean reward afterwards.
        num_only_before, num_only_after: questions that only one of the two answered.
    """

    num_questions: int
    before: float
    after: float
    difference: float
    standard_error: float | None
    num_better: int
    num_worse: int
    num_only_before: int
    num_only_after: int


@dataclass(frozen=True, kw_only=True)
class Point:
    """Rewards of a step: number and mean."""

    step: int
    num: int
    mean: float
    standard_error: float | None
    pass_rate: float | None = None


@dataclass(frozen=True)
class Measure:
    """A metric of a trainer step."""

    step: int
    value: float


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Totals of the current history's trainer steps; groups, tokens and seconds exclude steps before a fork.

    Attributes:
        with_expert_loss, without_experts: steps of an algorithm with a loss for experts, and those of them without an expert's experience.
    """

    trained: int
    skipped: int
    without_gradient: int
    with_expert_loss: int
    without_experts: int
    before_fork: int
    num_groups: int
    num_tokens: int
    wait_seconds: float
    train_seconds: float
    publish_seconds: float


@dataclass(frozen=True, kw_only=True)
class GroupTotals:
    """Numbers of a run's groups: planned, planned to replace a dropped group, closed without being trained on."""

    planned: int
    refilled: int
    closed: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Numbers of experiences and of tokens sampled by the run itself, of its attempts, and the time with at least one process.

    Attributes:
        num_turns: of all experiences.
        observed_tokens: between answers, written by users, tools and environments.
    """

    num_experiences: int
    sampled_tokens: int
    num_turns: int
    observed_tokens: int
    num_attempts: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """Experiences that a stage dropped for a reason. Reasons that differ only in the rows they name count as one."""

    stage: str
    reason: str
    num_experiences: int
    num_groups: int


@dataclass(frozen=True, kw_only=True)
class CheckpointFolder:
    """A checkpoint of the current history whose files exist."""

    trainer_step: int
    uri: str


@dataclass(frozen=True, kw_only=True)
class Receipts:
    """Weights that went straight into engines, counted once per transfer and engine.

    Attributes:
        kv_cache: what running requests did, recompute or keep.
        mean_pause_s, max_pause_s: time for which an engine did not sample; None if none was applied.
    """

    kv_cache: str
    num_applied: int
    num_failed: int
    mean_pause_s: float | None
    max_pause_s: float | None


@dataclass(frozen=True, kw_only=True)
class RoleTime:
    """Total seconds that the workers of a role spent on an activity."""

    role: str
    activity: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class WorkerSpan:
    """An activity of a worker.

    Attributes:
        detail: what it waited for, or a part of its start; None for other work.
        started, ended: seconds since 1970, by the database's clock.
    """

    worker_id: int
    role: str
    host: str
    pid: int
    activity: str
    detail: str | None
    started: float
    ended: float


class RunResults:
    """Reads the results of one run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def evaluations(self) -> list[EvaluationResult]:
        """Return the finished evaluations of the current history, one per purpose, taskset, decoding and step, in this order."""
        return records(EvaluationResult, self._rows("report_evaluations"))

    def paired(self, before: EvaluationResult, after: EvaluationResult) -> Paired:
        """Compare two evaluations, possibly of two runs, question by question."""
        ids = {"before": before.evaluation_id, "after": after.evaluation_id}
        return records(Paired, self._run.database.fetch("report_paired", **ids))[0]

    def train_curve(self) -> list[Point]:
        """Return the sampled rewards by explorer step, including groups dropped later."""
        return records(Point, self._rows("report_train_curve"))

    def part_curves(self) -> dict[str, list[Point]]:
        """Return the parts of the sampled rewards by name and explorer step; those of an archived run are not in the database."""
        curves: dict[str, list[Point]] = {}
        for row in self._rows("report_reward_parts"):
            point = Point(step=row["step"], num=row["num"], mean=row["mean"], standard_error=row["standard_error"])
            curves.setdefault(row["name"], []).append(point)
        return curves

    def metric_curves(self, names: Sequence[str]) -> dict[str, list[Measure]]:
        """Return metrics by trainer step; those that no step has are left out."""
        curves: dict[str, list[Measure]] = {}
        for row in self._run.database.fetch("report_metrics", run_id=self._run.run_id, names=list(names)):
            curves.setdefault(row["name"], []).append(Measure(row["step"], row["value"]))
        return curves

    def totals(self) -> Totals:
        """Return the totals of the run."""
        return records(Totals, [self._rows("report_tokens")[0] | self._rows("run_seconds")[0]])[0]

    def steps(self) -> StepTotals:
        """Return the totals of trainer steps."""
        return records(StepTotals, self._rows("report_steps"))[0]

    def sandboxes(self) -> list[str]:
        """Return what confined the code of models, once each; empty for a run that ran none."""
        return [row["tier"] for row in self._rows("report_sandboxes")]

    def receipts(self) -> list[Receipts]:
        """Return the transfers of weights into live engines; empty for a run that used files alone."""
        return records(Receipts, self._rows("report_receipts"))

    def activities(self) -> list[RoleTime]:
        """Return the time of trainer, explorers and pipeline workers by activity, for each role the longest first."""
        return records(RoleTime, self._rows("report_activities"))

    def spans(self) -> list[WorkerSpan]:
        """Return the activities of every worker except the supervisor, by worker and in order."""
        return records(WorkerSpan, self._rows("run_spans"))

    def skipped_because(self) -> dict[str, int]:
        """Return the number of skipped steps by reason, most frequent first."""
        return {row["reason"]: row["num_steps"] for row in self._rows("report_skipped")}

    def forks(self) -> dict[str, int]:
        """Return the number of experiences that begin anew in their rollouts, by cause, most frequent first."""
        return {row["cause"]: row["num"] for row in self._rows("report_forks")}

    def rollouts(self) -> dict[str, int]:
        """Return the number of rollouts by outcome."""
        return {row["outcome"]: row["num"] for row in self._rows("report_outcomes")}

    def failed_because(self) -> dict[str, int]:
        """Return the number of failed rollouts by an error of each kind, most frequent first."""
        return {row["error"]: row["num"] for row in self._rows("report_failures")}

    def groups(self) -> GroupTotals:
        """Return the numbers of groups."""
        return records(GroupTotals, self._rows("group_totals"))[0]

    def closed_because(self) -> dict[str, int]:
        """Return the number of closed groups by reason, most frequent first."""
        return {row["reason"]: row["num_groups"] for row in self._rows("report_closed")}

    def dropped(self) -> list[Dropped]:
        """Return the rows that stages of the run's pipeline dropped, most frequent first."""
        return records(Dropped, self._rows("report_dropped"))

    def checkpoints(self) -> list[CheckpointFolder]:
        """Return the checkpoints of the current history whose files exist, by step."""
        return records(CheckpointFolder, self._rows("report_checkpoints"))

    def rewards_of_answers(self, evaluation_ids: Sequence[int]) -> dict[int, dict[int, list[float]]]:
        """Return the rewards of evaluations by evaluation and task, in the order of the answers."""
        found: dict[int, dict[int, list[float]]] = {}
        for row in self._run.database.fetch("report_answers", evaluation_ids=list(evaluation_ids)):
            found.setdefault(row["evaluation_id"], {})[row["task_id"]] = row["rewards"]
        return found

    def _rows(self, name: str) -> list[Row]:
        return self._run.database.fetch(name, run_id=self._run.run_id)
