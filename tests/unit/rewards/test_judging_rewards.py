"""Models that judge as rewards, beside rules and code in one list; the server is a small one of the test."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.reward import RewardConfig
from rftcore.explorer.scorer import Scorer
from rftcore.rewards import load_rewards
from rftcore.rewards.answered_rollout import AnsweredRollout
from rftcore.workflows.task import Score, Task, Turn
from rftdata.errors import ConfigError, RftError
from rftdata.experience import Sequence
from rftdata.pipeline.budget import MemoryUsage, Usage
from tests.support.chat_server import Body, ChatServer, Says

TASK = Task(1, "sums", "one", "Add 1 and 1.", "2", {"rubric": ["Is short.", {"description": "Is right.", "weight": 3}]})

Serve = Callable[..., ChatServer]


@pytest.fixture
def serve() -> Iterator[Serve]:
    served: list[ChatServer] = []

    def start(answer: Callable[[int, Body], Says | str]) -> ChatServer:
        served.append(ChatServer(answer))
        return served[-1]

    yield start
    for server in served:
        server.close()


def turn(response: str = "2") -> Turn:
    messages = [{"role": "user", "content": "Add 1 and 1."}]
    return Turn(messages, response, "stop", Sequence("Add 1 and 1.", response, [1, 2], 1, "stop"))


def scorer_of(*rewards: Any, usage: MemoryUsage | None = None) -> Scorer:
    loaded = load_rewards([RewardConfig.model_validate(reward) for reward in rewards], Path())
    return Scorer(loaded, Path(), usage=usage)


def endpoint(server: ChatServer, **settings: Any) -> dict[str, Any]:
    return {"url": server.url, "model": "judge", "backoff_s": 0.001, **settings}


def scored(scorer: Scorer, given: Turn | None = None) -> Score:
    try:
        return asyncio.run(scorer(given or turn(), TASK))
    finally:
        scorer.close()


def test_a_judge_is_one_of_several_rewards_and_what_it_spends_is_counted(serve: Serve) -> None:
    server = serve(lambda *_: '{"reason": "fine", "score": 4}')
    usage = MemoryUsage()
    judge = {"name": "judge", "as": "taste", "weight": 0.5, "endpoint": endpoint(server), "scale": [1, 5]}
    score = scored(scorer_of("exact_match", judge, {"name": "length", "max": 1}, usage=usage))
    assert score == Score(2.375, {"exact_match": 1.0, "taste": 0.75, "length": 1.0})
    (request,) = server.requests
    assert "<question>\nAdd 1 and 1.\n</question>" in request["messages"][-1]["content"]
    assert usage.spent("reward/taste") == Usage(1, 30, 0.0)


def test_a_judge_that_gives_no_score_fails_the_rollout_and_the_next_call_asks_again(serve: Serve) -> None:
    server = serve(lambda number, _: Says("busy", 503) if number < 2 else '{"score": 10}')
    scorer = scorer_of({"name": "judge", "endpoint": endpoint(server, retries=1)})
    with pytest.raises(RftError, match=r"the judge gave no score: .*503.*2 tries"):
        scored(scorer)
    assert scored(scorer).reward == 1.0, "after it was closed, too"


def test_criteria_come_from_the_task(serve: Serve) -> None:
    server = serve(lambda *_: '{"1": 0, "2": 1}')
    assert scored(scorer_of({"name": "rubric", "endpoint": endpoint(server)})).parts == {"rubric": 0.75}


def test_the_answers_of_a_group_are_compared_in_one_call(serve: Serve) -> None:
    server = serve(lambda *_: '{"scores": [{"id": 1, "score": 0.2}, {"id": 2, "score": 0.9}]}')
    scorer = scorer_of({"name": "ruler", "endpoint": endpoint(server)})
    rollouts = [AnsweredRollout(place, [turn(text)], 0.0) for place, text in enumerate(["2", "two", "2"])]

    async def scores() -> list[float]:
        found = await scorer.score_group(rollouts, TASK)
        alone = await scorer.score_group(rollouts[:1], TASK)
        return [score.parts["ruler"] for score in (*found, *alone)]

    try:
        first, second, third, alone = asyncio.run(scores())
    finally:
        scorer.close()
    assert {first, second} == {0.2, 0.9} and first == third and alone == 0.0
    assert len(server.requests) == 1


def test_a_slow_judge_does_not_block_the_event_loop_and_a_cancelled_call_is_left(serve: Serve) -> None:
    answers = threading.Event()

    def answer(*_: object) -> str:
        answers.wait(20)
        return '{"score": 5}'

    server = serve(answer)
    scorer = scorer_of({"name": "judge", "endpoint": endpoint(server, concurrency=4)})

    async def run() -> float:
        calls = [asyncio.create_task(scorer(turn(str(number)), TASK)) for number in range(4)]
        while server.busiest < 4:
            await asyncio.sleep(0.01)
        calls[0].cancel()
        answers.set()
        done = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(done[0], asyncio.CancelledError)
        return sum(score.reward for score in done if isinstance(score, Score))

    assert asyncio.run(run()) == 1.5
    started = time.monotonic()
    scorer.close()
    assert time.monotonic() - started < 4.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"'explorer\.reward\.endpoint' is missing"),
        ({"endpoint": "policy"}, "endpoint: policy is for stages"),
        ({"endpoint": {"url": "http://a/v1", "model": "m"}, "column": "a"}, "writes no column.*`as`"),
        ({"endpoint": {"url": "http://a/v1", "model": "m"}, "scales": [1, 2]}, "there is no key.*did you mean 'scale'"),
        ({"endpoint": {"url": "http://a/v1", "model": "m", "api_key": "s3cret"}}, "name the variable in api_key_env"),
        ({"endpoint": {"url": "http://a/v1", "model": "m"}, "template": "{reply}"}, "unknown placeholder"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)the reward 'judge'.*{message}") as raised:
        scorer_of({"name": "judge", **arguments})
    assert "s3cret" not in str(raised.value)
