"""A program that uses OpenAI's package is trained by `rft run`, and shown by `rft try`; nothing of it is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import rftdata
from rftdata.postgres.embedded import EmbeddedServer
from tests.support.command_line import EXAMPLE, Rft
from tests.support.models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

AGENT = """
from openai import OpenAI

def play(task):
    "Ask twice; the reward is the share of digits in both answers."
    client, chat, texts = OpenAI(), [{"role": "user", "content": task["prompt"]}], []
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=chat, temperature=0).choices[0].message
        texts.append(answer.content)
        chat += [answer.model_dump(), {"role": "user", "content": "1"}]
    both = "".join(texts)
    return {"reward": sum(map(str.isdigit, both)) / max(1, len(both)), "parts": {"characters": len(both)}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    make_tiny_model(tmp_path / "model", context_length=64, hidden_size=64, num_layers=1)
    (tmp_path / "agent.py").write_text(AGENT)
    settings: dict[str, Any] = {
        "run": {"name": "agents", "seed": 3},
        "buffer": {"uri": str(tmp_path / "buffer")},
        "model": {"path": str(tmp_path / "model")},
        "tasks": [{"name": "digits", "source": f"{EXAMPLE / 'tasks.py'}:numbers", "args": {"size": 50}}],
        "algorithm": {"name": "grpo", "group_size": 4},
        "explorer": {
            "engine": "transformers",
            "engine_args": {"dtype": "float32", "context_length": 64},
            "workflow": "agent",
            "workflow_args": {"function": "./agent.py:play"},
            "max_tokens": 8,
            "max_refill": 4,
            "max_environments": 4,
        },
        "trainer": {"batch_groups": 2, "autocast": "none", "learning_rate": 1.0e-3},
        "sampling": {"max_staleness": 9},
        "steps": 2,
    }
    file = tmp_path / "agents.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


def test_an_agent_is_shown_trained_and_ended(rft: Rft, config: Path, tmp_path: Path) -> None:
    shown = rft("try", config, "--tasks", "1")
    assert "program" in shown.stdout, shown
    rft("run", config, "--plain")
    buffer = tmp_path / "buffer"
    with rftdata.open(str(buffer)) as opened:
        steps = opened.sql("select outcome::text as outcome from rft.v_train_step").to_pylist()
        assert [step["outcome"] for step in steps] == ["trained", "trained"]
        rollouts = opened.sql(
            "select outcome::text as outcome, error from rft.rollout where outcome <> 'cancelled'"
        ).to_pylist()
        assert {(each["outcome"], each["error"]) for each in rollouts} == {("ok", None)}
        experiences = opened.sql("select num_turns, metrics, reward_parts from rft.v_experience").to_pylist()
        assert {each["num_turns"] for each in experiences} == {2}
        assert all(each["metrics"]["requested_temperature"] == 0 for each in experiences)
        assert all({"program", "characters"} == set(each["reward_parts"]) for each in experiences)
    EmbeddedServer(buffer).stop()
    left = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [command for command in left if "rftcore.programs" in command and str(tmp_path) in command]
