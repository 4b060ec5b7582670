"""One run of `rft bench replay` in one process: samples with the learner's model, writes to a buffer, draws from it and trains."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runs.replay_variants import ReplayBudget, Variant
from benchmarks.selection import sorting
from rftcore.algorithms import build_algorithm
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Tokens
from rftdata.attempts import stored_selection
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.sampling import SamplingConfig


class ReplayRun:
    """Learner and buffer of a run.

    Args:
        model: folder of the model at the start.
    """

    def __init__(
        self, buffer: Buffer, variant: Variant, seed: int, budget: ReplayBudget, model: Path, course: sorting.Course
    ) -> None:
        self._buffer, self._variant, self._budget, self._seed = buffer, variant, budget, seed
        self._tasks, self._held_out = sorting.make_tasks(course, seed)
        self._tokens = sorting.Tokens(model)
        self._algorithm = build_algorithm("grpo", variant.algorithm(), group_size=budget.group_size)
        self._learner = sorting.open_learner(model, self._algorithm, budget.learning_rate, seed, warmup_steps=10)
        # A run on stored groups samples other rollouts than the run that stored them.
        self._generator = np.random.default_rng((seed, 8 if variant.from_stored else 7))
        self._step = self._rollouts = 0
        self._seconds = 0.0

    def train_stored(self, sql: str) -> Iterator[dict[str, Any]]:
        """Train on the groups that a query selects; yield the evaluations."""
        prioritized = self._variant.prioritized
        selected = stored_selection.select(self._buffer.database, sql, priority_exponent=1.0 if prioritized else None)
        steps = stored_selection.num_steps(len(selected.item_ids), self._budget.batch_groups, 1)
        run = self._buffer.create_run(
            name="stored",
            config={},
            seed=self._seed,
            steps=steps,
            pipeline_version="none",
            mode="train",
            selected=selected,
        )
        with self._buffer.attempt(run) as attempt:
            for step in range(1, steps + 1):
                if step % self._budget.evaluate_every == 1:
                    yield self._evaluated()
                self._train_step(attempt, step)

    def train(self) -> Iterator[dict[str, Any]]:
        """Train on rollouts of the run itself; yield the evaluations."""
        budget = self._budget
        run = self._buffer.create_run(
            name="replay", config={}, seed=self._seed, steps=budget.steps, pipeline_version="none", mode="train"
        )
        sampling = SamplingConfig.model_validate(self._variant.sampling(budget))
        with self._buffer.attempt(run, sampling=sampling) as attempt, self._buffer.writer(run) as writer:
            version = attempt.publish(0, method="memory", uri="none", num_bytes=0, checksum="")
            for step in range(1, budget.steps + 1):
                if step % budget.evaluate_every == 1:
                    yield self._evaluated()
                started = time.process_time()
                writer.insert(*self._sampled(version, step))
                self._seconds += time.process_time() - started
                self._train_step(attempt, step)
                version = attempt.publish(step, method="memory", uri="none", num_bytes=0, checksum="")
            yield self._evaluated()

    def _train_step(self, attempt: Attempt, step: int) -> None:
        started = time.process_time()
        batch = attempt.draw(step, self._budget.batch_groups, ARRAYS, timeout_s=60)
        assert batch is not None
        self._step += 1
        if len(batch):
            self._learner.update(train_batch(batch, self._algorithm), self._step)
        self._seconds += time.process_time() - started

    def _sampled(self, version: int, step: int) -> list[Group]:
        """Return new groups of the policy, as many as a step samples."""
        size = self._budget.group_size
        numbers = self._generator.integers(len(self._tasks), size=self._budget.batch_groups // self._variant.uses)
        tasks = [self._tasks[number] for number in numbers]
        with self._learner.policy.unpacked() as model:
            sampled = list(sorting.rollouts_of(model, [task for task in tasks for _ in range(size)], self._tokens))
        self._rollouts += len(sampled)
        groups = []
        for place, task in enumerate(tasks):
            right = self._tokens.response(task.answer)
            rollouts = []
            for index, (prompt, response, logprobs) in enumerate(sampled[place * size : (place + 1) * size]):
                reward = float(response == right)
                sequence = Tokens(
                    prompt=task.question,
                    response=str(response),
                    token_ids=prompt + response,
                    num_prompt_tokens=len(prompt),
                    finish_reason="stop",
                    reward=reward,
                    behavior_logprobs=logprobs,
                    policy_spans=[(len(prompt), version)],
                )
                rollouts.append(Rollout(index, "ok", reward, [sequence]))
            key = f"{step}-{place}"
            groups.append(Group(rollouts, source="explorer", taskset="sorting", task_key=key, payload={}))
        return groups

    def _evaluated(self) -> dict[str, Any]:
        with self._learner.policy.unpacked() as model:
            score, _ = sorting.scores(model, self._held_out, self._tokens)
        return {
            "rollouts": self._rollouts,
            "step": self._step,
            "score": round(score, 5),
            "seconds": round(self._seconds, 2),
        }
