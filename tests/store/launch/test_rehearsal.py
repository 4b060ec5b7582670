"""`rft check --deep` tries workflow and rewards on a task of each set: errors that would fail every rollout are found before a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftcore.cli import run_command
from tests.support.command_line import call_rft
from tests.support.models import make_tiny_model

Write = Callable[..., Path]
Check = Callable[..., int]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), context_length=64)


@pytest.fixture
def write(tmp_path: Path, tiny: Path) -> Write:
    """Writes a small configuration with changes, and files beside it."""

    def written(changes: dict[str, Any], **files: str) -> Path:
        (tmp_path / "tasks.jsonl").write_text(
            "\n".join(json.dumps({"question": f"{n}+1=", "answer": str(n + 1)}) for n in range(3))
        )
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        config: dict[str, Any] = {
            "run": {"name": "tried"},
            "buffer": {"uri": str(tmp_path / "buffer")},
            "model": {"path": str(tiny)},
            "tasks": [{"name": "sums", "source": "tasks.jsonl"}],
            "algorithm": {"name": "grpo", "group_size": 2},
            "explorer": {"engine": "transformers", "reward": "exact_match", "max_tokens": 8},
            "trainer": {"batch_groups": 1},
            "steps": 1,
        }
        for section, values in changes.items():
            config[section] = {**config[section], **values} if isinstance(values, dict) else values
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        return tmp_path / "run.yaml"

    return written


@pytest.fixture
def check(write: Write) -> Check:
    """The exit code of `rft check --deep` on it."""
    return lambda changes, **files: run_command(["check", "--deep", str(write(changes, **files))])


def test_a_good_configuration_shows_the_reward_of_a_right_answer(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check({}) == 0
    assert "a rollout with a stand-in for the model gets the reward 1" in capsys.readouterr().err


@pytest.mark.parametrize("asynchronous", ["", "async "])
def test_what_a_reward_raises_is_shown_with_its_stack(
    asynchronous: str, check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    source = f"{asynchronous}def score(turn, task):\n    return float(turn.answer_text == task.answer)\n"
    assert check({"explorer": {"reward": "./reward.py:score"}}, reward=source) == 1
    error = capsys.readouterr().err
    assert re.search(r"a rollout of the task '\w+' of 'sums' fails with the answer '1' in place of the model's", error)
    assert (
        "AttributeError: 'Turn' object has no attribute 'answer_text'" in error
        and "(reward.py, line 2, in score)" in error
    )
    assert "line 2, in score\n    return float(turn.answer_text == task.answer)" in error, "the user's stack"
    assert "valid" not in error


def test_what_a_workflow_raises_is_shown_with_its_stack(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "async def flow(task, model, score):\n    turn = await model.chat(task.prompt)\n    return await score(turn)\n"
    )
    assert check({"explorer": {"workflow": "./flow.py:flow"}}, flow=source) == 1
    assert "(flow.py, line 2, in flow)" in capsys.readouterr().err


@pytest.mark.parametrize("body", ["while True: pass", "time.sleep(3600)"])
def test_a_reward_that_never_returns_is_named(body: str, check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    source = f"import time\ndef score(turn, task):\n    {body}\n"
    assert check({"explorer": {"reward": "./reward.py:score", "reward_timeout_s": 1}}, reward=source) == 1
    assert "(reward.py, line 3, in score)" in capsys.readouterr().err


def test_an_async_reward_in_c_code_that_never_returns_ends_the_check_with_its_stack(write: Write) -> None:
    source = "import time\nasync def score(turn, task):\n    time.sleep(3600)\n"
    config = write({"explorer": {"reward": "./reward.py:score", "block_timeout_s": 5}}, reward=source)
    done = call_rft("check", "--deep", config, check=False)
    assert done.returncode == 1
    assert "time.sleep(3600)" in done.stderr and "cannot be stopped" in done.stderr, done.stderr


def test_a_prompt_beyond_the_context_is_refused(
    check: Check, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "long.jsonl").write_text(
        "\n".join(json.dumps({"question": "1" * length, "answer": "1"}) for length in (5, 80))
    )
    assert check({"tasks": [{"name": "long", "source": "long.jsonl"}]}) == 2
    error = capsys.readouterr().err
    assert re.search(r"the prompt of the task '\w+' of 'long' does not fit the engine's context", error)
    assert "(got '85 tokens')" in error and "up to 63" in error


def test_max_tokens_beyond_the_context_is_refused(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert check({"explorer": {"max_tokens": 64}}) == 2
    assert "explorer.max_tokens leaves no room for a prompt" in capsys.readouterr().err
    assert check({"explorer": {"max_tokens": 8, "engine_args": {"context_length": 8}}}) == 2


def test_responses_that_the_context_cuts_short_are_reported(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    assert check({"explorer": {"max_tokens": 60}}) == 0
    assert re.search(
        r"responses to the longest prompt, of the task '\w+', are cut after 55 tokens", capsys.readouterr().err
    )


def test_settings_for_a_gpu_are_found_on_a_machine_without(check: Check, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert check({"explorer": {"engine_args": {"async_scheduling": True}}}) == 2
    assert "async_scheduling needs a GPU" in capsys.readouterr().err
    assert check({"explorer": {"engine_args": {"gpu_memory_utilization": 0.5}}}) == 0
    assert "gpu_memory_utilization has no effect" in capsys.readouterr().err


GIGPO = {"algorithm": {"name": "gigpo"}, "explorer": {"workflow": "./flow.py:walk"}}
WALK = """
async def walk(task, model, score):
    turn = await model.chat([{"role": "user", "content": task.prompt}])
    RECORD
    return await score(turn, task)
"""


def test_a_workflow_that_does_not_record_what_the_algorithm_reads_is_refused(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(GIGPO, flow=WALK.replace("RECORD", "turn.record(step_reward=1.0)")) == 2
    error = capsys.readouterr().err
    assert "gigpo reads state_hash" in error and "did not record them in a trial rollout" in error
    assert "turn.record(state=…)" in error
    assert check(GIGPO, flow=WALK.replace("RECORD", "turn.record(state=task.prompt)")) == 0


def test_a_workflow_of_several_turns_shows_what_they_are_stored_as(
    check: Check, capsys: pytest.CaptureFixture[str]
) -> None:
    flow = """
async def walk(task, model, score):
    chat = [{"role": "user", "content": task.prompt}]
    turn = await model.chat(chat)
    await model.chat([*chat, {"role": "assistant", "content": turn.response}, {"role": "user", "content": "sure?"}])
    return await score(await model.chat(chat), task)
"""
    assert check({"explorer": {"workflow": "./flow.py:walk"}}, flow=flow) == 0
    assert "its 3 turns are stored as 2 experiences (forks: 1 branch)" in capsys.readouterr().err
