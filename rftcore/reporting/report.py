"""The results of a run, computed from the buffer alone.

A gain is paired: the same questions answered before and after, their mean difference and its standard error. On
validation tasksets "after" is the best step, chosen on them, so that gain is optimistic; on test tasksets it is the same
step on questions that chose nothing. Only the run's present history counts, so an interrupted and resumed run is one curve.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from rftdata.buffer import Buffer
from rftdata.postgres.database import Row
from rftdata.run import Run
from rftdata.training.evaluations import best_step, validation_scores

# How the reason of a closed group begins, before those of its rows.
_CLOSED_BY = "dropped by "


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True)


def evaluation_title(purpose: str, taskset: str) -> str:
    """What an evaluation is called where people read: a taskset named like its purpose is named once."""
    return purpose if taskset == purpose else f"{purpose} {taskset}"


class Gain(_Fact):
    """One taskset and decoding, before and after; rewards are means over the same questions."""

    purpose: str
    taskset: str
    decoding: str
    before_step: int
    after_step: int
    num_questions: int
    before: float
    after: float
    difference: float
    standard_error: float | None
    z: float | None


class Point(_Fact):
    step: int
    num: int
    mean: float
    standard_error: float | None
    pass_rate: float | None = None


class EvaluationCurve(_Fact):
    purpose: str
    taskset: str
    decoding: str
    points: list[Point]


class Dropped(_Fact):
    stage: str
    reason: str
    num_experiences: int
    num_groups: int


class Checkpoint(_Fact):
    trainer_step: int
    uri: str


class Steps(_Fact):
    """Trainer steps of the present history; seconds are those of the run's own trainer, without the steps before a fork."""

    planned: int
    done: int
    before_fork: int
    skipped: int
    skipped_because: dict[str, int]
    without_gradient: int
    wait_seconds: float
    train_seconds: float
    publish_seconds: float


class Groups(_Fact):
    planned: int
    trained: int
    closed: int
    closed_because: dict[str, int]
    refilled: int


class Report(_Fact):
    """Everything `rft report` prints; `unscored`: evaluations with answers that failed and count 0."""

    run: str
    run_id: int
    status: str
    outcome: str | None
    seed: int
    model: str
    algorithm: str
    buffer: str
    num_attempts: int
    wall_seconds: float
    sampled_tokens: int
    trained_tokens: int
    evaluated_tokens: int
    tokens_per_s: float | None
    num_experiences: int
    rollouts: dict[str, int]
    failed_because: dict[str, int]
    steps: Steps
    groups: Groups
    dropped: list[Dropped]
    best_step: int | None
    best_checkpoint: Checkpoint | None
    last_checkpoint: Checkpoint | None
    gains: list[Gain]
    train_curve: list[Point]
    evaluation_curves: list[EvaluationCurve]
    unscored: list[str]


def build_report(buffer: Buffer, run: Run | str | int | None = None) -> Report:
    """The report of a run.

    Args:
        run: the run, or its name or id; the newest when None.

    Raises:
        QueryError: no such run.
    """
    run = run if isinstance(run, Run) else buffer.find_run(run)
    run_id = run.run_id
    database = buffer.database
    evaluations = database.fetch("report_evaluations", run_id=run_id)
    best = best_step(_scores(buffer, run, evaluations))
    tokens = database.fetch("report_tokens", run_id=run_id)[0]
    time = database.fetch("run_seconds", run_id=run_id)[0]
    checkpoints = [Checkpoint(**c) for c in database.fetch("report_checkpoints", run_id=run_id)]
    steps = database.fetch("report_steps", run_id=run_id)[0]
    config = run.config
    return Report(
        run=run.name, run_id=run_id, status=str(run.status), outcome=run.outcome, seed=run.seed,
        model=str(config.get("model", {}).get("path", "–")), algorithm=str(config.get("algorithm", {}).get("name", "–")),
        buffer=buffer.location, num_attempts=time["num_attempts"], wall_seconds=time["seconds"],
        sampled_tokens=tokens["sampled_tokens"], trained_tokens=steps["num_tokens"],
        evaluated_tokens=sum(e["num_tokens"] for e in evaluations),
        tokens_per_s=tokens["sampled_tokens"] / time["seconds"] if time["seconds"] else None,
        num_experiences=tokens["num_experiences"],
        rollouts={r["outcome"]: r["num"] for r in database.fetch("report_outcomes", run_id=run_id)},
        failed_because={r["error"]: r["num"] for r in database.fetch("report_failures", run_id=run_id)},
        steps=_steps(buffer, run, steps), groups=_groups(buffer, run_id, steps["num_groups"]),
        dropped=[Dropped(**d) for d in database.fetch("report_dropped", run_id=run_id)],
        best_step=best, best_checkpoint=next((c for c in checkpoints if c.trainer_step == best), None),
        last_checkpoint=checkpoints[-1] if checkpoints else None,
        gains=[gain for gain in (_gain(buffer, rows, best) for rows in _by_curve(evaluations).values()) if gain],
        train_curve=[Point(**p) for p in database.fetch("report_train_curve", run_id=run_id)],
        evaluation_curves=[_curve(rows) for rows in _by_curve(evaluations).values()],
        unscored=[
            f"{evaluation_title(e['purpose'], e['taskset'])}, {e['decoding']}, step {e['trainer_step']}: {e['error']}"
            for e in evaluations if e["error"]
        ],
    )  # fmt: skip


def compare(buffer: Buffer, run: int, other: int) -> list[Gain]:
    """What `other` ended with against what `run` ended with, question by question, on every taskset both answered."""
    ends = []
    for run_id in (run, other):
        evaluations = buffer.database.fetch("report_evaluations", run_id=run_id)
        best = best_step(_scores(buffer, buffer.find_run(run_id), evaluations))
        ends.append({key: _after(rows, best) for key, rows in _by_curve(evaluations).items()})
    return [gain for key in ends[0] if key in ends[1] and (gain := _paired(buffer, ends[0][key], ends[1][key]))]


def _scores(buffer: Buffer, run: Run, evaluations: Sequence[Row]) -> dict[int, float]:
    """Validation scores of a run's steps. A run stored without a configuration is judged on every taskset it answered."""
    settings = run.config.get("eval", {})
    tasksets = [taskset["name"] for taskset in settings.get("tasks", [])]
    tasksets = tasksets or [e["taskset"] for e in evaluations if e["purpose"] == "validation"]
    return validation_scores(run, tasksets, settings.get("decodings", ["greedy"])[0])


def _by_curve(evaluations: Sequence[Row]) -> dict[tuple[str, str, str], list[Row]]:
    """Evaluations by purpose (test first), taskset and decoding, in order of steps."""
    curves: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for e in sorted(evaluations, key=lambda e: (e["purpose"], e["taskset"], e["decoding"], e["trainer_step"])):
        curves[e["purpose"], e["taskset"], e["decoding"]].append(e)
    return dict(curves)


def _after(rows: Sequence[Row], best: int | None) -> Row:
    return next((e for e in rows if e["trainer_step"] == best), rows[-1])


def _gain(buffer: Buffer, rows: Sequence[Row], best: int | None) -> Gain | None:
    return _paired(buffer, rows[0], _after(rows, best))


def _paired(buffer: Buffer, before: Row, after: Row) -> Gain | None:
    pair = buffer.database.fetch("report_paired", before=before["evaluation_id"], after=after["evaluation_id"])[0]
    if not pair["num_questions"]:
        return None
    error = pair["standard_error"]
    return Gain(
        purpose=before["purpose"], taskset=before["taskset"], decoding=before["decoding"],
        before_step=before["trainer_step"], after_step=after["trainer_step"],
        z=pair["difference"] / error if error else None, **pair,
    )  # fmt: skip


def _curve(rows: Sequence[Row]) -> EvaluationCurve:
    points = [
        Point(step=e["trainer_step"], num=e["num_questions"], mean=e["mean"], standard_error=e["standard_error"])
        for e in rows
    ]
    return EvaluationCurve(
        purpose=rows[0]["purpose"], taskset=rows[0]["taskset"], decoding=rows[0]["decoding"], points=points
    )


def _steps(buffer: Buffer, run: Run, steps: dict[str, Any]) -> Steps:
    reasons = buffer.database.fetch("report_skipped", run_id=run.run_id)
    return Steps(
        planned=run.planned_steps, done=steps["trained"] + steps["skipped"], before_fork=steps["before_fork"],
        skipped=steps["skipped"],
        skipped_because={r["reason"]: r["num_steps"] for r in reasons}, without_gradient=steps["without_gradient"],
        wait_seconds=steps["wait_seconds"], train_seconds=steps["train_seconds"], publish_seconds=steps["publish_seconds"],
    )  # fmt: skip


def _groups(buffer: Buffer, run_id: int, trained: int) -> Groups:
    counts = buffer.database.fetch("report_groups", run_id=run_id)[0]
    reasons = buffer.database.fetch("report_closed", run_id=run_id)
    closed: Counter[str] = Counter()
    for r in reasons:
        # The reasons of a group's rows stand one after the other; those that are the same but for the row are one.
        by = _CLOSED_BY if r["reason"].startswith(_CLOSED_BY) else ""
        parts = dict.fromkeys(r["reason"].removeprefix(by).split("; "))
        closed[by + "; ".join(parts)] += r["num_groups"]
    return Groups(trained=trained, closed_because=dict(closed.most_common()), **counts)
