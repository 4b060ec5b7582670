"""Evaluations, requested by a trainer and answered by an explorer, and the best step according to them.

A step has a score if every validation taskset of the run was answered at it in the deciding decoding (the first of
`eval.decodings`): the mean over the tasksets. A step with only some of its tasksets answered has none, whatever its results on
those, because tasksets differ in difficulty. The same holds for a step at which more than `eval.max_failed` of the answers failed. Only the
run's current history counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from rftdata.attempts.attempt import Attempt
from rftdata.pipeline.purged import PURGED
from rftdata.postgres import notify
from rftdata.postgres.database import copy_rows, execute, fetch, records
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.run import Run


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The questions of a taskset for one policy version; its fields are columns of `rft.evaluation`."""

    evaluation_id: int
    policy_version_id: int
    trainer_step: int
    purpose: str
    taskset: str
    decoding: str
    uri: str
    checksum: str
    error: str | None


@dataclass(frozen=True, kw_only=True)
class Question:
    """A task of an evaluated taskset."""

    task_id: int
    taskset: str
    task_key: str
    payload: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer to a task. `error`: why it could not be scored, which counts as a reward of 0."""

    task_id: int
    reward: float
    response: str
    num_response_tokens: int
    finish_reason: str
    error: str | None = None


def claim_evaluation(
    run: Run, worker_id: int, *, lease_s: float, policy_version_id: int | None = None
) -> Evaluation | None:
    """Claim the next evaluation, or the next of one policy version; None if there is none. A worker holds at most one."""
    rows = ride_out(
        lambda: run.database.fetch(
            "claim_evaluation",
            run_id=run.run_id,
            worker_id=worker_id,
            lease_s=lease_s,
            policy_version_id=policy_version_id,
        ),
        between=lambda: run.database.run("release_evaluations", run_id=run.run_id, worker_id=worker_id),
    )
    return next(iter(records(Evaluation, rows)), None)


def questions(run: Run, evaluation: Evaluation) -> list[Question]:
    """Return the tasks of an evaluation."""
    return records(Question, run.database.fetch("evaluation_tasks", taskset=evaluation.taskset))


def finish_evaluation(run: Run, evaluation_id: int, worker_id: int, answers: Sequence[Answer], seconds: float) -> bool:
    """Store the answers and their mean; return False if the claim has passed to another worker.

    Answers with an error count with a reward of 0; the evaluation's row has their number. Of an answer to a task that was purged meanwhile,
    only the numbers are stored.
    """
    mean = sum(answer.reward for answer in answers) / max(len(answers), 1)

    def store() -> bool:
        with run.database.transaction() as connection:
            there = {row["task_id"] for row in fetch(connection, "lock_tasks", task_ids=[a.task_id for a in answers])}
            kept = [answer if answer.task_id in there else _without_texts(answer) for answer in answers]
            done = execute(
                connection,
                "finish_evaluation",
                evaluation_id=evaluation_id,
                worker_id=worker_id,
                num_tasks=len(answers),
                mean_reward=mean,
                seconds=seconds,
                error=_failed_answers(kept),
            )
            if done:
                columns = [
                    ("evaluation_id", "int8"),
                    ("task_id", "int8"),
                    ("reward", "float8"),
                    ("response", "text"),
                    ("num_response_tokens", "int4"),
                    ("finish_reason", "text"),
                    ("error", "text"),
                ]
                rows = ((evaluation_id, *map(storable, astuple(answer))) for answer in kept)
                copy_rows(connection, "rft.evaluation_answer", columns, rows)
        return bool(done)

    stored = ride_out(store)
    notify.notify(run.database, notify.RUN)
    return stored


def _without_texts(answer: Answer) -> Answer:
    return replace(answer, response=PURGED, error=answer.error and PURGED)


def _failed_answers(answers: Sequence[Answer]) -> str | None:
    """Return what an evaluation's row says about failed answers. A purge of the first one's task cuts it off at the semicolon."""
    errors = [answer.error for answer in answers if answer.error]
    if not errors:
        return None
    what = f"{len(errors)} of {len(answers)} answers failed and count 0"
    quoted = next((error for error in errors if error != PURGED), None)
    return what if quoted is None else f"{what}; the first: {quoted}"


def release_evaluation(run: Run, worker_id: int) -> None:
    """Leave the evaluation that a worker holds to be claimed again."""
    ride_out(lambda: run.database.run("release_evaluations", run_id=run.run_id, worker_id=worker_id))


def fail_evaluation(run: Run, evaluation_id: int, worker_id: int, error: str) -> None:
    """Record that an evaluation cannot be answered; no effect if its claim has passed to another worker."""

    def fail() -> None:
        with run.database.transaction() as connection:
            execute(connection, "lock_evaluation", evaluation_id=evaluation_id)
            execute(connection, "fail_evaluation", evaluation_id=evaluation_id, worker_id=worker_id, error=error)

    ride_out(fail)
    notify.notify(run.database, notify.RUN)


def plan_evaluations(
    attempt: Attempt,
    *,
    policy_version_id: int,
    trainer_step: int,
    purpose: str,
    tasksets: Sequence[str],
    decodings: Sequence[str],
    uri: str,
    checksum: str,
) -> int:
    """Plan evaluations of one policy version, except those that its history already has; return their number.

    Raises:
        FencedError: another attempt holds the run.
    """

    def plan() -> int:
        planned = 0
        with attempt.transaction() as connection:
            for taskset in tasksets:
                for decoding in decodings:
                    planned += execute(
                        connection,
                        "plan_evaluation",
                        run_id=attempt.run.run_id,
                        policy_version_id=policy_version_id,
                        trainer_step=trainer_step,
                        purpose=purpose,
                        taskset=taskset,
                        decoding=decoding,
                        uri=uri,
                        checksum=checksum,
                    )
        return planned

    planned = ride_out(plan)
    notify.notify(attempt.run.database, notify.POLICY)
    return planned


def versions_to_evaluate(run: Run) -> set[int]:
    """Return the policy versions whose evaluations wait for an explorer."""
    rows = run.database.fetch("open_evaluations", run_id=run.run_id)
    return {row["policy_version_id"] for row in rows if row["is_planned"]}


def num_open_evaluations(run: Run) -> int:
    """Return the number of evaluations that are planned or being answered."""
    return len(run.database.fetch("open_evaluations", run_id=run.run_id))


def weights_of_open_evaluations(run: Run) -> set[str]:
    """Return the weights that planned evaluations and those being answered still need."""
    return {row["uri"] for row in run.database.fetch("open_evaluations", run_id=run.run_id)}


def failed_evaluations(run: Run) -> list[Evaluation]:
    """Return the failed evaluations of the current attempt."""
    return records(Evaluation, run.database.fetch("failed_evaluations", run_id=run.run_id))


def answered_validations(run: Run) -> dict[int, set[tuple[str, str]]]:
    """Return (taskset, decoding) of every answered validation of the current history, by trainer step."""
    answered: dict[int, set[tuple[str, str]]] = {}
    for row in run.database.fetch("answered_validations", run_id=run.run_id):
        answered.setdefault(row["trainer_step"], set()).add((row["taskset"], row["decoding"]))
    return answered


def validation_scores(run: Run, tasksets: Sequence[str], decoding: str, *, max_failed: float) -> dict[int, float]:
    """Return the score of every step that has one, including the initial weights (step 0).

    Args:
        max_failed: share of failed answers with which an evaluation still counts. They count as 0, so an evaluation with more of
            them measures a judge or a sandbox rather than the policy.
    """
    if not tasksets:
        return {}
    rows = run.database.fetch(
        "validation_scores", run_id=run.run_id, tasksets=sorted(set(tasksets)), decoding=decoding, max_failed=max_failed
    )
    return {row["trainer_step"]: row["score"] for row in rows}


def best_step(scores: Mapping[int, float]) -> int | None:
    """Return the trained step with the highest score, the earliest if several are equal; None if no step has one."""
    trained = [step for step in scores if step > 0]
    return min(trained, key=lambda step: (-scores[step], step)) if trained else None
