"""Environments of the real package verifiers, unchanged, in a virtual environment of their own: rewards, tools, errors and the process they share."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from rftcore.engines.base import Decoding
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.programs.hosts import ProgramHosts
from rftcore.programs.verifiers import verifiers
from rftcore.tools.calls import ToolCall
from rftcore.tools.formats import FORMATS
from rftcore.workflows.limits import NO_LIMITS, Limits
from rftcore.workflows.task import Score, Task, Turn
from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError
from rftdata.experience import Rollout
from rftdata.tasks.rows import read_tasks
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_session import Spy, check

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent / "verifiers_environments"
INSTALL_S = 480


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a virtual environment with verifiers; RFT_VERIFIERS_PYTHON names one that is there."""
    given = os.environ.get("RFT_VERIFIERS_PYTHON")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("verifiers")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=INSTALL_S)
    command = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "verifiers>=0.4,<0.5", "uv"]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if installed.returncode != 0:
        pytest.skip(f"verifiers cannot be installed here (no network?): {installed.stderr.strip()[-300:]}")
    return folder / "bin/python"


async def no_reward(turn: Turn, task: Task) -> Score:
    return Score(0.0)


def tasks(environment: str, python: Path, **args: Any) -> list[Task]:
    """The tasks of an environment as the buffer stores them."""
    config = TasksetConfig(
        name=environment, source=f"verifiers:{environment}", args={"python": str(python), "environment_args": args}
    )
    return [
        Task.from_row({"task_id": number, "taskset": environment, **row})
        for number, row in enumerate(read_tasks(config, FOLDER))
    ]


def play(
    task: Task, python: Path, *answers: str, times: int = 1, limits: Limits = NO_LIMITS, **args: Any
) -> tuple[list[Rollout], Spy, int]:
    """Rollouts of a task at the same time; also the number of processes of verifiers."""
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer(*answers)

    async def run() -> tuple[list[Rollout], int]:
        hosts = ProgramHosts(FOLDER)
        runner = RolloutRunner(
            engine=spy,  # type: ignore[arg-type]
            workflow=verifiers,
            workflow_args={"environment": task.taskset, "python": str(python), **args},
            scorer=no_reward,
            timeout_s=300.0,
            limits=limits,
            source="explorer",
            slots=RolloutSlots(8, 8),
            programs=hosts,
        )
        try:
            found = await asyncio.gather(*(runner.rollout(task, index, Decoding()) for index in range(times)))
            return list(found), sum("verifiers_program.py" in line for line in _commands())
        finally:
            await hosts.close_all()

    found, num_processes = asyncio.run(run())
    assert not any("verifiers_program.py" in line for line in _commands()), "nothing outlives the explorer"
    return found, spy, num_processes


def _commands() -> list[str]:
    """The command lines of the processes below this one."""
    children = psutil.Process().children(recursive=True)
    return [" ".join(child.cmdline()[:3]) for child in children if child.is_running() and child.status() != "zombie"]


def test_rewards_of_a_single_turn_become_ours_and_one_process_serves_many_rollouts(python: Path) -> None:
    all_tasks = tasks("sums_once", python, taskset={"num_tasks": 3})
    assert [task.prompt for task in all_tasks] == ["What is 0 + 1?", "What is 1 + 1?", "What is 2 + 1?"]
    found, spy, num_processes = play(all_tasks[1], python, *["It is 2"] * 3, times=3)
    assert num_processes == 1
    for rollout in found:
        assert (rollout.outcome, rollout.reward, rollout.error) == ("ok", 2.5, None)
        [sequence] = rollout.sequences
        assert sequence.reward_parts == {"right": 1.0, "short": 1.0}
        assert sequence.metrics == {"verifiers.length": 7.0}
        assert "Be brief." in sequence.prompt
    sampled = {(tuple(prompt), tuple(each.token_ids), tuple(each.logprobs)) for prompt, each in spy.received}
    stored = set()
    for rollout in found:
        [s] = rollout.sequences
        prompt, response = s.token_ids[: s.num_prompt_tokens], s.token_ids[s.num_prompt_tokens :]
        stored.add((tuple(prompt), tuple(response), tuple(s.behavior_logprobs or ())))
    assert stored == sampled


def test_tools_over_several_turns_are_one_sequence(python: Path) -> None:
    [task] = tasks("sums_with_tools", python)
    call = FORMATS["hermes"].render([ToolCall("add_toolset_add", {"a": 17, "b": 25})], "")
    [rollout], spy, _ = play(task, python, call, "It is 42")
    assert (rollout.reward, rollout.error) == (1.0, None)
    [sequence] = rollout.sequences
    assert sequence.num_turns == 2
    assert "<tool_response>\n42\n</tool_response>" in sequence.response
    check(spy, [sequence])


def test_a_limit_of_the_rollout_keeps_it_and_an_error_has_verifiers_own_stack(python: Path) -> None:
    [task] = tasks("sums_with_tools", python)
    call = FORMATS["hermes"].render([ToolCall("add_toolset_add", {"a": 17, "b": 25})], "")
    [rollout], *_ = play(task, python, call, limits=Limits(max_turns=1))
    assert "max_turns" in (rollout.error or "") or rollout.stop_reason == "max_turns"
    assert len(rollout.sequences) == 1
    [rollout], *_ = play(tasks("sums_that_fail", python)[0], python, "1")
    assert rollout.outcome == "failed"
    assert "the rubric is broken" in (rollout.error or "")


@pytest.mark.parametrize("learns", [True, False])
def test_two_agents_of_an_episode_are_roles_with_rewards_of_their_own(python: Path, learns: bool) -> None:
    [task] = tasks("sums_by_two", python)
    [rollout], spy, _ = play(task, python, "It is 3", "no", environment_args={"checker_learns": learns})
    assert (rollout.outcome, rollout.reward, rollout.error) == ("ok", 0.0, None)
    solver, checker = rollout.sequences
    assert [(each.role, each.fork, each.num_turns) for each in (solver, checker)] == [
        ("solver", None, 1),
        ("checker", None, 1),
    ]
    assert checker.reward == (1.0 if learns else 0.0)
    assert "Is this right? It is 3" in checker.prompt
    assert checker.loss_mask is None if learns else not any(checker.loss_mask or [True])
    if learns:
        check(spy, rollout.sequences)


def test_an_environment_that_does_not_exist_ends_the_run(python: Path) -> None:
    task = Task(1, "no_such_environment", "one", "a", None, {"verifiers": {"prompt": "a"}})
    with pytest.raises(ConfigError, match=r"(?s)does not load.*no_such_environment"):
        play(task, python)
