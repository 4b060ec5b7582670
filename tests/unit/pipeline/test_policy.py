"""The run's own model, asked by stages: every chat has its own answer or error."""

from __future__ import annotations

from pathlib import Path

from operators.base import StageContext
from operators.llm.client import chat
from operators.llm.endpoint import BudgetConfig, Meter, PolicyEndpoint, Sampling, estimated_tokens, tokens_of
from rftcore.config.run import parse_config
from rftcore.pipeline.policy_endpoint import Policy
from rftcore.resolved import ResolvedRun
from rftdata.errors import EngineStoppedError, RftError
from rftdata.pipeline.budget import MemoryUsage, Usage
from tests.support.models import make_tiny_model


def tiny_policy(folder: Path) -> Policy:
    raw = {
        "run": {"name": "t"},
        "buffer": {"uri": str(folder / "buffer")},
        "model": {"path": str(make_tiny_model(folder / "model"))},
        "tasks": [{"name": "t", "source": "./none.py:none"}],
        "algorithm": {"name": "sft", "group_size": 1},
        "explorer": {},
        "trainer": {},
        "steps": 1,
    }
    return Policy(ResolvedRun(parse_config(raw, folder, "the test")))


def test_a_chat_that_cannot_be_answered_takes_no_other_answer_with_it(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    good, long = ([{"role": "user", "content": text}] for text in ("1+2=", "1" * 300))
    no_text = [{"role": "user", "content": None}]  # the chat template adds it to a text
    answers = policy([good, long, no_text, good], 4, 0.0)
    policy.close()
    assert isinstance(answers[0], str) and answers[0] == answers[3]
    assert isinstance(answers[1], RftError) and "does not fit" in str(answers[1])
    assert isinstance(answers[2], TypeError)


def test_each_call_of_a_batch_is_settled_alone(tmp_path: Path) -> None:
    policy, usage = tiny_policy(tmp_path), MemoryUsage()
    meter = Meter("judge", BudgetConfig(), usage, 8)
    endpoint = PolicyEndpoint(StageContext(generate=policy, usage=usage), Sampling(8, 0.0, None), meter)
    chats = [chat(None, text) for text in ("1+2=", "1" * 300, "3+4=")]
    replies = endpoint.ask(chats)
    policy.close()
    assert [reply.error is None for reply in replies] == [True, False, True]
    assert "does not fit the engine's context" in str(replies[1].error)
    asked = sum(estimated_tokens(chats[place]) + tokens_of(replies[place].text) for place in (0, 2))
    assert usage.spent("judge") == Usage(3, asked), "the refused one costs no tokens"


def test_after_an_engine_has_stopped_the_next_question_starts_another(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    question = [{"role": "user", "content": "1+2="}]
    (first,) = policy([question], 4, 0.0)
    assert policy._engine is not None
    policy._engine.close()  # as one that failed
    (lost,) = policy([question], 4, 0.0)
    assert isinstance(lost, EngineStoppedError)
    assert policy([question], 4, 0.0) == [first]
    policy.close()
