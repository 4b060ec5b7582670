"""The built-in rewards against values computed by hand, and against answers that try to get around them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.reward import RewardConfig
from rftcore.explorer.scorer import Scorer
from rftcore.rewards import LoadedReward, load_rewards
from rftcore.workflows.task import Task, Turn
from rftdata.errors import ConfigError, RftError
from rftdata.experience import Sequence
from tests.support.waiting import PATIENCE_S


def loaded(name: str, **arguments: Any) -> LoadedReward:
    (reward,) = load_rewards([RewardConfig.model_validate({"name": name, **arguments})], Path()).values()
    return reward


def turn(response: str, *, num_tokens: int = 1, finish_reason: str = "stop") -> Turn:
    sequence = Sequence("?", response, list(range(1 + num_tokens)), 1, finish_reason)
    return Turn([], response, finish_reason, sequence)


def task(answer: str | None = None, **metadata: Any) -> Task:
    return Task(1, "set", "one", "?", answer, metadata)


def value(reward: LoadedReward, given: Turn, asked: Task | None = None) -> float:
    found = reward(given, asked or task())
    assert isinstance(found, float) and not inspect.isawaitable(found)
    return found


@pytest.fixture(scope="module")
def math_scorer() -> Iterator[Scorer]:
    """math_verify in a process of its own, where its signal alarms work."""
    rewards = load_rewards(["math_verify"], Path())
    scorer = Scorer(rewards, Path(), timeout_s=PATIENCE_S, max_processes=1)
    yield scorer
    scorer.close()


@pytest.mark.parametrize(
    ("answer", "response", "reward"),
    [
        ("1/2", r"So it is $\frac{2}{4}$.", 1),
        (r"\frac{1}{2}", "The answer is 0.5", 1),
        ("12", r"<think>maybe \boxed{13}</think> \boxed{12\text{ cm}}", 1),
        ("50", r"It is \boxed{50\%}", 1),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", 1),
        ("He has 9 left. #### 1,234", "The answer is 1234.", 1),
        ("7", r"\boxed{7} or \boxed{8}", 0),
        ("7", "<answer>7</answer> though 8 is close", 1),
        ("7", r"<think>\boxed{7}", 0),
        ("7", r"garbage $\frac{$ {{{", 0),
        ("7", "9**9**9**9", 0),
        ("7", "", 0),
    ],
)
def test_math_verify(answer: str, response: str, reward: float, math_scorer: Scorer) -> None:
    score = asyncio.run(math_scorer(turn(response), task(answer)))
    assert score.parts == {"math_verify": reward}


def test_math_verify_gives_no_reward_for_an_answer_that_was_cut_off_and_refuses_a_task_without_one(
    math_scorer: Scorer,
) -> None:
    assert asyncio.run(math_scorer(turn(r"\boxed{7}", finish_reason="length"), task("7"))).reward == 0
    with pytest.raises(
        RftError, match=r"the answer of the task 'one' of 'set' is no mathematical expression.*use another"
    ):
        asyncio.run(math_scorer(turn(r"\boxed{7}"), task("  ")))


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>so</think>\n<answer>2</answer>\n", 1),
        ("Well. <think>so</think><answer>2</answer>", 0),
        ("<think>so</think><answer>2</answer> done", 0),
        ("<think>so</think> then <answer>2</answer>", 0),
        ("<think>so</think><answer> </answer>", 0),
        ("<answer>2</answer><think>so</think>", 0),
        ("<think>so</think><answer>2</answer><answer>3</answer>", 0),
        ("<think><think>so</think></think><answer>2</answer>", 0),
        ("<think>so</think><answer>2", 0),
    ],
)
def test_format_wants_each_tag_once_and_nothing_beside_them(response: str, reward: float) -> None:
    assert value(loaded("format"), turn(response)) == reward
    opened = loaded("format", opened=True)
    assert value(opened, turn(response.removeprefix("<think>"))) == reward
    if reward:
        assert value(loaded("format"), turn(response, finish_reason="length")) == 0
        assert value(opened, turn(response)) == 0


def test_format_by_a_pattern_matches_the_whole_response() -> None:
    boxed = loaded("format", pattern=r".*\\boxed\{\d+\}")
    assert [value(boxed, turn(text)) for text in ("a\n\\boxed{7}", "\\boxed{7} a", "7")] == [1, 0, 0]
    assert not getattr(boxed.function, "runs_in_explorer", False), "a pattern may take long"


@pytest.mark.parametrize(
    ("arguments", "lengths"),
    [
        ({"max": 3}, {0: 1, 3: 1, 4: 0}),
        ({"min": 2, "max": 4, "ramp": 4}, {0: 0.5, 1: 0.75, 2: 1, 4: 1, 6: 0.5, 9: 0}),
        ({"target": 4, "ramp": 2}, {2: 0, 3: 0.5, 4: 1}),
    ],
)
def test_length(arguments: dict[str, Any], lengths: dict[int, float]) -> None:
    for unit in ("tokens", "characters", "words"):
        reward = loaded("length", unit=unit, **arguments)
        for length, expected in lengths.items():
            text = "a" * length if unit == "characters" else "ab " * length
            assert value(reward, turn(text, num_tokens=length)) == expected, (unit, length)


def test_overlong_is_the_soft_punishment_of_dapo() -> None:
    reward = loaded("overlong", max_tokens=10, cache_tokens=4)
    lengths = {0: 0.0, 6: 0.0, 7: -0.25, 9: -0.75, 10: -1.0, 50: -1.0}
    assert {length: value(reward, turn("", num_tokens=length)) for length in lengths} == lengths


def test_repetition() -> None:
    texts = {"a b c d": 0.0, "A b a B a b": 2 / 5 - 1, "a": 0.0, "": 0.0}
    assert {text: value(loaded("repetition", n=2), turn(text)) for text in texts} == pytest.approx(texts)


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>3 + 4</think> <answer>(93 − 43) + 1</answer>", 1.0),
        ("-43 + 93 + 1", 1.0),
        ("(93-43)+1 = 51", 1.0),
        ("(93-43)+1 = 52", 0.1),
        ("93+43+1", 0.1),
        ("93-43", 0.0),
        ("93-43+1*1", 0.0),
        ("51", 0.0),
        ("93 - 43 / (1 - 1)", 0.0),
        ("93 // 43 + 1", 0.0),
        ("93 ** 43 ** 1", 0.0),
        ("__import__('os').getpid()", 0.0),
        ("(" * 300 + "93-43+1" + ")" * 300, 0.0),
        ("", 0.0),
    ],
)
def test_countdown(response: str, reward: float) -> None:
    game = task(None, nums=[93, 43, 1], target=51)
    assert value(loaded("countdown", partial=0.1), turn(response), game) == reward


def test_countdown_with_numbers_left_out_and_those_of_reasoning_gym() -> None:
    import reasoning_gym

    some = loaded("countdown", use="at_most_once")
    assert value(some, turn("93-43"), task("50", numbers="[93, 43, 1]")) == 1.0
    for entry in reasoning_gym.create_dataset("countdown", size=5, seed=1):
        assert value(loaded("countdown"), turn(entry["answer"]), task(entry["answer"], **entry["metadata"])) == 1.0
    with pytest.raises(RftError, match=r"the task 'one' of 'set' is no countdown.*numbers or nums"):
        value(some, turn("1"), task("3", numbers=[1.5]))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("format", {"tags": ["a", "a"]}, "tags are different names"),
        ("format", {"tags": ["<a>"]}, "without brackets"),
        ("format", {"pattern": "("}, "not a regular expression"),
        ("format", {"pattern": "a", "tags": ["a"]}, "takes the place of tags"),
        ("length", {}, "either target, or min, max or both"),
        ("length", {"min": 3, "max": 2}, "min is above max"),
        ("overlong", {"max_tokens": 3, "cache_tokens": 4}, "cache_tokens is more than max_tokens"),
        ("overlong", {"max_tokens": 3}, "cache_tokens' is missing"),
        ("countdown", {"partial": 2}, "less than or equal to 1"),
        ("countdown", {"use": "twice"}, "'exactly_once' or 'at_most_once'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"the reward '{name}'.*{message}"):
        loaded(name, **arguments)
