"""The workflow `agent`: a program that uses OpenAI's own package is a rollout, and ends with it."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rftcore.engines.base import Decoding, Generation
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.programs.agent import agent, check_args
from rftcore.programs.hosts import ProgramHosts
from rftcore.workflows.limits import NO_LIMITS, Limits
from rftcore.workflows.task import Score, Task, Turn
from rftdata.errors import ConfigError, EngineStoppedError, PluginError
from rftdata.experience import Rollout
from rftdata.processes import process_lives
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_session import Spy, check

FOLDER = Path(__file__).parent
TASK = Task(1, "sums", "one", "What is 17 + 25?", "42", seed=7)
CURL = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
answer = json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))
print("thinking")
"""


async def no_reward(turn: Turn, task: Task) -> Score:
    return Score(0.0)


async def right(turn: Turn, task: Task) -> Score:
    return Score(float("42" in turn.response), {"right": float("42" in turn.response)})


def run(
    *answers: str,
    task: Task = TASK,
    scorer: Any = no_reward,
    limits: Limits = NO_LIMITS,
    timeout_s: float = 60.0,
    spy: Spy | None = None,
    close_s: float = 30.0,
    **args: Any,
) -> tuple[Rollout, Spy, list[str]]:
    """A rollout as an explorer runs it."""
    spy = spy or Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer(*answers)
    stacks: list[str] = []

    async def rollout() -> Rollout:
        hosts = ProgramHosts(FOLDER)
        runner = RolloutRunner(
            engine=spy,  # type: ignore[arg-type]
            workflow=agent,
            workflow_args=args,
            scorer=scorer,
            timeout_s=timeout_s,
            close_s=close_s,
            limits=limits,
            source="explorer",
            slots=RolloutSlots(4, 4),
            on_failure=lambda _, stack: stacks.append(stack),
            programs=hosts,
        )
        try:
            return await runner.rollout(task, 0, Decoding())
        finally:
            await hosts.close_all()

    return asyncio.run(rollout()), spy, stacks


def test_a_function_with_openais_client_is_recorded_token_for_token() -> None:
    found, spy, _ = run("the answer is 41", "42", function="./agents.py:ask")
    assert (found.outcome, found.reward, found.error) == ("ok", 1.0, None)
    [sequence] = found.sequences
    assert sequence.num_turns == 2
    assert sequence.reward_parts == {"program": 1.0}
    check(spy, [sequence])


def test_an_async_function_returns_parts_and_rewards_of_functions_are_added() -> None:
    found, *_ = run("42", function="./agents.py:ask_async", scorer=right)
    assert found.reward == 1.5
    assert found.sequences[0].reward_parts == {"program": 0.5, "seed": 7.0, "same": 1.0, "right": 1.0}


@pytest.mark.parametrize(
    ("last", "reward"),
    [
        ('print(json.dumps({"reward": 0.25}))', 0.25),
        ('open(os.environ["RFT_RESULT"], "w").write(json.dumps({"reward": 2, "parts": {"a": 1}}))', 2.0),
    ],
)
def test_a_command_reports_by_its_last_line_or_its_file(last: str, reward: float) -> None:
    found, *_ = run("42", command=[sys.executable, "-c", CURL + last])
    assert (found.reward, found.error) == (reward, None)


def test_a_command_without_a_report_is_scored_by_the_reward_functions() -> None:
    command = [sys.executable, "-c", CURL]
    assert run("42", command=command, scorer=right)[0].reward == 1.0
    assert "reported no reward" in (run("42", command=command)[0].error or "")


def test_the_error_of_a_program_has_its_own_stack() -> None:
    found, _, [stack] = run("a", "b", function="./agents.py:fail")
    assert found.outcome == "failed"
    assert (found.error or "").startswith("KeyError: 'lost' (agents.py, line ")
    assert "raise KeyError" in stack
    assert "function.py" not in stack
    assert len(found.sequences) == 1, "its turns are kept"
    found, _, [stack] = run("a", command=[sys.executable, "-c", CURL + "1 / 0"])
    assert found.error == "the program ended with exit code 1: ZeroDivisionError: division by zero"
    assert "Traceback" in stack


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ('print(json.dumps({"reward": "much"}))', "no finite number"),
        ('print(json.dumps({"reward": 1, "extra": 1}))', "is not valid"),
        ('open(os.environ["RFT_RESULT"], "w").write("{")', "is no JSON"),
    ],
)
def test_an_invalid_result_is_an_outcome(last: str, error: str) -> None:
    found, *_ = run("42", command=[sys.executable, "-c", CURL + last])
    assert found.outcome == "failed"
    assert error in (found.error or "")


def test_a_program_that_never_asks_is_an_outcome() -> None:
    found, *_ = run(command=[sys.executable, "-c", "print(1)"])
    assert "before the model's first answer" in (found.error or "")


def test_a_limit_ends_a_program_that_does_not_end_and_keeps_the_rollout() -> None:
    found, *_ = run(
        "42", "42", function="./agents.py:loop_for_ever", scorer=right, limits=Limits(max_turns=2), end_s=0.5
    )
    assert (found.outcome, found.stop_reason, found.reward) == ("ok", "max_turns", 1.0)
    assert len(found.sequences) == 2


def test_after_a_limit_a_reward_that_was_reported_counts_however_the_program_ends() -> None:
    task = replace(TASK, metadata={"end": "1.0"})
    found, *_ = run("a", "b", function="./agents.py:keep_a_reward", task=task)
    assert found.error == "the program ended with exit code 3"
    endless = replace(TASK, metadata={"end": "9"})
    code = f"import sys, json; sys.path.insert(0, {str(FOLDER)!r}); import agents; agents.keep_a_reward(json.load(sys.stdin))"
    command = [sys.executable, "-c", code]
    found, *_ = run("a", "b", command=command, task=endless, limits=Limits(max_turns=2))
    assert (found.outcome, found.stop_reason, found.reward) == ("ok", "max_turns", 1.0)


def test_a_program_that_takes_too_long_is_killed() -> None:
    begun = time.monotonic()
    found, *_ = run("42", function="./agents.py:wait", timeout_s=5.0)
    assert found.outcome == "timeout"
    assert time.monotonic() - begun < 30


def test_nothing_that_a_program_has_started_outlives_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    found, *_ = run("42", function="./agents.py:leave_processes", task=replace(TASK, metadata={"file": str(file)}))
    assert found.error is None
    assert not process_lives(int(file.read_text()))


def test_a_program_may_print_without_limit() -> None:
    assert run("42", function="./agents.py:print_much")[0].error is None


class Stopped(Spy):
    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        raise EngineStoppedError("it hangs")


def test_an_engine_that_stopped_ends_the_run() -> None:
    with pytest.raises(EngineStoppedError):
        run(function="./agents.py:loop_for_ever", spy=Stopped(chat_tokenizer("qwen2_5")))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, "needs a program"),
        ({"command": ["a"], "function": "b"}, "needs a program"),
        ({"command": "echo 1"}, "list of texts"),
        ({"command": ["no-such-program"]}, "does not exist"),
        ({"command": ["./agents.py"]}, "is not executable"),
        ({"command": ["sh"], "sampling": "mine"}, "sampling"),
        ({"command": ["sh"], "env": {"A": 1}}, "env"),
        ({"command": ["sh"], "format": "xml"}, "format"),
        ({"command": ["sh"], "end_s": -1}, "end_s"),
    ],
)
def test_settings_with_which_no_rollout_could_run_are_refused(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_args(FOLDER, **args)


def test_a_function_that_does_not_load_is_refused() -> None:
    with pytest.raises(PluginError):
        check_args(FOLDER, function="./agents.py:missing")
    check_args(FOLDER, function="./agents.py:ask")
    check_args(FOLDER, command=[os.path.basename(sys.executable)])
