"""Data-Juicer operators that ask an OpenAI-compatible endpoint, over HTTP, answered by a script."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from operators.chain.build import build_chain
from operators.chain.stage import StageError
from tests.support.batches import batch_of_groups, stored
from tests.support.chat_server import Body, ChatServer, Says

TEXTS = ["two and two are four", "nine", "the sum is seven, or is it?", "out of order"]
MARKS = {"two and two are four": 1, "nine": 5, "the sum is seven, or is it?": 3}
DIMENSIONS = ("accuracy", "grammar", "informativeness", "coherence")


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[str], Says | str]], ChatServer]]:
    """Starts servers that end with the test; they answer the last message of a chat."""
    servers: list[ChatServer] = []

    def start(answer: Callable[[str], Says | str]) -> ChatServer:
        servers.append(ChatServer(lambda _, body: answer(asked(body))))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def asked(body: Body) -> str:
    return str(body["messages"][-1]["content"])


def marked(text: str) -> Says | str:
    """Marks from 1 to 5, the same in every dimension; an error for the last of the texts."""
    mark = next((mark for known, mark in MARKS.items() if known in text), None)
    if mark is None:
        return Says("the server is out of order", 500)
    return json.dumps({"dimension_scores": dict.fromkeys(DIMENSIONS, mark), "flags": []})


def endpoint(server: ChatServer) -> dict[str, Any]:
    return {
        "api_or_hf_model": "tiny",
        "is_hf_model": False,
        "model_params": {"base_url": server.url, "api_key": "none", "max_retries": 0},
        "try_num": 1,
    }


def quality(server: ChatServer, **args: Any) -> dict[str, Any]:
    return {"llm_quality_score_filter": {**endpoint(server), "min_score": 0.0, **args}}


def test_a_score_is_a_column_and_is_not_asked_for_again(serve: Any) -> None:
    server = serve(marked)
    table = batch_of_groups([1] * 3, response=TEXTS[:3])
    stages: list[Any] = [
        quality(server, run={"concurrency": 3}),
        {"sql": "FROM batch WHERE dj_llm_quality_score >= 0.5"},
    ]
    chain = build_chain(stages)
    result = chain.run(table)
    assert result.decisions["kept"].to_pylist() == [False, True, True]
    (scores,) = result.scores
    assert scores.table["dj_llm_quality_score"].to_pylist() == pytest.approx([0.2, 1.0, 0.6])
    assert len(server.requests) == 3
    # Another bound, the same score: the endpoint is not asked.
    strict = build_chain([quality(server, min_score=1.1)])
    again = strict.run(table, stored_scores=stored([scores]))
    assert again.decisions["kept"].to_pylist() == [False, False, False]
    assert again.decisions["reason"][2].as_py().startswith("llm_quality_score_filter: llm_quality_score is 0.6")
    assert len(server.requests) == 3


def test_a_call_that_fails_is_data(serve: Any) -> None:
    chain = build_chain([quality(serve(marked))])
    result = chain.run(batch_of_groups([1] * 4, response=TEXTS))
    assert result.decisions["kept"].to_pylist() == [True, True, True, False]
    assert result.decisions["reason"][3].as_py() == (
        "llm_quality_score_filter has no statistic for it: the endpoint gave no answer that the operator understands"
    )
    # The error column keeps it from being stored as a score of zero.
    error_column = chain.stages[0].operator.error_column
    assert error_column == "dj_llm_quality_score_filter_error"
    assert result.scores[0].table[error_column].is_null().to_pylist() == [True, True, True, False]
    assert result.scores[0].table["dj_llm_quality_score"][3].as_py() is None


def test_an_endpoint_that_never_answers_well_fails_the_batch(serve: Any) -> None:
    server = serve(lambda text: "hard to say")
    with pytest.raises(StageError, match=r"no answer that it understands for any of 3 rows .*OPENAI_BASE_URL"):
        build_chain([quality(server)]).run(batch_of_groups([1] * 3, response=TEXTS[:3]))
    assert len(server.requests) == 3


def test_a_mapper_writes_what_the_model_states(serve: Any) -> None:
    server = serve(lambda text: " What is three?\n" if "three" in text else "What is 2 + 2?")
    seen: list[Any] = []
    chain = build_chain([{"optimize_query_mapper": endpoint(server)}])
    table = batch_of_groups([1] * 2, prompt=["what is two plus two?", "and three?"])
    chain.run(table, watch=lambda stage, before, changed, outcome: seen.extend(changed["prompt"].to_pylist()))
    assert seen == ["What is 2 + 2?", "What is three?"]
    assert len(server.requests) == 2


def test_tags_that_a_model_did_not_give_are_asked_for_again(serve: Any) -> None:
    server = serve(lambda text: "none")
    args = {key: value for key, value in endpoint(server).items() if key not in ("api_or_hf_model", "is_hf_model")}
    stage = {"extract_keyword_mapper": {**args, "api_model": "tiny"}}
    chain = build_chain([stage, {"sql": "FROM batch WHERE dj_keyword = '[]'"}])
    result = chain.run(batch_of_groups([1] * 2, response=TEXTS[:2]))
    assert result.decisions["kept"].to_pylist() == [True, True]
    scores = result.scores[0].table.to_pydict()
    assert scores["dj_keyword"] == ["[]", "[]"]
    assert scores["dj_extract_keyword_mapper_error"] == ["the endpoint gave nothing"] * 2
    assert len(server.requests) == 2


def test_the_endpoint_may_be_named_by_the_environment(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lambda text: json.dumps({"dimension_scores": {"accuracy": 3}, "flags": []}))
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    args = endpoint(server)
    del args["model_params"]
    build_chain([{"llm_difficulty_score_filter": {**args, "dim_required_keys": ["accuracy"]}}]).run(
        batch_of_groups([1])
    )
    assert len(server.requests) == 1
