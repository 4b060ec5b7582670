"""The stages that score tasks, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from operators.base import StageContext
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.resolve import resolve_stage
from operators.task.diversity_score import neighbour_similarities
from rftdata.errors import ConfigError, OperatorError
from rftdata.pipeline.task_batches import TASK_BATCH_SCHEMA


def tasks(count: int, **columns: list[Any]) -> pa.Table:
    """A batch of tasks; columns not given are empty."""
    ids = list(range(10, 10 + count))
    values: dict[str, list[Any]] = {
        "experience_id": ids,
        "group_id": ids,
        "task_id": ids,
        "rollout_index": [0] * count,
        "taskset": ["t"] * count,
        "task_key": [f"k{i}" for i in ids],
        "prompt": ["What is 1 + 1?"] * count,
        "attempts": [0] * count,
        "num_groups": [0] * count,
        "num_draws": [0] * count,
        "priority": [0.0] * count,
    }
    values.update({k: [json.dumps(v) if isinstance(v, dict) else v for v in column] for k, column in columns.items()})
    return pa.table(
        [pa.array(values.get(f.name, [None] * count), f.type) for f in TASK_BATCH_SCHEMA], TASK_BATCH_SCHEMA
    )


def task_chain(*stages: Any) -> Chain:
    return build_chain(list(stages), schema=TASK_BATCH_SCHEMA, require_reward=False)


def column(name: str, args: Any, wanted: str, table: pa.Table) -> list[Any]:
    """What a stage of a chain of its own makes of a column."""
    seen: dict[str, list[Any]] = {}

    def watch(stage: object, before: pa.Table, after: pa.Table, outcome: Any) -> None:
        seen.update({key: values.to_pylist() for key, values in outcome.columns.items()})

    task_chain({name: args}).run(table, watch=watch)
    return seen[wanted]


def test_quality_is_the_mean_of_its_measures() -> None:
    text = "aa bb !! §§"
    # alnum 4 of 8 shown characters; special 2 of 11; no n-gram of 10 repeats; 4 words.
    values = {"alnum": 4 / 8, "special": 1 - 2 / 11, "char_repetition": 1.0, "length": 1.0}
    for measure, value in values.items():
        assert column("quality_score", {"measures": [measure]}, "quality", tasks(1, prompt=[text])) == [
            pytest.approx(value)
        ]
    # Two word 3-grams, both once.
    assert column("quality_score", {}, "quality", tasks(1, prompt=[text])) == [
        pytest.approx((sum(values.values()) + 1.0) / 5)
    ]


def test_repetition_length_and_empty_prompts_lower_the_quality() -> None:
    table = tasks(4, prompt=["go on and go on and go on and", "one", None, "a b c d"])
    # Word 3-grams of the first: 7, of which (go on and) ×3, (on and go) ×2, (and go on) ×2 repeat.
    assert column("quality_score", {"measures": ["word_repetition"]}, "quality", table) == [0.0, None, None, 1.0]
    lengths = column("quality_score", {"measures": ["length"], "max_words": 3}, "quality", table)
    assert lengths == [pytest.approx(1 / 3), pytest.approx(1 / 3), 0.0, pytest.approx(3 / 4)]


def test_a_grade_given_as_a_column_counts_by_its_place_in_its_range() -> None:
    table = tasks(3, features=[{"judge": 10}, {"judge": 1}, {}])
    args = {"measures": ["length"], "columns": {"judge": [1, 10]}}
    assert column("quality_score", args, "quality", table) == [1.0, 0.5, 1.0]


def test_difficulty_moves_from_the_guess_to_what_was_observed() -> None:
    table = tasks(
        4,
        metadata=[{"level": 1}, {"level": 5}, {"level": 5}, None],
        attempts=[0, 0, 3, 4],
        reward=[None, None, 1.0, 0.25],
    )
    args = {"features": {"level": [1, 5]}, "prior_groups": 1}
    # Third: guess 1, then three groups with reward 1. Fourth: no level, four groups with reward 0.25.
    assert column("difficulty_score", args, "difficulty", table) == [0.0, 1.0, 1 / 4, (0.5 + 4 * 0.75) / 5]
    reverse = {"features": {"level": [5, 1]}}
    assert column("difficulty_score", reverse, "difficulty", table.slice(0, 2)) == [1.0, 0.0]


def test_usage_is_counted_in_groups_or_draws() -> None:
    table = tasks(3, num_groups=[0, 4, 12], num_draws=[0, 0, 2])
    assert column("usage_frequency", None, "usage_frequency", table) == [0.0, 0.5, 0.75]
    assert column("usage_frequency", {"of": "draws", "half": 2}, "usage_frequency", table) == [0.0, 0.0, 0.5]
    assert column("usage_frequency", None, "times_used", table) == [0, 4, 12]


def test_priority_is_the_weighted_sum_and_a_missing_score_counts_as_neutral() -> None:
    table = tasks(2, features=[{"a": 1.0, "b": 2}, {"b": 4}])
    assert column("task_priority", {"weights": {"a": -2, "b": 0.5}}, "priority", table) == [-1.0, 1.0]


def test_default_weights_are_those_of_the_scores_before_it() -> None:
    table = tasks(1, num_groups=[4], prompt=["a b c d"])
    chain = task_chain({"quality_score": {"measures": ["length"]}}, "usage_frequency", "task_priority")
    assert chain.run(table).decisions["priority"].to_pylist() == [1.0 - 0.5 * 0.5]
    with pytest.raises(
        ConfigError, match=r"stage 1 of the pipeline \(task_priority\): no stage before this one scores"
    ):
        task_chain("task_priority")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"quality_score": {"measures": []}}, "name a measure or a column"),
        ({"quality_score": {"min_words": 9, "max_words": 3}}, "min_words 9 is above max_words 3"),
        ({"quality_score": {"columns": {"x": [1, 1]}}}, r"the range of x is empty: \[1, 1\]"),
        ({"difficulty_score": {"features": {"x": [2, 2]}}}, "the range of x is empty"),
        ({"difficulty_score": {"prior_group": 2}}, "there is no key 'prior_group'.*did you mean 'prior_groups'"),
        ({"usage_frequency": {"of": "steps"}}, "the key 'of' is wrong"),
        ({"task_priority": {"weights": {"a": 0}}}, "all weights are 0"),
        ({"diversity_score": {"embedding": {"path": "x"}}}, "path"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_runs(stage: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task_chain(stage)


def test_a_number_that_no_task_has_is_named_with_those_there_are() -> None:
    with pytest.raises(OperatorError, match=r"no task has the number 'hardness'.*allowed: .*level"):
        task_chain({"task_priority": {"weights": {"hardness": 1}}}).run(tasks(1, features=[{"level": 2}]))
    with pytest.raises(OperatorError, match="'level' is not a number in every task"):
        task_chain({"task_priority": {"weights": {"level": 1}}}).run(tasks(1, features=[{"level": "high"}]))


def test_neighbours_are_those_by_cosine_and_a_row_is_not_its_own() -> None:
    vectors = np.array([[1, 0], [2, 0], [0, 1], [-1, 0]], np.float32)
    mean, nearest = neighbour_similarities(vectors, np.arange(4), 2, center=False)
    assert nearest.tolist() == [1.0, 1.0, 0.0, 0.0]
    assert mean.tolist() == [0.5, 0.5, 0.0, 0.0]
    mean, nearest = neighbour_similarities(vectors[:1], np.arange(1), 2, center=True)
    assert (mean.tolist(), nearest.tolist()) == ([0.0], [0.0])


def test_a_large_set_is_compared_with_a_part_of_it() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(50, 8)).astype(np.float32)
    some = np.array([3, 17, 40])
    _, nearest = neighbour_similarities(vectors, some, 1, center=False)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarity = unit @ unit[some].T
    similarity[some, np.arange(3)] = -1
    assert nearest == pytest.approx(np.clip(similarity.max(axis=1), 0, 1), abs=1e-6)


def test_diversity_is_one_minus_the_mean_similarity() -> None:
    vectors = {"a": [1.0, 0.0], "b": [1.0, 0.0], "c": [0.0, 1.0]}

    def embed(model: str | None, max_tokens: int, ids: Any, texts: Any) -> Any:
        assert (model, max_tokens) == ("some/model", 7)
        return np.array([vectors[text] for text in texts], np.float32)

    args = {"embedding": {"model": "some/model", "max_tokens": 7}, "neighbours": 1, "center": False}
    stage = resolve_stage("diversity_score", args)
    stage.prepare(StageContext(embed=embed))
    outcome = stage.apply(tasks(3, prompt=["a", "b", "c"]))
    assert outcome.columns["diversity"].to_pylist() == [0.0, 0.0, 1.0]
    assert outcome.columns["nearest_similarity"].to_pylist() == [1.0, 1.0, 0.0]


def test_a_chain_without_an_encoder_reports_it() -> None:
    with pytest.raises(
        OperatorError, match=r"no encoder of texts is available here; use diversity_score in pipelines.task"
    ):
        task_chain("diversity_score").run(tasks(2))


def test_scores_never_hold_nan() -> None:
    quality = column("quality_score", {"measures": ["char_repetition"]}, "quality", tasks(1, prompt=["short"]))
    assert quality == [None] and not any(math.isnan(value) for value in quality if value is not None)
