"""Live progress of a run, read from the buffer only, so any process on any machine can show it."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from rftdata.postgres.database import Row, records
from rftdata.processes import has_ended
from rftdata.run import Run

# Steps whose rewards may still change: groups in flight and refills of earlier steps.
_OPEN_STEPS = 16
# The chain may drop more or less than at the beginning of the run, so the newest steps are shown.
_DROP_STEPS = 8
# Fewer groups may have equal rewards by chance.
_ENOUGH_GROUPS = 4


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Numbers of groups by status; ready ones wait for the trainer, `ready_later` of them for a later step than its next."""

    planned: int
    claimed: int
    sealed: int
    ready: int
    ready_later: int


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Number of rollouts that failed or timed out, and the most frequent kind of error."""

    num_rollouts: int
    num_commonest: int
    commonest: str


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """How many of the newest experiences a stage dropped, and one of its reasons; `num_decided`: on how many the chain decided."""

    stage: str
    reason: str
    num_dropped: int
    num_decided: int

    @property
    def share(self) -> float:
        return self.num_dropped / self.num_decided


@dataclass(frozen=True, kw_only=True)
class EqualRewards:
    """The groups of a run in which no two rollouts differ in their rewards, if there are no others; and the smallest and the largest reward."""

    num_groups: int
    lowest: float
    highest: float


@dataclass(frozen=True, kw_only=True)
class FinishedEvaluation:
    """The newest finished evaluation of a taskset and decoding."""

    purpose: str
    taskset: str
    decoding: str
    trainer_step: int
    num_tasks: int
    mean_reward: float
    error: str | None


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """What a process does or waits for; its fields are columns of `rft.v_waiting` and `rft.worker`.

    Attributes:
        liveness: alive, lost (no heartbeat for 15 s), gone (its process on this machine ended without a report) or stopped.
    """

    worker_id: int
    role: str
    host: str
    pid: int
    pid_space: str
    pid_started: int
    state: str
    waiting_for: str | None
    progress: dict[str, Any]
    error: str | None
    liveness: str
    heartbeat_age_s: float
    started_at: datetime.datetime
    stopped_at: datetime.datetime | None


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The state of a run at one moment.

    Attributes:
        archived: whether its texts and arrays are in Parquet files (`rft archive`).
        remaining_seconds: estimated from the pace of the newest steps.
        mean_reward, pass_rate: of `reward_step`, the newest explorer step with rewards.
        rewards: mean reward of every explorer step that has one.
        policy_step: of the engines; the oldest if they differ.
        equal_rewards: given if all groups so far have equal rewards, and nothing was trained for this reason.
        dropped: by each stage, of the experiences of the newest explorer steps, most first.
        metrics: of the newest step.
        open_reviews: rows that wait for a person.
    """

    run: str
    run_id: int
    mode: str
    status: str
    outcome: str | None
    archived: bool
    step: int
    planned_steps: int
    num_skipped: int
    seconds: float
    remaining_seconds: float | None
    mean_reward: float | None
    pass_rate: float | None
    reward_step: int | None
    rewards: list[float]
    tokens_per_s: float | None
    policy_step: int | None
    published_step: int | None
    queue: Queue
    refills: int
    closed_groups: int
    failures: Failures | None
    equal_rewards: EqualRewards | None
    dropped: list[Dropped]
    metrics: dict[str, float]
    evaluations: list[FinishedEvaluation]
    evaluations_open: int
    open_reviews: int
    workers: list[WorkerState]


class Progress:
    """Reads one run's progress. Steps that no longer change are read only once.

    Args:
        resumes: whether the run is about to begin another attempt. Until then, the progress is that of the checkpoint with which
            the attempt begins.
    """

    def __init__(self, run: Run, *, resumes: bool = False) -> None:
        self._run = run
        self._ended_attempt = run.current_attempt_id if resumes else None
        self._rewards: dict[int, Row] = {}
        self._failures: dict[tuple[int, str], Row] = {}

    def snapshot(self) -> Snapshot:
        """Return the current state of the run."""
        run = self._row("progress_run")
        if self._ended_attempt is not None and run["current_attempt_id"] == self._ended_attempt:
            run["step"] = run["resumes_at"]
        steps = self._rows("progress_steps", limit=8)
        workers = [_looked_up(worker) for worker in records(WorkerState, self._rows("progress_workers"))]
        explorers = [w.progress for w in workers if w.role == "explorer" and w.liveness == "alive"]
        rates = [p["tokens_per_s"] for p in explorers if p.get("tokens_per_s") is not None]
        policies = [p["policy_step"] for p in explorers if p.get("policy_step") is not None]
        published = self._rows("progress_policy")
        groups = self._row("group_totals")
        self._read_rewards()
        newest = max(self._rewards, default=None)
        dropped = self._dropped(newest or 0)
        return Snapshot(
            run=run["name"],
            run_id=run["run_id"],
            mode=run["mode"],
            status=run["status"],
            outcome=run["outcome"],
            archived=run["archived"],
            step=run["step"],
            planned_steps=run["planned_steps"],
            num_skipped=run["num_skipped"],
            seconds=self._row("run_seconds")["seconds"],
            remaining_seconds=_remaining(run["planned_steps"] - run["step"], steps),
            mean_reward=None if newest is None else self._rewards[newest]["mean_reward"],
            pass_rate=None if newest is None else self._rewards[newest]["pass_rate"],
            reward_step=newest,
            rewards=[row["mean_reward"] for _, row in sorted(self._rewards.items())],
            tokens_per_s=sum(rates) if rates else None,
            policy_step=min(policies, default=None),
            published_step=published[0]["trainer_step"] if published else None,
            queue=records(Queue, self._rows("progress_queue", step=run["step"] + 1))[0],
            refills=groups["refilled"],
            closed_groups=groups["closed"],
            failures=self._commonest_failure(),
            equal_rewards=self._equal_rewards(dropped),
            dropped=dropped,
            metrics=steps[0]["metrics"] if steps else {},
            evaluations=records(FinishedEvaluation, self._rows("progress_evaluations")),
            evaluations_open=len(self._rows("open_evaluations")),
            open_reviews=self._row("num_open_reviews")["n"],
            workers=workers,
        )

    def _read_rewards(self) -> None:
        from_step = max(self._rewards, default=0) - _OPEN_STEPS
        for row in self._rows("progress_rewards", from_step=from_step):
            if row["mean_reward"] is not None:
                self._rewards[row["explore_step"]] = row
        for row in self._rows("progress_failures", from_step=from_step):
            self._failures[row["explore_step"], row["kind"]] = row

    def _dropped(self, newest_step: int) -> list[Dropped]:
        rows = self._rows("progress_dropped", from_step=newest_step - _DROP_STEPS + 1)
        return records(Dropped, [row for row in rows if row["stage"] is not None])

    def _equal_rewards(self, dropped: list[Dropped]) -> EqualRewards | None:
        rows = [row for row in self._rewards.values() if row["num_compared"]]
        num_groups = sum(row["num_compared"] for row in rows)
        if num_groups < _ENOUGH_GROUPS or num_groups != sum(row["num_equal"] for row in rows):
            return None
        steps = self._row("progress_untrained")
        are_dropped = bool(dropped) and sum(stage.num_dropped for stage in dropped) == dropped[0].num_decided
        if steps["num_untrained"] < steps["num_steps"] or not (steps["num_steps"] or are_dropped):
            return None  # the algorithm does not compare the rollouts of a group, or it is not known yet
        return EqualRewards(
            num_groups=num_groups,
            lowest=min(row["lowest"] for row in rows),
            highest=max(row["highest"] for row in rows),
        )

    def _commonest_failure(self) -> Failures | None:
        counts: Counter[str] = Counter()
        for (_, kind), row in self._failures.items():
            counts[kind] += row["num"]
        if not counts:
            return None
        [(commonest, num)] = counts.most_common(1)
        error = next(row["error"] for (_, kind), row in self._failures.items() if kind == commonest)
        return Failures(num_rollouts=counts.total(), num_commonest=num, commonest=error)

    def _rows(self, name: str, **parameters: Any) -> list[Row]:
        return self._run.database.fetch(name, run_id=self._run.run_id, **parameters)

    def _row(self, name: str) -> Row:
        return self._rows(name)[0]


def last_step(run: Run) -> int:
    """Return the newest trainer step that the run's current history has done; 0 if there is none."""
    return int(run.database.fetch("progress_run", run_id=run.run_id)[0]["step"])


def steps_to_repeat(run: Run) -> tuple[int, int]:
    """Return the step of the checkpoint with which a run resumes, and the last step that it had done."""
    (row,) = run.database.fetch("progress_run", run_id=run.run_id)
    return int(row["resumes_at"]), int(row["step"])


def _looked_up(worker: WorkerState) -> WorkerState:
    """Correct the liveness from the heartbeat by looking up the process, which may have been killed."""
    if worker.liveness in ("alive", "lost") and has_ended(
        worker.host, worker.pid, worker.pid_space, worker.pid_started
    ):
        return replace(worker, liveness="gone")
    return worker


def _remaining(left: int, steps: list[Row]) -> float | None:
    """Estimate the remaining seconds from the pace of the newest steps."""
    if left <= 0 or len(steps) < 2:
        return None
    taken: float = (steps[0]["finished_at"] - steps[-1]["finished_at"]).total_seconds()
    return left * taken / (len(steps) - 1)
