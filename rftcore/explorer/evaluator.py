"""Answers evaluations with an explorer's engine: all questions of a taskset by one policy version.

Evaluations of the weights in the engine run beside rollouts, and newer weights wait for them. For those of older weights the engine must have
no rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rftcore.engines.base import Decoding
from rftcore.explorer.engine_weights import EngineWeights
from rftcore.explorer.run_failures import RunFailures
from rftcore.explorer.taskset_runners import TasksetRunners
from rftcore.explorer.workflow_loop import WorkflowLoop
from rftcore.workflows.task import Task
from rftdata.attempts.evaluations import (
    Answer,
    Evaluation,
    claim_evaluation,
    fail_evaluation,
    finish_evaluation,
    questions,
    release_evaluation,
)
from rftdata.errors import ModelError
from rftdata.experience import last_sequence
from rftdata.workers.worker import Worker

logger = logging.getLogger(__name__)


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
            evaluation = claim_evaluation(run, worker_id, lease_s=self.lease_s, policy_version_id=policy_version_id)
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
        tasks = [Task.from_row(vars(question)) for question in questions(run, evaluation)]
        which = f"{evaluation.taskset} ({evaluation.decoding}, step {evaluation.trainer_step})"
        self.present = f"answers {len(tasks)} questions of {which}"
        self.worker.set_state(self.present, activity="evaluating")
        of_taskset = self.runners[evaluation.taskset]
        decoding = of_taskset.decoding.greedy() if evaluation.decoding == "greedy" else of_taskset.decoding
        started, before = time.monotonic(), of_taskset.runner.engine.num_generated_tokens
        try:
            answers = await self._answers(tasks, decoding)
        finally:
            self.present = ""
        if answers is None:
            return
        seconds = time.monotonic() - started
        self.record_rate(before, seconds)
        errors = [answer.error for answer in answers if answer.error]
        all_failed, what = bool(errors) and len(errors) == len(answers), f"the {len(answers)} answers on {which}"
        if not all_failed:
            self.failures.outage.passed()
        elif (self.only_evaluates or self.failures.outage.lasts) and self.failures.is_outage(
            what, len(errors), errors[0]
        ):
            release_evaluation(run, worker_id)
            return
        if all_failed:
            # No score: 0 would mean that the policy is bad, and a later one better.
            text = f"{len(errors)} of {len(answers)} answers failed; the first: {errors[0]}"
            fail_evaluation(run, evaluation.evaluation_id, worker_id, text)
            logger.warning("%s could not be scored: %s", what, errors[0])
            if self.only_evaluates:  # this run has no rollouts that would show the failure
                raise self.failures.error(what, len(errors), errors[0])
            return
        finish_evaluation(run, evaluation.evaluation_id, worker_id, answers, seconds)
        if errors:
            logger.warning("%d of %s could not be scored and count as 0; the first: %s", len(errors), what, errors[0])

    async def _answers(self, tasks: list[Task], decoding: Decoding) -> list[Answer] | None:
        """Return one answer per task; None if asked to stop before the last."""
        running = [asyncio.create_task(self._answer_to(task, decoding)) for task in tasks]
        pending = set(running)
        try:
            while pending:
                done, pending = await asyncio.wait(pending, timeout=0.5, return_when=asyncio.FIRST_EXCEPTION)
                for answer in done:
                    answer.result()
                if pending and self.worker.should_stop():
                    return None
            return [answer.result() for answer in running]
        finally:
            for answer in running:
                answer.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer_to(self, task: Task, decoding: Decoding) -> Answer:
        rollout = await self.workflows.run(self.runners[task.taskset].runner.rollout(task, 0, decoding))
        # A workflow may also write an expert's answer.
        sampled = [sequence for sequence in rollout.sequences if sequence.behavior_logprobs is not None]
        answered = sampled or rollout.sequences
        last = last_sequence(answered)
        return Answer(
            task_id=task.task_id,
            reward=rollout.reward or 0.0,
            response=last.last_answer if last else "",
            num_response_tokens=sum(sequence.num_trained_tokens for sequence in answered),
            finish_reason=last.finish_reason if last else "abort",
            error=rollout.error,
        )
