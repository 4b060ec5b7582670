"""Evaluations: asked for by a trainer, answered by an explorer that claims them; and which step they show to be the best.

A step has a score when every validation taskset of the run was answered at it, in the decoding that decides (the first of
`eval.decodings`): the mean over the tasksets. A step with some of its tasksets answered has none, however well it did on
those: tasksets differ in difficulty. Only the run's present history counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rftdata.postgres import notify
from rftdata.postgres.database import Database, Row, copy_rows, execute
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.training.attempt import Attempt


def claim_evaluation(database: Database, run_id: int, worker_id: int, *, lease_s: float) -> Row | None:
    """The next evaluation to answer, or None; a worker that claims one holds no other."""
    rows = ride_out(
        lambda: database.fetch("claim_evaluation", run_id=run_id, worker_id=worker_id, lease_s=lease_s),
        between=lambda: database.run("release_evaluations", run_id=run_id, worker_id=worker_id),
    )
    return rows[0] if rows else None


def finish_evaluation(
    database: Database, evaluation_id: int, worker_id: int, answers: Sequence[dict[str, Any]], seconds: float
) -> bool:
    """Store the answers and their mean; False when the claim passed to another worker.

    Answers with an error count with their reward of 0, and the evaluation's row says how many there are.
    """
    mean = sum(answer["reward"] for answer in answers) / max(len(answers), 1)
    errors = [answer["error"] for answer in answers if answer["error"]]
    error = f"{len(errors)} of {len(answers)} answers failed and count 0; the first: {errors[0]}" if errors else None

    def store() -> bool:
        with database.transaction() as connection:
            done = execute(
                connection, "finish_evaluation", evaluation_id=evaluation_id, worker_id=worker_id, num_tasks=len(answers),
                mean_reward=mean, seconds=seconds, error=storable(error),
            )  # fmt: skip
            if done:
                columns = [
                    ("evaluation_id", "int8"), ("task_id", "int8"), ("reward", "float8"), ("response", "text"),
                    ("num_response_tokens", "int4"), ("finish_reason", "text"), ("error", "text"),
                ]  # fmt: skip
                rows = ((evaluation_id, *(storable(answer[name]) for name, _ in columns[1:])) for answer in answers)
                copy_rows(connection, "rft.evaluation_answer", columns, rows)
        return bool(done)

    stored = ride_out(store)
    notify.notify(database, notify.RUN)
    return stored


def fail_evaluation(database: Database, evaluation_id: int, worker_id: int, error: str) -> None:
    """An evaluation that cannot be answered; nothing happens where its claim passed to another worker."""
    ride_out(
        lambda: database.run("fail_evaluation", evaluation_id=evaluation_id, worker_id=worker_id, error=storable(error))
    )
    notify.notify(database, notify.RUN)


def plan_evaluations(
    attempt: Attempt, *, policy_version_id: int, trainer_step: int, purpose: str, tasksets: Sequence[str],
    decodings: Sequence[str], uri: str, checksum: str,
) -> int:  # fmt: skip
    """Ask for evaluations of one policy version; those its history already has are not asked for again.

    Raises:
        FencedError: another attempt holds the run.
    """

    def plan() -> int:
        planned = 0
        with attempt.transaction() as connection:
            for taskset in tasksets:
                for decoding in decodings:
                    planned += execute(
                        connection, "plan_evaluation", run_id=attempt.run_id, policy_version_id=policy_version_id,
                        trainer_step=trainer_step, purpose=purpose, taskset=taskset, decoding=decoding, uri=uri, checksum=checksum,
                    )  # fmt: skip
        return planned

    planned = ride_out(plan)
    notify.notify(attempt.database, notify.POLICY)
    return planned


def validation_scores(database: Database, run_id: int, tasksets: Sequence[str], decoding: str) -> dict[int, float]:
    """Score of every step that has one, the initial weights (step 0) included."""
    if not tasksets:
        return {}
    rows = database.fetch("validation_scores", run_id=run_id, tasksets=sorted(set(tasksets)), decoding=decoding)
    return {row["trainer_step"]: row["score"] for row in rows}


def best_step(scores: Mapping[int, float]) -> int | None:
    """The trained step with the highest score, the earliest of equals; None without one."""
    trained = [step for step in scores if step > 0]
    return min(trained, key=lambda step: (-scores[step], step)) if trained else None
