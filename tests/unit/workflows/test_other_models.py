"""Models that workflows ask besides the policy, behind a real HTTP server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from operators.llm.endpoint import BudgetConfig, EndpointConfig
from rftcore.config.explorer import ExplorerConfig
from rftcore.config.run import parse_config
from rftcore.other_models.config import OtherModelConfig
from rftcore.other_models.models import OtherModels
from rftcore.workflows.multi_agent import multi_agent
from rftcore.workflows.task import Model, Score, Task
from rftdata.errors import ConfigError
from rftdata.experience import Rollout
from tests.support.chat_server import ChatServer, Says
from tests.support.chat_tokenizers import chat_tokenizer
from tests.unit.workflows.test_multi_agent import HERE, rolled_out
from tests.unit.workflows.test_session import Spy, asked


@pytest.fixture
def server() -> Iterator[ChatServer]:
    opened = ChatServer(lambda number, body: Says("no", status=503) if body["model"] == "gone" else "take 1")
    yield opened
    opened.close()


def rolled(server: ChatServer, workflow: Any, budget: BudgetConfig | None = None, **args: Any) -> Rollout:
    """A rollout in which the policy answers 2 and 1, beside two models."""

    def config(model: str) -> OtherModelConfig:
        endpoint = EndpointConfig(url=server.url, model=model, retries=0)
        return OtherModelConfig(endpoint=endpoint, max_tokens=9, temperature=0.5, budget=budget or BudgetConfig())

    spy, others = Spy(chat_tokenizer("qwen2_5")), OtherModels({"judge": config("big"), "gone": config("gone")})
    spy.will_answer("2", "1")
    try:
        return rolled_out(spy, workflow, others=others, **args)
    finally:
        others.close()


def test_a_workflow_asks_a_second_model_and_records_no_turn(server: ChatServer) -> None:
    def plain(task: Task, model: Any, score: Any) -> Score:
        return Score(float(model.other("judge").chat(asked(model.chat(asked("hi")).response)) == "take 1"))

    async def waits(task: Task, model: Model, score: Any) -> Score:
        turn = await model.chat(asked("hi"))
        return Score(float(await model.other("judge").chat(asked(turn.response)) == "take 1"))

    for workflow in (waits, plain):
        rollout = rolled(server, workflow)
        assert (rollout.outcome, rollout.error, rollout.reward, rollout.num_turns) == ("ok", None, 1.0, 1)
    body = server.requests[-1]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("big", 9, 0.5)
    assert body["messages"] == asked("2")


def test_a_second_model_plays_a_role(server: ChatServer) -> None:
    args = {"environment": f"{HERE}:Takes", "action": "regex", "pattern": r"\d"}
    rollout = rolled(server, multi_agent, opponents={"o": {"model": "judge"}}, system={"o": "Play {role}."}, **args)
    assert (rollout.outcome, rollout.error, rollout.reward) == ("ok", None, 0.875)
    assert server.requests[-1]["messages"] == [{"role": "system", "content": "Play o."}, *asked("2 left")]


def test_a_model_that_does_not_answer_is_a_failure_of_the_infrastructure(server: ChatServer, monkeypatch: Any) -> None:
    monkeypatch.setattr("rftcore.explorer.rollouts._PAUSES_S", (0.0, 0.0))

    async def asks(task: Task, model: Model, score: Any) -> Score:
        await model.other("gone").chat(asked("hi"))
        return Score(0.0)

    rollout = rolled(server, asks)
    assert rollout.outcome == "failed"
    assert "the model 'gone' of explorer.models does not answer: HTTP 503" in str(rollout.error)
    assert len(rollout.tries) == 2


def test_an_unknown_model_ends_the_run_with_the_names_there_are(server: ChatServer) -> None:
    async def asks(task: Task, model: Model, score: Any) -> Score:
        return Score(float(len(await model.other("referee").chat(asked("hi")))))

    with pytest.raises(ConfigError, match=r"explorer\.models does not have.*'referee'.*judge, gone"):
        rolled(server, asks)


def test_a_used_up_budget_ends_the_run_before_a_further_request(server: ChatServer) -> None:
    async def asks(task: Task, model: Model, score: Any) -> Score:
        judge = model.other("judge")
        await asyncio.gather(*(judge.chat(asked("hi")) for _ in range(3)))
        return Score(0.0)

    with pytest.raises(
        ConfigError,
        match=r"cannot ask the model 'judge' any more: the budget 'explorer.models.judge' allows no further call: 2 of 2 calls are spent; "
        r"raise explorer.models.judge.budget, and resume",
    ):
        rolled(server, asks, BudgetConfig(max_calls=2))
    assert len(server.requests) == 2


def test_a_budget_that_allows_no_call_is_refused() -> None:
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "big"}
    models = {"judge": {"endpoint": endpoint, "max_tokens": 99, "budget": {"max_tokens": 50}}}
    with pytest.raises(
        ConfigError, match=r"explorer.models.judge.*budget.max_tokens allows no call: .*the budget is 50: raise it"
    ):
        parse_config({"explorer": {"models": models}, "tasks": [{"name": "t", "source": "none"}]}, Path(), "test")


def test_the_models_are_settings_of_the_explorer() -> None:
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "big"}
    config = ExplorerConfig.model_validate({"models": {"judge": {"endpoint": endpoint, "max_tokens": 5}}})
    assert config.models["judge"].endpoint.model == "big" and config.models["judge"].max_tokens == 5
