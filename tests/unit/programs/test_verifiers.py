"""The workflow and the source `verifiers` where the package is missing; tests/acceptance/test_verifiers.py has it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rftcore.engines.base import Decoding
from rftcore.programs.verifiers import _score, check_args, check_task
from rftcore.programs.verifiers_host import VerifiersHost, VerifiersSettings
from rftcore.workflows.limits import LimitReachedError, Limits
from rftcore.workflows.task import Model, Score, Task, Turn
from rftdata.config import TasksetConfig
from rftdata.errors import ConfigError, RftError, TaskSourceError
from rftdata.tasks.rows import read_tasks
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_session import Spy

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"python": "no/python"}, "interpreter of its virtual environment"),
        ({"python": "."}, "interpreter"),
        ({"python": sys.executable, "sampling": "mine"}, "sampling"),
        ({"python": sys.executable, "environment_args": [1]}, "environment_args"),
        ({"python": sys.executable, "start_s": 0}, "start_s"),
    ],
)
def test_settings_with_which_no_episode_could_run_are_refused(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_args(HERE, environment="sums", **args)


def test_a_task_of_another_source_is_refused() -> None:
    with pytest.raises(RftError, match=r"has no data of verifiers.*verifiers:ENVIRONMENT"):
        check_task(Task(1, "sums", "one", "1 + 1?", "2"))
    check_task(Task(1, "sums", "one", "1 + 1?", None, {"verifiers": {"prompt": "1 + 1?"}}))


def test_an_interpreter_without_verifiers_is_an_error_of_the_configuration() -> None:
    settings = VerifiersSettings(Path(sys.executable), "sums", {}, HERE, 60.0)
    with pytest.raises(ConfigError, match=r"(?s)does not load.*No module named 'verifiers'.*virtual environment"):
        asyncio.run(VerifiersHost.start(settings))


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({}, "python, the interpreter"),
        ({"python": sys.executable, "size": 1}, "args of the taskset"),
        ({"python": "no/python"}, "interpreter of its virtual environment"),
        ({"python": sys.executable}, "No module named 'verifiers'"),
    ],
)
def test_tasks_that_cannot_be_read_are_refused(args: dict[str, Any], text: str) -> None:
    with pytest.raises(TaskSourceError, match=text):
        list(read_tasks(TasksetConfig(name="sums", source="verifiers:sums", args=args), HERE))


def trace(agent: str, reward: float = 0.0, *, trainable: bool = True, errors: tuple[str, ...] = ()) -> dict[str, Any]:
    found = [{"type": "ModelError", "message": each, "stack": ""} for each in errors]
    return {
        "agent": agent,
        "trainable": trainable,
        "reward": reward,
        "rewards": {},
        "metrics": {"m": 1.0},
        "errors": found,
    }


def scored(
    traces: list[dict[str, Any]],
    *answering: str | None,
    roles: tuple[str, ...] = (),
    rewards: bool = True,
    **given: Any,
) -> tuple[Score, list[tuple[str | None, float, bool]]]:
    """The score of an episode whose agents answered in turn; and of each answer its role, its reward, and whether it is trained."""
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer(*(f"of {role}" for role in answering))
    model = Model(spy, Decoding(), **given)

    async def score(turn: Turn, task: Task) -> Score:
        reward = float(len(turn.response))
        return Score(reward, {"length": reward}) if rewards else Score(0.0)

    async def run() -> Score:
        for place, role in enumerate(answering):
            await model.chat([{"role": "user", "content": str(place)}], role=role)
        if given:
            with pytest.raises(LimitReachedError):
                await model.chat([{"role": "user", "content": "more"}])
        return await _score(Task(1, "t", "k", "p", None), model, score, {"errors": [], "traces": traces}, roles)

    found = asyncio.run(run())
    sequences = model.sequences()
    is_trained = [each.loss_mask is None or any(each.loss_mask) for each in sequences]
    return found, [(s.role, found.of_role(s.role), t) for s, t in zip(sequences, is_trained, strict=True)]


def test_a_limit_trains_the_trainable_agents_alone_each_with_its_own_reward() -> None:
    traces = [trace("ab", errors=("limit",)), trace("user", trainable=False), trace("abcd", reward=9.0)]
    given: dict[str, Any] = {"roles": ("ab", "user", "abcd"), "limits": Limits(max_turns=4)}
    found, kept = scored(traces, "ab", "user", "abcd", None, **given)
    assert (found.reward, found.parts) == (5.0, {"ab.length": 5.0, "abcd.length": 7.0})
    assert kept == [("ab", 5.0, True), ("user", 5.0, False), ("abcd", 7.0, True), (None, 5.0, False)]
    for others in ({"rewards": False}, {"roles": ()}):
        with pytest.raises(LimitReachedError):
            scored(traces if "rewards" in others else traces[:1], "ab", "user", "abcd", None, **{**given, **others})


def test_answers_of_no_role_are_not_trained() -> None:
    traces = [trace("ab", 1.0), trace("user", 0.5), trace("judge", 0.1, trainable=False)]
    assert scored(traces, "ab", "user", None, roles=("ab", "user"))[1] == [
        ("ab", 6.0, True),
        ("user", 7.5, True),
        (None, 6.0, False),
    ]


@pytest.mark.parametrize(
    ("traces", "roles", "says"),
    [
        ([trace("agent", trainable=False)], (), "no agent .* is trainable"),
        ([trace("agent", trainable=False)], ("agent",), "no agent .* is trainable"),
        ([trace("a"), trace("b")], (), "declares one agent"),
        ([trace("a"), trace("a")], ("a",), "ran several times"),
    ],
)
def test_an_episode_that_cannot_be_trained_is_an_error(
    traces: list[dict[str, Any]], roles: tuple[str, ...], says: str
) -> None:
    with pytest.raises(RftError, match=says):
        scored(traces, roles[0] if roles else None, roles=roles)
