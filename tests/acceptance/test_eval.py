"""`rft eval`: several answers to each question of any taskset, by any model; killed, resumed with nothing asked twice, and compared."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from rftdata.errors import RftError
from tests.support.command_line import call_rft, rft_environment, rows
from tests.support.models import make_tiny_model
from tests.support.preloaded import Preloaded
from tests.support.waiting import wait_until

FLOW = """
import asyncio
from pathlib import Path

HERE = Path(__file__).parent

async def flow(task, model, score):
    with (HERE / "asked").open("a") as file:
        file.write(f"{task.metadata['number']} {task.rollout_index}\\n")
    first = await model.chat([{"role": "user", "content": task.prompt}])
    first.record(step_reward=0.25)
    while task.metadata["number"] >= 3 and not (HERE / "gate").exists():
        await asyncio.sleep(0.1)
    chat = [*first.messages, {"role": "assistant", "content": first.response}, {"role": "user", "content": "sure?"}]
    second = await model.chat(chat)
    second.record(step_reward=0.0)
    return await score(second, task)
"""
REWARD = """
def score(turn, task):
    return float(task.metadata["number"] % 2)

def broken(turn, task):
    raise KeyError("no judge")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("evaluated")
    numbers = [{"question": f"{n}+1=", "answer": str(n + 1), "number": n} for n in range(5)]
    (folder / "tasks.jsonl").write_text("\n".join(map(json.dumps, numbers)))
    (folder / "more.jsonl").write_text("\n".join(map(json.dumps, numbers[1:4])))
    (folder / "flow.py").write_text(FLOW)
    (folder / "reward.py").write_text(REWARD)
    make_tiny_model(folder / "model", context_length=64)
    make_tiny_model(folder / "trained", context_length=64)
    settings: dict[str, Any] = {
        "run": {"name": "quiz"},
        "buffer": {"uri": str(folder / "buffer")},
        "model": {"path": "./model"},
        "tasks": [{"name": "train", "source": "tasks.jsonl"}],
        "eval": {"every": 20, "tasks": [{"name": "held-out", "source": "tasks.jsonl"}]},
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
    return folder


def test_a_killed_evaluation_is_resumed_and_asks_only_for_what_is_missing(folder: Path) -> None:
    buffer = folder / "buffer"
    stored = "select count(*) as n from rft.evaluation_answer"
    with Preloaded(
        ["eval", folder / "run.yaml", "--answers", "3"],
        env=rft_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        wait_until(lambda: (buffer / "postgres").is_dir() and process.poll() is None and _count(buffer, stored) == 9)
        process.kill()
    (folder / "gate").write_text("")
    call_rft("run", "--resume", "quiz-eval", "--buffer", buffer)
    asked = Counter((folder / "asked").read_text().split("\n")[:-1])
    assert all(asked[f"{number} {index}"] == 1 for number in range(3) for index in range(3)), "stored before the kill"
    answers = rows(
        buffer,
        "select task_key, answer_index, reward, num_turns, messages::text as messages, chats -> 0 -> 'turns' -> 0 ->> 'step_reward' as step_reward,"
        " checksum from rft.v_evaluation_answer where run = 'quiz-eval'",
    )
    assert len({(row["task_key"], row["answer_index"]) for row in answers}) == len(answers) == 15
    assert {(row["num_turns"], row["step_reward"]) for row in answers} == {(2, "0.25")}
    assert all(len(json.loads(row["messages"])) == 4 for row in answers)
    assert len({row["checksum"] for row in answers}) == 1 and len(answers[0]["checksum"]) == 16
    report = json.loads(call_rft("report", "quiz-eval", "--json", "--buffer", buffer).stdout)
    (several,) = report["several_answers"]
    assert several["pass_at"] == {k: {"value": 0.4, "standard_error": pytest.approx(0.2449, abs=1e-4)} for k in "123"}
    assert report["status"] == "finished" and several["checksum"] == answers[0]["checksum"]


def test_two_models_are_compared_on_the_questions_that_both_answered(folder: Path) -> None:
    (folder / "gate").write_text("")
    for model, name in (("model", "before"), ("trained", "after")):
        tasks = ["--tasks", folder / "more.jsonl", "--decoding", "greedy"]
        call_rft("eval", folder / "run.yaml", "--model", folder / model, "--name", name, *tasks)
    compared = json.loads(call_rft("report", "before", "after", "--json", "--buffer", folder / "buffer").stdout)
    (gain,) = compared["comparison"]
    assert (gain["taskset"], gain["num_questions"], gain["difference"]) == ("more", 3, 0.0)
    assert (
        "of 3 questions, after is better on 0"
        in call_rft("report", "before", "after", "--buffer", folder / "buffer").stdout
    )


def test_an_evaluation_of_which_all_answers_fail_ends_with_an_error(folder: Path) -> None:
    (folder / "gate").write_text("")
    done = call_rft(
        "eval", folder / "run.yaml", "--name", "broken", "--set", "explorer.reward=./reward.py:broken", check=False
    )
    assert done.returncode == 1 and "KeyError: 'no judge'" in done.stderr, done.stderr
    for arguments, what in (
        (["--tasks", "nowhere"], "unknown taskset (got 'nowhere'); allowed: train, held-out"),
        (["--answers", "2", "--decoding", "greedy"], "greedy answers to a question are all equal"),
        (["--checkpoint", "quiz@3"], "quiz"),
        (["--checkpoint", "before@3"], "has no such checkpoint"),
    ):
        refused = call_rft("eval", folder / "run.yaml", *arguments, check=False)
        assert refused.returncode == 2 and what in refused.stderr, refused.stderr


def _count(buffer: Path, query: str) -> int:
    try:
        return int(rows(buffer, query)[0]["n"])
    except RftError:  # the buffer is being created
        return 0
