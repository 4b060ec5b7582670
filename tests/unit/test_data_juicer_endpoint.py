"""Data-Juicer operators that ask an OpenAI-compatible endpoint, over HTTP, answered by a real (tiny) model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from operators.chain.build import build_chain
from operators.chain.stage import StageError
from tests.support.batches import batch_of_groups, stored
from tests.support.model_server import ModelServer
from tests.support.models import make_tiny_model

pytestmark = pytest.mark.slow

TEMPLATE = '{"dimension_scores": {"accuracy": #, "grammar": #, "informativeness": #, "coherence": #}, "flags": []}'
TEXTS = ["two and two are four", "nine", "the sum is seven, or is it?", "out of order"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model: Path) -> Iterator[ModelServer]:
    server = ModelServer(model, refuses="out of order")
    yield server
    server.close()


def endpoint(server: ModelServer, **sampling: Any) -> dict[str, Any]:
    return {
        "api_or_hf_model": "tiny",
        "is_hf_model": False,
        "model_params": {"base_url": server.url, "api_key": "none", "max_retries": 0},
        "sampling_params": sampling,
        "try_num": 1,
    }


def quality(server: ModelServer, **args: Any) -> dict[str, Any]:
    return {"llm_quality_score_filter": {**endpoint(server, template=TEMPLATE), "min_score": 0.0, **args}}


def test_a_score_is_a_column_and_is_not_asked_for_again(server: ModelServer) -> None:
    table = batch_of_groups([1] * 3, response=TEXTS[:3])
    stages: list[Any] = [
        quality(server, run={"concurrency": 3}),
        {"sql": "FROM batch WHERE dj_llm_quality_score >= 0.2"},
    ]
    chain = build_chain(stages)
    result = chain.run(table)
    assert result.decisions["kept"].to_pylist() == [True, True, True]
    (scores,) = result.scores
    found = scores.table["dj_llm_quality_score"].to_pylist()
    assert all(0.2 <= score <= 1 for score in found)
    assert len(server.answers) == 3
    # Another bound, the same score: the endpoint is not asked.
    strict = build_chain([quality(server, min_score=1.1)])
    again = strict.run(table, known=stored([scores]))
    assert again.decisions["kept"].to_pylist() == [False, False, False]
    assert (
        again.decisions["reason"][0]
        .as_py()
        .startswith(f"llm_quality_score_filter: llm_quality_score is {found[0]:.6g}")
    )
    assert len(server.answers) == 3


def test_a_call_that_fails_is_data(server: ModelServer) -> None:
    chain = build_chain([quality(server)])
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


def test_an_endpoint_that_never_answers_well_fails_the_batch(server: ModelServer) -> None:
    nonsense = {"llm_quality_score_filter": endpoint(server, max_tokens=4)}
    with pytest.raises(StageError, match=r"no answer that it understands for any of 3 rows .*OPENAI_BASE_URL"):
        build_chain([nonsense]).run(batch_of_groups([1] * 3, response=TEXTS[:3]))
    assert len(server.answers) == 3


def test_a_mapper_writes_what_the_model_says(server: ModelServer) -> None:
    seen: list[Any] = []
    chain = build_chain([{"optimize_query_mapper": endpoint(server, max_tokens=6)}])
    table = batch_of_groups([1] * 2, prompt=["what is two plus two?", "and three?"])
    chain.run(table, watch=lambda stage, before, changed, outcome: seen.extend(changed["prompt"].to_pylist()))
    assert [text.strip() for text in server.answers] == seen
    assert len(seen) == 2 and set(seen).isdisjoint(table["prompt"].to_pylist())


def test_tags_that_a_model_did_not_give_are_asked_for_again(server: ModelServer) -> None:
    args = {**endpoint(server, max_tokens=4), "api_model": "tiny"}
    stage = {"extract_keyword_mapper": {k: v for k, v in args.items() if k not in ("api_or_hf_model", "is_hf_model")}}
    chain = build_chain([stage, {"sql": "FROM batch WHERE dj_keyword = '[]'"}])
    result = chain.run(batch_of_groups([1] * 2, response=TEXTS[:2]))
    assert result.decisions["kept"].to_pylist() == [True, True]
    scores = result.scores[0].table.to_pydict()
    assert scores["dj_keyword"] == ["[]", "[]"]
    assert scores["dj_extract_keyword_mapper_error"] == ["the endpoint gave nothing"] * 2
    assert len(server.answers) == 2


def test_the_endpoint_may_be_named_by_the_environment(server: ModelServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", server.url)
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    args = endpoint(server, template=TEMPLATE)
    del args["model_params"]
    build_chain([{"llm_difficulty_score_filter": {**args, "dim_required_keys": ["accuracy"]}}]).run(
        batch_of_groups([1])
    )
    assert len(server.answers) == 1
