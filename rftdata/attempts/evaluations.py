"""Evaluations, requested by a trainer and answered by an explorer, and the best step according to them.

A step has a score if every validation taskset of the run was answered at it in the deciding decoding (the first of
`eval.decodings`): the mean over the tasksets. A step with only some of its tasksets answered has none, whatever its results on
those, because tasksets differ in difficulty. The same holds for a step at which more than `eval.max_failed` of the answers failed. Only the
run's current history counts.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rftdata.attempts.attempt import Attempt
from rftdata.errors import ConfigError
from rftdata.experience import Rollout, last_sequence
from rftdata.pipeline.purged import PURGED
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, execute, fetch, records
from rftdata.postgres.retry import ride_out
from rftdata.postgres.values import storable
from rftdata.run import Run
from rftdata.writing.chats import chat_of


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The questions of a taskset for one policy version; its fields are columns of `rft.evaluation`."""

    evaluation_id: int
    policy_version_id: int
    trainer_step: int
    purpose: str
    taskset: str
    decoding: str
    num_answers: int
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
    """An answer to a task, with its rollout; its fields are columns of `rft.evaluation_answer`.

    Attributes:
        error: why it could not be scored, which counts as a reward of 0.
    """

    task_id: int
    answer_index: int = 0
    reward: float
    response: str
    num_response_tokens: int
    finish_reason: str
    error: str | None = None
    outcome: str = "ok"
    stop_reason: str | None = None
    num_turns: int = 1
    seconds: float | None = None
    reward_parts: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    chats: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, task_id: int, rollout: Rollout) -> Answer:
        """Return what an evaluation keeps of a rollout. A workflow may also write an expert's answer, which is none of the policy's."""
        sampled = [sequence for sequence in rollout.sequences if sequence.behavior_logprobs is not None]
        answered = sampled or rollout.sequences
        last = last_sequence(answered)
        return cls(
            task_id=task_id,
            answer_index=rollout.index,
            reward=rollout.reward or 0.0,
            response=last.last_answer if last else "",
            num_response_tokens=sum(sequence.num_trained_tokens for sequence in answered),
            finish_reason=last.finish_reason if last else "abort",
            error=rollout.error,
            outcome=rollout.outcome,
            stop_reason=rollout.stop_reason,
            num_turns=rollout.num_turns,
            seconds=rollout.seconds,
            reward_parts=last.reward_parts if last else {},
            metrics={name: value for sequence in answered for name, value in sequence.metrics.items()},
            chats=[chat_of(sequence) for sequence in rollout.sequences],
        )


_COLUMNS = tuple(each.name for each in fields(Answer))


def claim_evaluation(
    run: Run, worker_id: int, *, lease_s: float, policy_version_id: int | None = None
) -> Evaluation | None:
    """Claim the next evaluation, or the next of one policy version; None if there is none.

    A worker holds at most one, and one that it has reserved, of another policy version.
    """
    rows = ride_out(
        lambda: run.database.fetch(
            "claim_evaluation",
            run_id=run.run_id,
            worker_id=worker_id,
            lease_s=lease_s,
            policy_version_id=policy_version_id,
        ),
        between=lambda: _release(run, worker_id, policy_version_id=policy_version_id),
    )
    return next(iter(records(Evaluation, rows)), None)


def reserve_evaluation(
    run: Run, worker_id: int, *, lease_s: float, but: Collection[int], after_s: float
) -> Evaluation | None:
    """Claim an evaluation that this worker answers once its engine has no rollouts; None if there is none, or another worker does so.

    Args:
        but: policy versions whose evaluations this worker already answers.
        after_s: seconds that it must have waited, in which an engine with its weights would have begun.
    """
    rows = ride_out(
        lambda: run.database.fetch(
            "reserve_evaluation",
            run_id=run.run_id,
            worker_id=worker_id,
            lease_s=lease_s,
            but=list(but),
            after_s=after_s,
        ),
        between=lambda: _release(run, worker_id, but=but),
    )
    return next(iter(records(Evaluation, rows)), None)


def _release(run: Run, worker_id: int, *, policy_version_id: int | None = None, but: Collection[int] = ()) -> None:
    run.database.run(
        "release_evaluations",
        run_id=run.run_id,
        worker_id=worker_id,
        policy_version_id=policy_version_id,
        but=list(but),
    )


def questions(run: Run, evaluation: Evaluation) -> list[Question]:
    """Return the tasks of an evaluation."""
    return records(Question, run.database.fetch("evaluation_tasks", taskset=evaluation.taskset))


def answered_questions(run: Run, evaluation_id: int) -> set[tuple[int, int]]:
    """Return task and index of every stored answer of an evaluation."""
    rows = run.database.fetch("answered_questions", evaluation_id=evaluation_id)
    return {(row["task_id"], row["answer_index"]) for row in rows}


def store_answers(run: Run, evaluation_id: int, worker_id: int, answers: Sequence[Answer]) -> bool:
    """Store answers of an evaluation before it is finished; return False if the claim has passed to another worker."""

    def store() -> bool:
        with run.database.transaction() as connection:
            return _insert(connection, evaluation_id, worker_id, answers)

    return ride_out(store)


def finish_evaluation(run: Run, evaluation_id: int, worker_id: int, answers: Sequence[Answer], seconds: float) -> bool:
    """Store the remaining answers, and the mean of all; return False if the claim has passed to another worker.

    Answers with an error count with a reward of 0; the evaluation's row has their number. Of an answer to a task that was purged meanwhile,
    only the numbers are stored.
    """

    def store() -> bool:
        with run.database.transaction() as connection:
            held = _insert(connection, evaluation_id, worker_id, answers)
            if held:
                execute(
                    connection, "finish_evaluation", evaluation_id=evaluation_id, worker_id=worker_id, seconds=seconds
                )
        return held

    stored = ride_out(store)
    notify.notify(run.database, notify.RUN)
    return stored


def _insert(connection: Connection, evaluation_id: int, worker_id: int, answers: Sequence[Answer]) -> bool:
    """Store answers if the worker holds the evaluation; return whether it does."""
    tasks = sorted({answer.task_id for answer in answers})
    there = {row["task_id"] for row in fetch(connection, "lock_tasks", task_ids=tasks)}
    if not fetch(connection, "hold_evaluation", evaluation_id=evaluation_id, worker_id=worker_id):
        return False
    kept = [answer if answer.task_id in there else _without_texts(answer) for answer in answers]
    values = {name: [_stored(getattr(answer, name)) for answer in kept] for name in _COLUMNS}
    execute(connection, "insert_answers", evaluation_id=evaluation_id, task_ids=values.pop("task_id"), **values)
    return True


def _stored(value: Any) -> Any:
    """Return a value for the database; an object as JSON."""
    value = storable(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _without_texts(answer: Answer) -> Answer:
    return replace(
        answer,
        response=PURGED,
        error=answer.error and PURGED,
        reward_parts=_numbers_of(answer.reward_parts),
        metrics=_numbers_of(answer.metrics),
        chats=[],
    )


def _numbers_of(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if isinstance(value, int | float)}


def release_evaluation(run: Run, worker_id: int) -> None:
    """Leave the evaluation that a worker holds to be claimed again."""
    ride_out(lambda: _release(run, worker_id))


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
    num_answers: int = 1,
) -> int:
    """Plan evaluations of one policy version, except those that its history already has; return their number.

    Args:
        num_answers: to each question if they are sampled; greedy ones would all be equal, so there is one.

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
                        num_answers=1 if decoding == "greedy" else num_answers,
                        uri=uri,
                        checksum=checksum,
                    )
        return planned

    planned = ride_out(plan)
    notify.notify(attempt.run.database, notify.POLICY)
    return planned


def adopt_evaluations(attempt: Attempt, policy_version_id: int, checksum: str) -> None:
    """Give the unfinished evaluations of a run that only evaluates to an attempt's policy version, which has the same weights.

    Raises:
        ConfigError: the run has evaluated other weights.
        FencedError: another attempt holds the run.
    """
    run = attempt.run
    for row in run.database.fetch("evaluated_checksums", run_id=run.run_id):
        if row["checksum"] != checksum:
            raise ConfigError(
                f"the weights of the model have changed since the run {run.name!r} began to evaluate them",
                value=checksum,
                allowed=row["checksum"],
                todo="start another evaluation",
            )

    def adopt() -> None:
        with attempt.transaction() as connection:
            execute(connection, "adopt_evaluations", run_id=run.run_id, policy_version_id=policy_version_id)

    ride_out(adopt)


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
