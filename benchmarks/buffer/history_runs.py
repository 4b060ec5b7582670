"""Runs with a history, made through the public interface: verdicts, draws, steps, checkpoints, evaluations and labels."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.harness.workload import GROUP_SIZE, Sample, make_samples
from benchmarks.peers.rftdata_buffer import as_groups
from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.evaluations import Answer, claim_evaluation, finish_evaluation, plan_evaluations, questions
from rftdata.labels import set_rewards
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.pipeline.records import Verdicts, dropped, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.processes import own_process
from rftdata.run import Run

VERSION = "history"
_AT_ONCE, _BATCH_GROUPS, _CHECKPOINT_EVERY, _VALIDATIONS = 512, 8, 50, 5
# A sample takes longer to make than to write, so a run repeats this many.
_NUM_DIFFERENT = 4096


def add_run(buffer: Buffer, number: int, num: int, samples: Sequence[Sample] = ()) -> None:
    """Add a run with `num` experiences: two groups in five are dropped, half of the experiences are drawn, one in fifty is relabelled.

    Args:
        samples: what is stored, again and again; by default some of the usual size.
    """
    run = buffer.create_run(name=f"run-{number}", config={}, seed=number, steps=10**6, pipeline_version=VERSION)
    chance = random.Random(number)
    samples = samples or make_samples(min(num, _NUM_DIFFERENT), seed=number)
    with buffer.writer(run) as writer:
        for first in range(0, num, _AT_ONCE):
            writer.insert(*as_groups([samples[i % len(samples)] for i in range(first, min(first + _AT_ONCE, num))]))
    _decide(run)
    with buffer.attempt(run) as attempt:
        _train(attempt, num // 2 // (GROUP_SIZE * _BATCH_GROUPS), chance)
    ids = buffer.sql("SELECT experience_id FROM rft.experience WHERE run_id = %s", [run.run_id])[
        "experience_id"
    ].to_pylist()
    for author in ("anna", "ben"):
        set_rewards(
            buffer, {key: float(chance.random() < 0.5) for key in chance.sample(ids, len(ids) // 50)}, author=author
        )
    _decide(run)


def _decide(run: Run) -> None:
    worker_id = _worker(run, "pipeline")
    while (batch := claim_sealed_groups(run, worker_id, count=1000, lease_s=60)) is not None:
        is_kept = pa.array(np.asarray(batch.table["group_id"]) % 5 < 3)
        both = (
            kept(batch.table.filter(is_kept)),
            dropped(batch.table.filter(pc.invert(is_kept)), "two_in_five", "its number"),
        )
        commit_verdicts(run, worker_id, VERSION, batch, Verdicts(pa.concat_tables(both)))


def _train(attempt: Attempt, num_steps: int, chance: random.Random) -> None:
    explorer = _worker(attempt.run, "explorer")
    for step in range(1, num_steps + 1):
        batch = attempt.draw(step, _BATCH_GROUPS, ("token_ids",))
        assert batch is not None
        attempt.record_step(
            step, batch, wait_seconds=1.0, train_seconds=2.0, publish_seconds=0.1, metrics={"loss": 1 / step}
        )
        if step % _CHECKPOINT_EVERY == 0 or step == num_steps:
            attempt.commit_checkpoint(step, f"checkpoint-{step}")
        if step % max(1, num_steps // _VALIDATIONS) == 0:
            _validate(attempt, step, explorer, chance)


def _validate(attempt: Attempt, step: int, explorer: int, chance: random.Random) -> None:
    version = attempt.publish(step, method="checkpoint", uri=f"step-{step}", num_bytes=0, checksum=str(step))
    plan_evaluations(
        attempt,
        policy_version_id=version,
        trainer_step=step,
        purpose="validation",
        tasksets=["benchmark"],
        decodings=["greedy"],
        uri=f"step-{step}",
        checksum=str(step),
    )
    evaluation = claim_evaluation(attempt.run, explorer, lease_s=60)
    assert evaluation is not None
    answers = [
        Answer(
            task_id=task.task_id,
            reward=float(chance.random() < 0.5),
            response="an answer",
            num_response_tokens=9,
            finish_reason="stop",
        )
        for task in questions(attempt.run, evaluation)
    ]
    finish_evaluation(attempt.run, evaluation.evaluation_id, explorer, answers, seconds=1.0)


def _worker(run: Run, role: str) -> int:
    (row,) = run.database.fetch("insert_worker", run_id=run.run_id, role=role, **own_process())
    return int(row["worker_id"])
