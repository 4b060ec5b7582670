"""Answers evaluations with an explorer's engine: all questions of a taskset by one policy version.

Evaluations of the weights in the engine run beside rollouts, and newer weights wait for them. For those of older weights the engine must have
no rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from rftcore.explorer.engine_weights import EngineWeights
from rftcore.explorer.run_failures import RunFailures
from rftcore.explorer.taskset_runners import TasksetRunners
from rftcore.explorer.workflow_loop import WorkflowLoop
from rftcore.workflows.prompts import Prompts
from rftcore.workflows.task import Task
from rftdata.attempts.evaluations import (
    Answer,
    Evaluation,
    answered_questions,
    claim_evaluation,
    fail_evaluation,
    finish_evaluation,
    questions,
    release_evaluation,
    reserve_evaluation,
    store_answers,
    versions_to_evaluate,
)
from rftdata.errors import ModelError
from rftdata.workers.worker import Worker

logger = logging.getLogger(__name__)

_STORE_S = 5.0
# In this time an engine that has the weights begins to answer beside its rollouts.
_RESERVE_AFTER_S = 2.0


@dataclass(kw_only=True)
class Evaluator:
    """Answers the evaluations of a run.

    Attributes:
        runners: of its rollouts; a greedy evaluation uses the limits of their sampling.
        record_rate: receives the number of tokens that the engine had generated before, and the seconds since.
        only_evaluates: whether the run has no rollouts.
        lease_s: seconds of silence after which another explorer may answer.
        present: what it answers; empty while it answers nothing.
    """

    worker: Worker
    weights: EngineWeights
    runners: TasksetRunners
    workflows: WorkflowLoop
    failures: RunFailures
    record_rate: Callable[[int, float], None]
    only_evaluates: bool
    lease_s: float
    present: str = field(default="", init=False)
    _reserved: Evaluation | None = field(default=None, init=False)

    def reserve(self, but: Collection[int]) -> bool:
        """Return whether this explorer is the one that answers an evaluation of other weights, so that it must claim no more groups.

        One explorer reserves it; the others go on with their rollouts.

        Args:
            but: policy versions that it evaluates beside its rollouts.
        """
        if self._reserved is None and versions_to_evaluate(self.worker.run) - set(but):
            self._reserved = reserve_evaluation(
                self.worker.run, self.worker.worker_id, lease_s=self.lease_s, but=but, after_s=_RESERVE_AFTER_S
            )
        return self._reserved is not None

    async def answer_all(self, policy_version_id: int | None = None) -> bool:
        """Answer every pending evaluation, or those of the weights in the engine; return whether there was one.

        Evaluations are claimed in the order of their policy versions, so that each weights file is loaded once, and the newest weights
        only after the last evaluation of older ones. One that fails as a whole during an outage is released, to be claimed again.

        Args:
            policy_version_id: that of the weights in the engine, which has rollouts; None for all evaluations, in an engine without any.

        Raises:
            RolloutsFailedError: every answer fails, for longer than an outage may last, or in a run that has no rollouts.
        """
        run, worker_id = self.worker.run, self.worker.worker_id
        answered = False
        while not self.worker.should_stop() and not self.failures.outage.pauses:
            evaluation = None if policy_version_id is not None else self._reserved
            if evaluation is None:
                evaluation = claim_evaluation(run, worker_id, lease_s=self.lease_s, policy_version_id=policy_version_id)
            else:
                self._reserved = None
            if evaluation is None:
                break
            answered = True
            self.failures.outage.claimed()
            self.weights.set_ready(False)
            try:
                if not self.weights.are_those_of(evaluation):
                    await self.weights.load(evaluation)
                await self._answer(evaluation)
            except ModelError as error:
                # Its weights were removed (the trainer keeps only the newest): the evaluation fails, and the run continues.
                fail_evaluation(run, evaluation.evaluation_id, worker_id, str(error))
        if answered:
            self.weights.set_ready(True)
        return answered

    async def _answer(self, evaluation: Evaluation) -> None:
        """Store the answers of one evaluation. If asked to stop, leave it, to be planned again when the worker leaves."""
        run, worker_id = self.worker.run, self.worker.worker_id
        asked, num_stored = self._asked(evaluation)
        which = f"{evaluation.taskset} ({evaluation.decoding}, step {evaluation.trainer_step})"
        self.present = f"answers {len(asked)} questions of {which}"
        self.worker.set_state(self.present, activity="evaluating")
        started, before = time.monotonic(), self.runners.default.runner.engine.num_generated_tokens
        try:
            answers = await self._answers(evaluation, asked)
        finally:
            self.present = ""
            self.worker.progress.pop("answered", None)
        if answers is None:
            return
        seconds = time.monotonic() - started
        self.record_rate(before, seconds)
        errors = [answer.error for answer in answers if answer.error]
        num_answers = num_stored + len(asked)
        all_failed, what = bool(errors) and len(errors) == num_answers, f"the {num_answers} answers on {which}"
        if not all_failed:
            self.failures.outage.passed()
        elif (self.only_evaluates or self.failures.outage.lasts) and self.failures.is_outage(
            what, len(errors), errors[0]
        ):
            release_evaluation(run, worker_id)
            self._reserved = None  # it was released, too
            return
        if all_failed:
            # No score: 0 would mean that the policy is bad, and a later one better.
            text = f"{len(errors)} of {num_answers} answers failed; the first: {errors[0]}"
            fail_evaluation(run, evaluation.evaluation_id, worker_id, text)
            logger.warning("%s could not be scored: %s", what, errors[0])
            if self.only_evaluates:  # this run has no rollouts that would show the failure
                raise self.failures.error(what, len(errors), errors[0])
            return
        finish_evaluation(run, evaluation.evaluation_id, worker_id, answers, seconds)
        if errors:
            logger.warning("%d of %s could not be scored and count as 0; the first: %s", len(errors), what, errors[0])

    def _asked(self, evaluation: Evaluation) -> tuple[list[tuple[Task, int]], int]:
        """Return the questions, each as often as it is to be answered, without the answers that are stored; and the number of those."""
        run = self.worker.run
        stored = answered_questions(run, evaluation.evaluation_id)
        tasks = [Task.from_row(vars(question)) for question in questions(run, evaluation)]
        every = [(task, index) for task in tasks for index in range(evaluation.num_answers)]
        return [(task, index) for task, index in every if (task.task_id, index) not in stored], len(stored)

    async def _answers(self, evaluation: Evaluation, asked: list[tuple[Task, int]]) -> list[Answer] | None:
        """Return the answers that are not stored yet; None if asked to stop before the last, or if another worker answers now.

        Good answers are stored every few seconds, and at a stop, so that an explorer that takes over asks only for the others. Failed ones are not
        stored before the end: it asks for them again.
        """
        thoughts = self.runners[evaluation.taskset].runner.thoughts
        prompts: dict[int, Prompts] = defaultdict(partial(Prompts, thoughts))
        running = [
            asyncio.create_task(self._answer_to(task, index, evaluation.decoding, prompts[task.task_id]))
            for task, index in asked
        ]
        pending, unstored, stored_at, is_held = set(running), list[Answer](), time.monotonic(), True
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_EXCEPTION)
                unstored += [answer.result() for answer in done]
                self.worker.progress["answered"] = f"{len(running) - len(pending)} of {len(running)}"
                if pending and self.worker.should_stop():
                    return None
                if pending and time.monotonic() - stored_at > _STORE_S:
                    good, unstored = _good(unstored), [answer for answer in unstored if answer.error is not None]
                    is_held = await asyncio.to_thread(self._store, evaluation, good)
                    if not is_held:
                        return None
                    stored_at = time.monotonic()
            return unstored
        finally:
            for answer in running:
                answer.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
            if pending and is_held:
                late = [answer for answer, task in zip(ended, running, strict=True) if task in pending]
                unstored += [answer for answer in late if isinstance(answer, Answer)]
                await asyncio.to_thread(self._store, evaluation, _good(unstored))

    def _store(self, evaluation: Evaluation, answers: list[Answer]) -> bool:
        return not answers or store_answers(self.worker.run, evaluation.evaluation_id, self.worker.worker_id, answers)

    async def _answer_to(self, task: Task, index: int, decoding: str, prompts: Prompts) -> Answer:
        of_taskset = self.runners[task.taskset]
        sampling = of_taskset.decoding.greedy() if decoding == "greedy" else of_taskset.decoding
        rollout = await self.workflows.run(of_taskset.runner.rollout(task, index, sampling, prompts=prompts))
        return Answer.of(task.task_id, rollout)


def _good(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if answer.error is None]
