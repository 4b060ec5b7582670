"""`rft try`: a workflow on a few tasks, without a run; errors with the user's own stack, and nothing stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.cli import run_command
from tests.support.models import make_tiny_model

FLOW = """
async def flow(task, model, score):
    print("a line of the workflow")
    first = await model.chat([{"role": "user", "content": task.prompt}])
    first.record(step_reward=0.25)
    chat = [*first.messages, {"role": "assistant", "content": first.response}, {"role": "user", "content": "sure?"}]
    second = await model.chat(chat)
    second.record(step_reward=0.0)
    return await score(second, task)
"""
REWARD = """
def score(turn, task):
    if task.answer == "2":
        raise ValueError("no \\x1b[31m verdict")
    return {"is_right": float(turn.response == task.answer), "bonus": 0.5}
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration with two tasksets, whose second task makes the reward fail."""
    folder = tmp_path_factory.mktemp("tried")
    rows = [{"question": f"{n}+1=", "answer": str(n + 1)} for n in range(3)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "flow.py").write_text(FLOW)
    (folder / "reward.py").write_text(REWARD)
    settings: dict[str, Any] = {
        "run": {"name": "tried"},
        "buffer": {"uri": str(folder / "buffer")},
        "model": {"path": str(make_tiny_model(folder / "model", context_length=64))},
        "tasks": [{"name": "sums", "source": "tasks.jsonl"}],
        "eval": {"every": 20, "tasks": [{"name": "held-out", "source": "tasks.jsonl", "limit": 1}]},
        "algorithm": {"name": "grpo", "group_size": 2},
        "explorer": {
            "engine": "transformers",
            "workflow": "./flow.py:flow",
            "reward": "./reward.py:score",
            "max_tokens": 4,
        },
        "trainer": {"batch_groups": 1},
        "steps": 1,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    return folder / "run.yaml"


def test_rollouts_of_the_engine_are_shown_and_failures_have_the_users_stack(
    config: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["try", str(config), "--rollouts", "2"]) == 1
    out, err = capfd.readouterr()
    assert out.count("task sums/") == 4 and "rollout 2 of 2" in out and "2 of 4 rollouts failed" in err
    assert "┃ assistant · turn 0 · step reward 0.25" in out and "parts: is_right 0, bonus 0.5" in out
    assert "error: ValueError: no \\x1b[31m verdict (reward.py, line 4, in score)" in out
    assert 'raise ValueError("no' in out and "\x1b" not in out
    assert "a line of the workflow" in err and "a line of the workflow" not in out
    assert not (config.parent / "buffer").exists()


def test_the_stand_in_needs_no_engine_and_json_has_the_same(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["try", str(config), "--rehearse", "--taskset", "held-out", "--json", "--tasks", "5"]
    assert run_command(arguments) == 0
    [tried] = json.loads(capfd.readouterr().out)
    assert tried["taskset"] == "held-out" and tried["reward"] == 1.5 and tried["outcome"] == "ok"
    [sequence] = tried["sequences"]
    assert sequence["step_reward"] == [0.25, 0.0] and len(sequence["turns"]) == 2
    assert run_command(["try", str(config), "--taskset", "held"]) == 2
    assert "unknown taskset (got 'held'); allowed: sums, held-out" in capfd.readouterr().err
    assert not (config.parent / "buffer").exists()
