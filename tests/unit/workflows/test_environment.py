"""The workflow `environment`: what is recorded of an episode, and what an answer's action is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rftcore.engines.base import Decoding
from rftcore.explorer import rollouts
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.tools import ToolCall
from rftcore.tools.formats import FORMATS
from rftcore.workflows.environment import action_of, check_args, environment
from rftcore.workflows.limits import NO_LIMITS, Limits
from rftcore.workflows.task import Score, Task, Turn
from rftdata.errors import ConfigError
from rftdata.experience import Rollout
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.waiting import PATIENCE_S
from tests.unit.workflows.test_session import Spy, check

COUNTS = "tests.unit.workflows.counting_environment:Counts"
COUNTS_BY_TOOL = "tests.unit.workflows.counting_environment:CountsByTool"


async def length(turn: Turn, task: Task) -> Score:
    return Score(10.0, {"length": 10.0})


def played(spy: Spy, limits: Limits = NO_LIMITS, **args: Any) -> Rollout:
    runner = RolloutRunner(
        engine=spy,  # type: ignore[arg-type]
        workflow=environment,
        workflow_args={"environment": COUNTS, **args},
        scorer=length,
        timeout_s=2 * PATIENCE_S,
        limits=limits,
        source="explorer",
        slots=RolloutSlots(1, 1),
    )
    return asyncio.run(runner.rollout(Task(1, "t", "k", "p", None, seed=5), 0, Decoding()))


def test_an_episode_is_one_sequence_with_states_and_rewards_of_its_steps() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer("1", " 2\n", "3")
    rollout = played(spy, system="Count.", environment_args={"last": 3})
    assert (rollout.outcome, rollout.reward, rollout.error) == ("ok", 16.0, None)
    (sequence,) = rollout.sequences
    assert sequence.arrays["step_reward"].tolist() == [1.0, 2.0, 13.0]  # with that of the reward function
    assert len(set(sequence.arrays["state_hash"].tolist())) == 3
    assert sequence.reward_parts == {"environment": 6.0, "length": 10.0}
    assert sequence.messages is not None
    assert [m["content"] for m in sequence.messages] == ["Count.", "seed 5", "1", "after 1", " 2\n", "after 2", "3"]
    check(spy, rollout.sequences)


def test_an_episode_that_a_limit_ends_keeps_its_rewards() -> None:
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer("1", "2")
    rollout = played(spy, Limits(max_turns=2), environment_args={"last": 9})
    assert (rollout.outcome, rollout.stop_reason, rollout.reward) == ("ok", "max_turns", 13.0)


@pytest.mark.parametrize(("template", "name"), [("qwen2_5", "hermes"), ("gemma3", "text")])
def test_calls_of_an_environment_s_tools_are_actions(template: str, name: str) -> None:
    spy = Spy(chat_tokenizer(template))
    one, two, three = (ToolCall("count", {"n": n}) for n in (1, 2, 3))
    spy.will_answer(FORMATS[name].render([one, two], ""), "no call", FORMATS[name].render([three, one], ""))
    args = {"environment": COUNTS_BY_TOOL, "environment_args": {"last": 3}}
    rollout = played(spy, format=None if name == "hermes" else name, **args)
    assert (rollout.outcome, rollout.reward, rollout.error) == ("ok", 16.0, None)
    (sequence,) = rollout.sequences
    assert sequence.arrays["step_reward"].tolist() == [3.0, 0.0, 13.0], "the episode ends with its last number"
    assert "Say a number." in sequence.prompt and sequence.messages is not None
    seen = [message["content"] for message in sequence.messages if message["role"] in ("user", "tool")]
    results = ["after 1", "after 2"] if name == "hermes" else ["RESULT count\nafter 1\nRESULT count\nafter 2"]
    assert seen == ["seed 5", *results, "after 0"]
    check(spy, rollout.sequences)


def test_a_rollout_whose_environment_is_killed_begins_again_in_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "_PAUSES_S", (0.01, 0.01))
    spy = Spy(chat_tokenizer("qwen2_5"))
    spy.will_answer("a", "b")
    name = "tests.unit.environments.acting:KilledOnce"
    rollout = played(spy, environment=name, environment_args={"marker": str(tmp_path / "killed")})
    assert (rollout.outcome, rollout.reward, rollout.num_turns) == ("ok", 11.0, 1)
    [tried] = rollout.tries
    assert "was killed by the system in step 1" in tried.error
    assert [message["content"] for message in tried.chats[0]["messages"] if message["role"] == "assistant"] == ["a"]
    assert [turn["turn"] for turn in tried.chats[0]["turns"]] == [0] and tried.chats[0]["turns"][0]["num_tokens"] > 0
    assert rollout.sequences[0].response == "b"


@pytest.mark.parametrize(
    ("answer", "action", "pattern", "expected"),
    [
        (" go\nleft \n", "text", None, "go\nleft"),
        (" go\nleft \n", "last_line", None, "left"),
        ("", "last_line", None, ""),
        ("<a>x</a> <a>y</a>", "regex", "<a>(.*?)</a>", "y"),
        ("up or down", "regex", "up|down", "down"),
        (" none ", "regex", "<a>(.*?)</a>", "none"),
        ("b", "regex", "(a)|b", ""),
    ],
)
def test_the_action_in_an_answer(answer: str, action: str, pattern: str | None, expected: str) -> None:
    assert action_of(answer, action, pattern) == expected


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"action": "regex"}, "action and pattern do not fit together"),
        ({"action": "regex", "pattern": "("}, "pattern is not a regular expression"),
        ({"environment": "frozen_lak"}, "unknown environment"),
        ({"environment_args": {"lst": 3}}, "does not accept its environment_args"),
    ],
)
def test_settings_that_are_wrong_are_found_before_a_run(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_args(Path(), **{"environment": COUNTS, **args})
