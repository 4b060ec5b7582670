"""The results of a run, computed from the buffer alone.

A gain is paired: the mean difference of the same questions answered before and after, and its standard error. On validation
tasksets "after" is the best step, chosen on them, so that gain is optimistic. On test tasksets it is the same step, which these
questions did not choose. Only the run's current history counts, so an interrupted and resumed run is one curve.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from rftcore.reporting.several_answers import SeveralAnswers, measures
from rftdata.attempts.evaluations import best_step, validation_scores
from rftdata.attempts.run_models import RunModel, models_of
from rftdata.buffer import Buffer
from rftdata.reports.results import (
    CheckpointFolder,
    Dropped,
    EvaluationResult,
    Measure,
    Point,
    Receipts,
    RoleTime,
    RunResults,
    StepTotals,
)
from rftdata.run import Run

# The beginning of a closed group's reason, before the reasons of its rows.
_CLOSED_BY = "dropped by "
_Z95 = 1.959964
_METRICS = ("loss", "value_loss", "explained_variance", "pair_accuracy")


class _Fact(BaseModel):
    model_config = ConfigDict(frozen=True)


def evaluation_title(purpose: str, taskset: str) -> str:
    """Return the title of an evaluation; a taskset named like its purpose is named once."""
    return purpose if taskset == purpose else f"{purpose} {taskset}"


class Gain(_Fact):
    """One taskset and decoding, before and after; rewards are means over the same questions.

    Attributes:
        num_better, num_worse: questions with a greater or a smaller mean reward afterwards.
        num_only_before, num_only_after: questions that only one of the two answered, which do not count.
        interval: 95 % confidence interval of the difference, by the normal approximation; None without a standard error.
        z, p: of a two-sided paired test by the same approximation; None without a spread.
    """

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
    num_better: int
    num_worse: int
    num_only_before: int
    num_only_after: int
    interval: tuple[float, float] | None
    z: float | None
    p: float | None


class EvaluationCurve(_Fact):
    purpose: str
    taskset: str
    decoding: str
    points: list[Point]


class Comparison(_Fact):
    """Two runs, each at its best step, on the tasksets that both answered in the same decoding.

    Attributes:
        not_compared: sentences about the others.
    """

    gains: list[Gain]
    not_compared: list[str]


class Steps(_Fact):
    """Trainer steps of the current history; seconds are those of the run's own trainer, without the steps before a fork."""

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
    """Everything that `rft report` prints.

    Attributes:
        part_curves: parts of the training rewards by name, without weights.
        observed_tokens: between the answers of experiences, written by users, tools and environments.
        sandboxes: what confined the code of models in its explorers.
        several_answers: measures of evaluations with several answers to a question.
        forks: number of experiences that begin anew in their rollouts, by cause (`rft.fork`).
        unscored: evaluations with failed answers, which count 0.
        warnings: settings without effect.
    """

    run: str
    run_id: int
    mode: str
    status: str
    outcome: str | None
    seed: int
    model: str
    algorithm: str
    models: list[RunModel]
    buffer: str
    num_attempts: int
    wall_seconds: float
    sampled_tokens: int
    trained_tokens: int
    evaluated_tokens: int
    tokens_per_s: float | None
    num_experiences: int
    num_turns: int
    observed_tokens: int
    forks: dict[str, int]
    rollouts: dict[str, int]
    failed_because: dict[str, int]
    sandboxes: list[str]
    steps: Steps
    groups: Groups
    dropped: list[Dropped]
    receipts: list[Receipts]
    activities: list[RoleTime]
    best_step: int | None
    best_checkpoint: CheckpointFolder | None
    last_checkpoint: CheckpointFolder | None
    gains: list[Gain]
    not_compared: list[str]
    train_curve: list[Point]
    part_curves: dict[str, list[Point]]
    metric_curves: dict[str, list[Measure]]
    evaluation_curves: list[EvaluationCurve]
    several_answers: list[SeveralAnswers]
    unscored: list[str]
    warnings: list[str]


def build_report(buffer: Buffer, run: Run | str | int | None = None) -> Report:
    """Compute the report of a run.

    Args:
        run: the run, or its name or id; None for the newest run.

    Raises:
        QueryError: the run does not exist.
    """
    run = run if isinstance(run, Run) else buffer.find_run(run)
    results, config = RunResults(run), run.config
    evaluations = results.evaluations()
    best = best_step(_scores(run, evaluations))
    totals, steps, checkpoints = results.totals(), results.steps(), results.checkpoints()
    curves = _by_curve(evaluations)
    # A run that only evaluates has one result of each taskset, which the table of answers has.
    only_evaluates = run.mode == "eval"
    alone = {} if only_evaluates else {key: _why_alone(curve, best, steps.before_fork) for key, curve in curves.items()}
    return Report(
        run=run.name,
        run_id=run.run_id,
        mode=run.mode,
        status=run.status,
        outcome=run.outcome,
        seed=run.seed,
        model=str(config.get("model", {}).get("path", "–")),
        algorithm=str(config.get("algorithm", {}).get("name", "–")),
        models=models_of(run),
        buffer=buffer.location,
        num_attempts=totals.num_attempts,
        wall_seconds=totals.seconds,
        sampled_tokens=totals.sampled_tokens,
        trained_tokens=steps.num_tokens,
        evaluated_tokens=sum(e.num_tokens for e in evaluations),
        tokens_per_s=totals.sampled_tokens / totals.seconds if totals.seconds else None,
        num_experiences=totals.num_experiences,
        num_turns=totals.num_turns,
        observed_tokens=totals.observed_tokens,
        forks=results.forks(),
        rollouts=results.rollouts(),
        failed_because=results.failed_because(),
        sandboxes=results.sandboxes(),
        steps=_steps(run, results, steps),
        groups=_groups(results, steps.num_groups),
        dropped=results.dropped(),
        receipts=results.receipts(),
        activities=results.activities(),
        best_step=best,
        best_checkpoint=next((c for c in checkpoints if c.trainer_step == best), None),
        last_checkpoint=checkpoints[-1] if checkpoints else None,
        gains=_gains(results, [curves[key] for key, why in alone.items() if why is None], best, steps.before_fork),
        not_compared=[f"{evaluation_title(*key[:2])}, {key[2]}: {why}" for key, why in alone.items() if why],
        train_curve=results.train_curve(),
        part_curves=results.part_curves(),
        metric_curves=results.metric_curves(_METRICS),
        evaluation_curves=[_curve(curve) for curve in curves.values()],
        several_answers=_several_answers(run, results, evaluations),
        unscored=_unscored(evaluations),
        warnings=_warnings(steps),
    )


def _unscored(evaluations: Sequence[EvaluationResult]) -> list[str]:
    return [
        f"{evaluation_title(e.purpose, e.taskset)}, {e.decoding}, step {e.trainer_step}: {e.error}"
        for e in evaluations
        if e.error
    ]


def _warnings(steps: StepTotals) -> list[str]:
    if not steps.with_expert_loss or steps.without_experts < steps.with_expert_loss:
        return []
    warning = (
        f"algorithm.expert had no effect: none of {steps.with_expert_loss} steps had an expert's experience; let the workflow write"
        " expert answers (model.write), or insert experiences without behavior_logprobs"
    )
    return [warning]


def compare(run: Run, other: Run) -> Comparison:
    """Compare the final results of `other` and `run` question by question, on every taskset that both answered."""
    ends: list[dict[tuple[str, str], EvaluationResult]] = []
    for one in (run, other):
        evaluations = RunResults(one).evaluations()
        best = best_step(_scores(one, evaluations))
        ends.append({key[1:]: _after(curve, best) for key, curve in _by_curve(evaluations).items()})
    results, (of_run, of_other) = RunResults(run), ends
    gains, alone = [], []
    for key in dict.fromkeys([*of_run, *of_other]):
        if key not in of_run or key not in of_other:
            alone.append(f"{key[0]}, {key[1]}: evaluated in {(run if key in of_run else other).name} alone")
        elif (gain := _paired(results, of_run[key], of_other[key])) is None:
            alone.append(f"{key[0]}, {key[1]}: the two runs answered different questions, without a common one")
        else:
            gains.append(gain)
    return Comparison(gains=gains, not_compared=alone)


def _scores(run: Run, evaluations: Sequence[EvaluationResult]) -> dict[int, float]:
    """Return the validation scores of a run's steps. For a run stored without a configuration, every taskset counts."""
    settings = run.config.get("eval", {})
    tasksets = [taskset["name"] for taskset in settings.get("tasks", [])]
    tasksets = tasksets or [e.taskset for e in evaluations if e.purpose == "validation"]
    decoding, max_failed = settings.get("decodings", ["greedy"])[0], settings.get("max_failed", 1.0)
    return validation_scores(run, tasksets, decoding, max_failed=max_failed)


def _by_curve(evaluations: Sequence[EvaluationResult]) -> dict[tuple[str, str, str], list[EvaluationResult]]:
    """Group evaluations by purpose (test first), taskset and decoding, in order of steps."""
    curves: dict[tuple[str, str, str], list[EvaluationResult]] = defaultdict(list)
    for e in sorted(evaluations, key=lambda e: (e.purpose, e.taskset, e.decoding, e.trainer_step)):
        curves[e.purpose, e.taskset, e.decoding].append(e)
    return dict(curves)


def _after(curve: Sequence[EvaluationResult], best: int | None, before_fork: int = 0) -> EvaluationResult:
    """Return the result of the best step, or of the last one if the best is not the run's own."""
    return next((e for e in curve if e.trainer_step == best and best > before_fork), curve[-1])


def _why_alone(curve: Sequence[EvaluationResult], best: int | None, before_fork: int) -> str | None:
    """Return why a run has no result of its own to compare with an earlier one; None if it has. A fork inherits the results of its first steps."""
    last, after = curve[-1], _after(curve, best, before_fork)
    if before_fork and last.trainer_step <= before_fork:
        return f"not evaluated since the fork at step {before_fork}; {last.mean:.3f} at step {last.trainer_step}"
    if len(curve) == 1:
        return f"evaluated at step {last.trainer_step} alone: {last.mean:.3f}"
    if after.trainer_step == curve[0].trainer_step:
        return f"{after.mean:.3f} at step {after.trainer_step}, its first; {last.mean:.3f} at step {last.trainer_step}"
    return None


def _gains(
    results: RunResults, curves: Sequence[Sequence[EvaluationResult]], best: int | None, before_fork: int
) -> list[Gain]:
    """Return the gains from the first evaluation of each curve to that of the best step, without those that share no question."""
    gains = (_paired(results, curve[0], _after(curve, best, before_fork)) for curve in curves)
    return [gain for gain in gains if gain is not None]


def _paired(results: RunResults, before: EvaluationResult, after: EvaluationResult) -> Gain | None:
    pair = results.paired(before, after)
    if not pair.num_questions:
        return None
    error = pair.standard_error
    z = pair.difference / error if error else None
    return Gain(
        purpose=before.purpose,
        taskset=before.taskset,
        decoding=before.decoding,
        before_step=before.trainer_step,
        after_step=after.trainer_step,
        interval=None if error is None else (pair.difference - _Z95 * error, pair.difference + _Z95 * error),
        z=z,
        p=None if z is None else math.erfc(abs(z) / math.sqrt(2)),
        **vars(pair),
    )


def _several_answers(run: Run, results: RunResults, evaluations: Sequence[EvaluationResult]) -> list[SeveralAnswers]:
    """Return the measures of evaluations with several answers to a question, and of all in a run that only evaluates."""
    chosen = [e for e in evaluations if e.num_answers > 1 or run.mode == "eval"]
    rewards = results.rewards_of_answers([e.evaluation_id for e in chosen]) if chosen else {}
    pass_reward = float(run.config.get("eval", {}).get("pass_reward", 1.0))
    found = []
    for e in chosen:
        mean, pass_at, best_at = measures(rewards[e.evaluation_id], pass_reward)
        found.append(
            SeveralAnswers(
                purpose=e.purpose,
                taskset=e.taskset,
                decoding=e.decoding,
                trainer_step=e.trainer_step,
                checksum=e.checksum,
                num_questions=e.num_questions,
                num_answers=e.num_answers,
                pass_reward=pass_reward,
                mean=mean,
                pass_at=pass_at,
                best_at=best_at,
            )
        )
    return found


def _curve(curve: Sequence[EvaluationResult]) -> EvaluationCurve:
    points = [
        Point(step=e.trainer_step, num=e.num_questions, mean=e.mean, standard_error=e.standard_error) for e in curve
    ]
    first = curve[0]
    return EvaluationCurve(purpose=first.purpose, taskset=first.taskset, decoding=first.decoding, points=points)


def _steps(run: Run, results: RunResults, steps: StepTotals) -> Steps:
    return Steps(
        planned=run.planned_steps,
        done=steps.trained + steps.skipped,
        before_fork=steps.before_fork,
        skipped=steps.skipped,
        skipped_because=results.skipped_because(),
        without_gradient=steps.without_gradient,
        wait_seconds=steps.wait_seconds,
        train_seconds=steps.train_seconds,
        publish_seconds=steps.publish_seconds,
    )


def _groups(results: RunResults, trained: int) -> Groups:
    closed: Counter[str] = Counter()
    for reason, num_groups in results.closed_because().items():
        # The reasons of a group's rows are joined in one text; equal ones are shown once.
        by = _CLOSED_BY if reason.startswith(_CLOSED_BY) else ""
        parts = dict.fromkeys(reason.removeprefix(by).split("; "))
        closed[by + "; ".join(parts)] += num_groups
    return Groups(trained=trained, closed_because=dict(closed.most_common()), **vars(results.groups()))
