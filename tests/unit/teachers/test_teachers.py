"""A teacher scores tokens of the policy: by a forward pass here, or by a server that returns log-probabilities of prompts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from operators.llm.endpoint import EndpointConfig
from rftcore.algorithms import build_algorithm
from rftcore.checks.algorithm import check_inputs, check_recorded
from rftcore.config.explorer import ExplorerConfig
from rftcore.teachers.base import Teacher
from rftcore.teachers.config import TeacherConfig
from rftcore.teachers.endpoint import EndpointTeacher
from rftcore.teachers.local import LocalTeacher
from rftcore.vocabulary import refuse_other_tokenizer
from rftdata.errors import ConfigError
from rftdata.experience import Group, Rollout, Sequence
from tests.support.chat_server import Body, ChatServer, Says
from tests.support.models import make_tiny_model
from tests.support.prompt_scores import answer_with

CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("teacher"), hidden_size=32, num_layers=1, context_length=CONTEXT)


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[int, Body], Says | str]], EndpointConfig]]:
    servers: list[ChatServer] = []

    def start(answer: Callable[[int, Body], Says | str]) -> EndpointConfig:
        servers.append(ChatServer(answer))
        return EndpointConfig(url=servers[-1].url, model="teacher", backoff_s=0.01, retries=1)

    yield start
    for server in servers:
        server.close()


def group(*responses: str, num_prompt_tokens: int = 3) -> Group:
    def sequence(place: int, text: str) -> Sequence:
        ids = [5, 6, 7][:num_prompt_tokens] + [8 + (place + index) % 20 for index in range(len(text))]
        return Sequence("abc", text, ids, num_prompt_tokens, "stop", reward=1.0)

    return Group([Rollout(n, "ok", 1.0, [sequence(n, text)]) for n, text in enumerate(responses)], 1, 1)


def expected(folder: Path, sequence: Sequence, temperature: float = 1.0) -> list[float]:
    """Return the log-probabilities of one sequence alone, from the model itself."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([list(sequence.token_ids)])
    with torch.no_grad():
        logprobs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    scored = [0.0, *logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()]
    return [0.0] * sequence.num_prompt_tokens + scored[sequence.num_prompt_tokens :]


def score(teacher: Teacher, scored: Group, folder: Path | None = None) -> None:
    async def work() -> None:
        try:
            if folder is not None:
                await teacher.open(AutoTokenizer.from_pretrained(folder))
            await teacher.score(scored)
        finally:
            await teacher.close()

    asyncio.run(work())


@pytest.mark.parametrize("max_tokens", [1, 4096])
def test_a_model_scores_every_response_at_the_temperature_of_the_rollouts(folder: Path, max_tokens: int) -> None:
    scored = group("ab", "abcdefgh", "abcde")
    config = TeacherConfig(path=str(folder), max_tokens_per_batch=max_tokens)
    score(LocalTeacher(folder, config, temperature=0.5, num_threads=1), scored)
    for rollout in scored.rollouts:
        (sequence,) = rollout.sequences
        array = sequence.arrays["teacher_logprobs"]
        assert array.dtype == np.float32 and len(array) == len(sequence.token_ids)
        assert array.tolist() == pytest.approx(expected(folder, sequence, 0.5), abs=1e-4)


def test_a_first_token_without_a_prompt_counts_as_certain(folder: Path) -> None:
    scored = group("abc", num_prompt_tokens=0)
    score(LocalTeacher(folder, TeacherConfig(path=str(folder)), 1.0, 1), scored)
    assert scored.rollouts[0].sequences[0].arrays["teacher_logprobs"].tolist() == pytest.approx(
        expected(folder, scored.rollouts[0].sequences[0]), abs=1e-4
    )


def test_a_response_beyond_the_teacher_s_context_fails_alone(folder: Path) -> None:
    scored = group("a" * CONTEXT, "ab")
    score(LocalTeacher(folder, TeacherConfig(path=str(folder)), 1.0, 1), scored)
    long, short = scored.rollouts
    assert (long.outcome, long.reward, long.sequences[0].reward) == ("failed", None, None)
    assert "67 tokens do not fit its context of 64" in str(long.error)
    assert short.outcome == "ok" and "teacher_logprobs" in short.sequences[0].arrays


def test_a_server_gives_the_same_numbers_as_the_model(
    folder: Path, serve: Callable[[Callable[[int, Body], Says | str]], EndpointConfig]
) -> None:
    scored = group("ab", "abcdefgh")
    score(EndpointTeacher(serve(answer_with(folder))), scored, folder)
    for rollout in scored.rollouts:
        (sequence,) = rollout.sequences
        assert sequence.arrays["teacher_logprobs"].tolist() == pytest.approx(expected(folder, sequence), abs=1e-4)


def test_a_request_that_fails_is_repeated_and_then_fails_its_rollout_alone(
    folder: Path, serve: Callable[[Callable[[int, Body], Says | str]], EndpointConfig]
) -> None:
    answer = answer_with(folder)
    scored = group("ab", "abcdefgh")
    long = scored.rollouts[1].sequences[0].token_ids

    def sometimes(number: int, body: Body) -> Says | str:
        return Says("no memory", 500) if body["prompt"] == long or number == 0 else answer(number, body)

    score(EndpointTeacher(serve(sometimes)), scored, folder)
    assert [rollout.outcome for rollout in scored.rollouts] == ["ok", "failed"]
    assert "HTTP 500: no memory (2 tries)" in str(scored.rollouts[1].error)


def _without_scores(_: int, __: Body) -> Says:
    return Says(json.dumps({"choices": [{"text": "b"}]}), raw=True)


def _other_tokens(_: int, body: Body) -> Says:
    rows: list[Any] = [None, *({"999": {"logprob": -1.0}} for _ in body["prompt"][1:])]
    return Says(json.dumps({"choices": [{"text": "b", "prompt_logprobs": rows}]}), raw=True)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (_without_scores, "returns no log-probabilities of the prompt"),
        (_other_tokens, "another tokenizer than the policy"),
        (lambda *_: Says("no such model", 404), "does not answer: HTTP 404: no such model"),
    ],
)
def test_a_server_that_cannot_score_the_policy_s_tokens_is_refused_before_the_first_rollout(
    folder: Path, serve: Callable[[Callable[[int, Body], Says | str]], EndpointConfig], answer: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        score(EndpointTeacher(serve(answer)), group("ab"), folder)


def test_a_teacher_with_another_vocabulary_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path, hidden_size=32, num_layers=1)
    refuse_other_tokenizer(folder, other, "explorer.teacher")
    text = (other / "tokenizer.json").read_text()
    (other / "tokenizer.json").write_text(text.replace('"a": 14', '"a": 15').replace('"b": 15', '"b": 14'))
    with pytest.raises(ConfigError, match=r"token 'a' \(number 14\) is number 15 in it, and 2 of"):
        refuse_other_tokenizer(folder, other, "explorer.teacher")


def test_distillation_without_a_teacher_is_refused_before_the_run() -> None:
    algorithm, with_teacher = (
        build_algorithm("on_policy_distillation"),
        ExplorerConfig.model_validate({"teacher": "./teacher"}),
    )
    with pytest.raises(ConfigError, match=r"reads teacher_logprobs.*explorer\.teacher.*or set algorithm\.teacher"):
        check_inputs(algorithm, ExplorerConfig())
    check_inputs(algorithm, with_teacher)
    check_recorded(algorithm, with_teacher, frozenset())
    check_inputs(build_algorithm("on_policy_distillation", {"teacher": "./teacher"}), ExplorerConfig())
    check_inputs(algorithm, ExplorerConfig(workflow="./mine.py:workflow"))  # it may record them itself


def test_a_teacher_is_a_model_or_a_server() -> None:
    endpoint = {"url": "http://127.0.0.1:1/v1", "model": "teacher"}
    with pytest.raises(ValueError, match="either path"):
        TeacherConfig.model_validate({})
    with pytest.raises(ValueError, match="either path"):
        TeacherConfig.model_validate({"path": "x", "endpoint": endpoint})
    with pytest.raises(ValueError, match=r"at temperature 1, and explorer.temperature is 0\.7"):
        ExplorerConfig.model_validate({"teacher": {"endpoint": endpoint}, "temperature": 0.7})
    assert ExplorerConfig.model_validate({"teacher": "./teacher", "temperature": 0.7}).teacher == TeacherConfig(
        path="./teacher"
    )
