"""Greedy baselines, states and rewards of turns, rewards of tokens and expert answers, from `rft run` to the weights: three stages, one buffer."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import rftdata
from rftcore.reporting.report import build_report
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, Rft, rft_environment, rows
from tests.support.models import make_tiny_model
from tests.support.preloaded import Preloaded
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FLOW = """
import json
from rftcore.workflows.task import Score, TokenRewards

def share(text):
    return sum(character.isdigit() for character in text) / max(1, len(text))

async def turns(task, model, score, *, expert=False):
    "Asks twice; the state is what the model saw, and each turn has a reward of its own. An expert answers, too."
    messages, total = [{"role": "user", "content": task.prompt}], 0.0
    for _ in range(2):
        turn = await model.chat(messages)
        turn.record(state=json.dumps(messages), step_reward=share(turn.response))
        await score(turn, task)
        total += share(turn.response)
        messages = [*messages, {"role": "assistant", "content": turn.response}, {"role": "user", "content": task.prompt}]
    if expert:
        model.write(messages[:1], task.answer)
    return Score(total)

def digits(turn, task):
    return share(turn.response)

def by_token(turn, task):
    text = turn.response.ljust(len(turn.response_token_ids))
    return TokenRewards([0.1 * character.isdigit() for character in text])
"""


def stage(name: str, steps: int, explorer: dict[str, Any], **algorithm: Any) -> dict[str, Any]:
    return {
        "name": name,
        "steps": steps,
        "algorithm": {"name": name, "group_size": 4, **algorithm},
        "explorer": explorer,
    }


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model", context_length=64, hidden_size=64, num_layers=1)
    (tmp_path / "flow.py").write_text(FLOW)
    config = {
        "run": {"name": "inputs", "seed": 3},
        "buffer": {"uri": str(tmp_path / "buffer")},
        "model": {"path": str(tmp_path / "model")},
        "trainer": {"batch_groups": 4, "checkpoint_every": 1, "autocast": "none", "learning_rate": 1.0e-3},
        "explorer": {
            "engine": "transformers",
            "engine_args": {"dtype": "float32", "context_length": 64},
            "max_tokens": 8,
            "max_refill": 4,
        },
        "sampling": {"max_staleness": 9},
        "tasks": [
            {"name": "digits", "source": f"{EXAMPLE / 'tasks.py'}:numbers", "args": {"size": 100}, "split": "train"}
        ],
        "stages": [
            stage("remax", 3, {"reward": ["./flow.py:digits", "./flow.py:by_token"]}),
            stage("gigpo", 1, {"workflow": "./flow.py:turns"}),
            stage(
                "step_wise_grpo",
                1,
                {"workflow": "./flow.py:turns", "workflow_args": {"expert": True}, "reward": "./flow.py:by_token"},
                expert={"loss": {"name": "sft", "weight": "phi"}, "coef": 0.5},
            ),
        ],
    }
    file = tmp_path / "inputs.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def kill_during_the_first_stage(chain: Path, buffer: Path) -> None:
    """Start the chain, and kill its explorer after the first step."""
    process = Preloaded(
        ["run", chain, "--plain"], env=rft_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    wait_until(
        lambda: (buffer / "host").exists() and rows(buffer, "select 1 from rft.train_step"),
        "the first step",
        process=process,
        pause_s=0.1,
    )
    for worker in rows(buffer, "select pid from rft.worker where stopped_at is null"):
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker["pid"], signal.SIGKILL)
    process.kill()
    process.wait()


def test_inputs_come_from_rollouts_and_are_trained_on(rft: Rft, chain: Path, tmp_path: Path) -> None:
    buffer = tmp_path / "buffer"
    kill_during_the_first_stage(chain, buffer)
    rft("run", chain, "--plain", "--resume")
    with rftdata.open(str(buffer)) as opened:
        steps = opened.sql(
            "select run, outcome::text as outcome, metrics from rft.v_train_step order by run_id, trainer_step"
        ).to_pylist()
        remax, gigpo, turns = "inputs-remax", "inputs-gigpo", "inputs-step_wise_grpo"
        assert [(step["run"], step["outcome"]) for step in steps] == [
            (run, "trained") for run in (remax, remax, remax, gigpo, turns)
        ]
        metrics = {step["run"]: step["metrics"] for step in steps}
        assert all(math.isfinite(step["metrics"]["loss"]) and step["metrics"]["grad_norm"] > 0 for step in steps)

        # One greedy rollout for each group that was sampled, and none among the experiences.
        groups = opened.sql(
            "select run, baseline_reward, num_ok from rft.v_group where state in ('drawn', 'ready', 'dropped', 'closed')"
        ).to_pylist()
        assert all(
            (group["baseline_reward"] is not None) == (group["run"] == remax) and group["num_ok"] == 4
            for group in groups
        )
        answers = opened.sql(
            "select distinct outcome::text as outcome, num_turns, policy_version_min > 0 as known from rft.group_baseline"
        )
        assert answers.to_pylist() == [{"outcome": "ok", "num_turns": 1, "known": True}]
        sizes = opened.sql(
            "select distinct run, count(*) as n from rft.v_experience group by run, group_id"
        ).to_pylist()
        assert {row["run"]: row["n"] for row in sizes} == {remax: 4, gigpo: 4, turns: 8}

        # The first turns of a group begin in one state.
        assert metrics[gigpo]["states_shared"] >= 0.5
        first, second = (
            opened.query(
                "select turn, count(distinct state_hash[turn]) as states, count(distinct group_id) as groups,"
                f" avg(step_reward[turn]) as reward from experience, range(1, 3) t(turn) where run = '{gigpo}' group by 1 order by 1",
            )
            .read_all()
            .to_pylist()
        )
        assert first["states"] == first["groups"] < second["states"] and 0 < first["reward"] < 1
        # Rewards of tokens are as long as the sequence, and their sum is a part of the reward.
        [found] = (
            opened.query(
                "select max(abs(list_sum(token_rewards) - cast(json_extract(reward_parts, '$.by_token') as double))) as difference,"
                f" max(abs(len(token_rewards) - len(token_ids))) as longer, max(list_sum(token_rewards)) as most from experience where run = '{remax}'",
            )
            .read_all()
            .to_pylist()
        )
        assert found["difference"] < 1e-6 and found["longer"] == 0 and found["most"] > 0
        # A third of the last stage's experiences are an expert's.
        assert metrics[turns]["expert_sequences"] == 16 and metrics[turns]["expert_loss"] > 0
        assert build_report(opened, turns).warnings == []
    EmbeddedServer(buffer).stop()
