"""The buffer from Python: store your own experiences, train on them, inspect them, correct one, go back.

No model and no GPU: one line stands for the trainer's update. Run it with `python walk_through.py [FOLDER]`.
"""

from __future__ import annotations

import sys

import numpy as np

import rftdata
from rftdata import Group, Rollout, Run, Sequence
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.pipeline.records import Verdicts, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.workers.worker import Worker

PIPELINE = "keep-everything"


def group(question: str, answers: dict[str, float]) -> Group:
    """Return one question with several answers and their rewards; characters stand for tokens."""
    rollouts = []
    for index, (answer, reward) in enumerate(answers.items()):
        sequence = Sequence(
            prompt=question,
            response=answer,
            token_ids=[ord(character) for character in question + answer],
            num_prompt_tokens=len(question),
            behavior_logprobs=[-0.5] * len(answer),
            finish_reason="stop",
            reward=reward,
        )
        rollouts.append(Rollout(index, "ok", reward, [sequence]))
    return Group(rollouts, source="human", taskset="capitals", task_key=question, payload={"prompt": question})


def decide(run: Run) -> None:
    """Decide like a pipeline that keeps every row; `rft process` would run a chain of operators."""
    with Worker(run, "pipeline") as worker:
        while batch := claim_sealed_groups(run, worker.worker_id, count=64, lease_s=60):
            commit_verdicts(run, worker.worker_id, PIPELINE, batch, Verdicts(kept(batch.table)))


def main(folder: str) -> None:
    with rftdata.open(folder) as buffer:
        run = buffer.create_run(
            name="walk-through", config={}, seed=1, steps=2, pipeline_version=PIPELINE, mode="train"
        )

        # Returns when rows and arrays are durable; a retry after a lost connection inserts nothing twice.
        with buffer.writer(run) as writer:
            writer.insert(
                group("Capital of France? ", {"Paris": 1.0, "Lyon": 0.0}),
                group("Capital of Japan? ", {"Kyoto": 0.0, "Tokyo": 0.0}),  # one reward is wrong
            )
        decide(run)

        # Any SQL client may correct a reward: the group is decided on again before it can be drawn, and the history is kept.
        buffer.sql("UPDATE rft.experience SET reward = 1 WHERE response = 'Tokyo'")
        decide(run)

        with buffer.attempt(run) as attempt:
            for step in range(attempt.start_step + 1, run.planned_steps + 1):
                batch = attempt.draw(step, num_groups=1, columns=["token_ids", "loss_mask", "behavior_logprobs"])
                assert batch is not None
                # Your own memory, padded or packed: the values are copied there once, from the mapped file.
                tokens = batch.padded("token_ids", np.zeros((len(batch), 32), dtype=np.int64))
                mask = batch.padded("loss_mask", np.zeros((len(batch), 32), dtype=np.int64))
                loss = float((tokens * mask).mean())
                attempt.record_step(
                    step, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={"loss": loss}
                )
                print(f"step {step}: {batch.rows.select(['experience_id', 'reward']).to_pylist()}")
            attempt.commit_checkpoint(2, f"{folder}/checkpoint-2")

        print(
            buffer.sql(
                "SELECT response, reward_sampled, reward, state, trainer_steps FROM rft.v_experience ORDER BY 1"
            ).to_pylist()
        )
        print(buffer.sql("SELECT experience_id, old_value, new_value, author FROM rft.label").to_pylist())
        print(f"look around: rft sql --buffer {buffer.location}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "./buffer")
