"""From preferences of people to a reward model, and from its scores to PPO with a critic: three runs in one buffer, and a fork."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import rftdata
from rftdata import Buffer, Group, Rollout, Sequence
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, Rft, rows
from tests.support.warm_up import Warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CHARACTERS = "0123456789>"
BOS, EOS, FIRST = 1, 2, 4
# How the two answers to a question are told apart: the right one and one with two digits exchanged.
PAIRS = """
INSERT INTO rft.preference_pair (chosen_id, rejected_id)
SELECT c.experience_id, j.experience_id FROM rft.experience c JOIN rft.experience j USING (group_id) WHERE c.reward > j.reward"""


def answer(question: str, response: str, index: int, reward: float) -> Rollout:
    prompt = [BOS, *(FIRST + CHARACTERS.index(character) for character in question)]
    tokens = [*prompt, *(FIRST + CHARACTERS.index(character) for character in response), EOS]
    sequence = Sequence(
        prompt=question,
        response=response,
        token_ids=tokens,
        num_prompt_tokens=len(prompt),
        finish_reason="stop",
        reward=reward,
        behavior_logprobs=[-0.1] * (len(tokens) - len(prompt)),
    )
    return Rollout(index, "ok", reward, [sequence])


def collected(buffer: Buffer) -> None:
    """Two answers to each of 32 questions, and which of them is better."""
    draw = random.Random(3)
    groups = []
    for number in range(32):
        digits = draw.sample("0123456789", 4)
        right, question = "".join(sorted(digits)), "".join(digits) + ">"
        wrong = right[1] + right[0] + right[2:]
        both = [answer(question, right, 0, 1.0), answer(question, wrong, 1, 0.0)]
        groups.append(Group(both, source="import", taskset="asked", task_key=str(number), payload={}))
    run = buffer.create_run(name="collect", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    with buffer.writer(run) as writer:
        writer.insert(*groups)
    buffer.sql(PAIRS)


class Runs:
    """Configurations on one embedded buffer."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.buffer = folder / "buffer"
        self.common: dict[str, Any] = {
            "buffer": {"uri": str(self.buffer)},
            "model": {"path": str(model)},
            "trainer": {
                "batch_groups": 8,
                "checkpoint_every": 1,
                "keep_checkpoints": 1,
                "autocast": "none",
                "learning_rate": 1e-3,
            },
        }

    def file(self, name: str, **sections: Any) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**self.common, "run": {"name": name, "seed": 1}, **sections}))
        return path

    def ppo(self, reward: str, steps: int) -> Path:
        return self.file(
            "ppo",
            steps=steps,
            algorithm={
                "name": "ppo",
                "group_size": 1,
                "critic": {"path": reward, "learning_rate": 1e-3, "warmup_steps": 1},
            },
            tasks=[
                {"name": "sort", "source": f"{EXAMPLE / 'tasks.py'}:numbers", "args": {"size": 100}, "split": "train"}
            ],
            explorer={
                "engine": "transformers",
                "engine_args": {"dtype": "float32", "context_length": 64},
                "max_tokens": 8,
                "reward": f"reward_model:{reward}",
                "reward_processes": 1,
            },
        )


@pytest.fixture
def runs(warm: Warm, tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path, warm.model)
    with rftdata.open(str(made.buffer)) as buffer:
        collected(buffer)
    yield made
    EmbeddedServer(made.buffer).stop()


def test_preferences_become_a_reward_model_whose_score_ppo_learns_from(rft: Rft, runs: Runs) -> None:
    selected = {"source": {"sql": "select pair_id from rft.v_pair where source = 'human'"}, "epochs": 2}
    shown = rft("run", runs.file("judge", algorithm={"name": "reward_model"}, sampling=selected), "--plain").stdout
    assert "pair accuracy" in shown
    (judge,) = rows(runs.buffer, "select checkpoint_id, uri from rft.checkpoint where deleted_at is null")
    refused = rft("check", runs.ppo(judge["uri"], steps=1), check=False)
    assert refused.returncode == 2 and "algorithm.critic.warmup_steps leaves no step for the policy" in refused.stderr
    shown = rft("run", runs.ppo(judge["uri"], steps=2), "--plain").stdout
    assert f"step 8 of judge: {judge['uri']}" in shown and "value loss" in shown and "explained variance" in shown
    # The reward of every rollout names the checkpoint whose score it is.
    (score,) = rows(
        runs.buffer,
        "select count(*) as num, count(distinct reward) as different, bool_and((reward_parts ->> 'reward_model')::float8 = reward_sampled) as same"
        " from rft.v_experience where run = 'ppo'",
    )
    assert score["num"] >= 16 and score["different"] > 4 and score["same"]
    models = rows(
        runs.buffer,
        "select used_as::text as used_as, checkpoint_id, trained_by, trainer_step from rft.v_run_model"
        " where run = 'ppo' and used_as <> 'policy' order by 1",
    )
    origin = {"checkpoint_id": judge["checkpoint_id"], "trained_by": "judge", "trainer_step": 8}
    assert models == [{"used_as": "critic", **origin}, {"used_as": "reward", **origin}]
    (one,) = rows(runs.buffer, "select min(experience_id) as id from rft.v_experience where run = 'ppo'")
    assert (
        "the score of the model of step 8 of run 'judge'" in rft("lineage", one["id"], "--buffer", runs.buffer).stdout
    )
    # A fork goes on with the critic of the checkpoint, and in a run that has ended its warm-up it does not begin again.
    rft("run", "--resume", "ppo", "--fork", "other", "--buffer", runs.buffer, "--set", "steps=3", "--plain")
    metrics = rows(
        runs.buffer,
        "select trainer_step as step, metrics ? 'grad_norm' as trains_policy, metrics ? 'value_loss' as trains_critic"
        " from rft.v_train_step join rft.run using (run_id) where name = 'other' order by 1",
    )
    assert [tuple(row.values()) for row in metrics] == [(1, False, True), (2, True, True), (3, True, True)]
    assert rows(runs.buffer, "select 1 from rft.v_run_model where run = 'other' and used_as = 'reward'")
