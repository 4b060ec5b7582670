"""Operators that compute or judge numbers of a row: thresholds, shaping, priorities, tags."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from operators.chain.build import build_chain
from rftdata.errors import ConfigError
from tests.support.batches import batch_of_groups, replaced, stored
from tests.unit.operators.test_operators_experience import outcome, reasons
from tests.unit.operators.test_operators_groups import bound

QUALITY = ['{"quality": 0.5}', '{"quality": 0}', "{}", None]


def test_stale_rows_are_dropped_and_those_without_a_policy_stay() -> None:
    table = batch_of_groups([0] * 4, staleness=[0, 2, 3, None])
    assert reasons("drop_stale", {"max": 2}, table) == [None, None, "staleness 3 > max 2", None]


def test_a_threshold_on_a_metric_drops_what_has_none_by_default() -> None:
    table = batch_of_groups([0] * 4, metrics=QUALITY)
    expected = [None, "metrics.quality 0 < min 0.3", "metrics.quality is null", "metrics.quality is null"]
    assert reasons("threshold", {"column": "metrics.quality", "min": 0.3}, table) == expected
    expected[2:] = [None, None]
    assert reasons("threshold", {"column": "metrics.quality", "min": 0.3, "null": "keep"}, table) == expected


def test_a_threshold_on_a_formula_and_on_what_is_no_number() -> None:
    table = batch_of_groups([0, 1, math.nan, math.inf], num_response_tokens=[10, 20, 30, 40])
    assert reasons("threshold", {"column": "num_response_tokens / 10", "max": 3}, table)[3] == (
        "num_response_tokens / 10 = 4 > max 3"
    )
    assert reasons("threshold", {"column": "reward", "max": 5}, table) == [
        None,
        None,
        "reward is NaN",
        "reward inf > max 5",
    ]


def test_clipping_bounds_rewards_and_leaves_what_is_no_number() -> None:
    table = batch_of_groups([-3, 0.5, 3, math.inf, -math.inf, None, math.nan])
    found = outcome("clip_reward", {"min": -1, "max": 1}, table).columns["reward"].to_pylist()
    assert found[:6] == [-1.0, 0.5, 1.0, 1.0, -1.0, None]
    assert math.isnan(found[6])
    assert outcome("clip_reward", {"max": 0}, batch_of_groups([-3, 3])).columns["reward"].to_pylist() == [-3.0, 0.0]


def test_shaping_by_a_formula_keeps_rewards_where_a_metric_is_missing() -> None:
    table = batch_of_groups([1, 1, 1, None], metrics=QUALITY, num_response_tokens=[600, 10, 10, 10])
    formula = "reward + 0.1 * metrics.quality - 0.05 * (num_response_tokens > 512)::INT"
    assert bound("reward_shaping", {"formula": formula}, table)["reward"] == pytest.approx([1.0, 1.0, 1.0, None])


def test_shaping_can_drop_rows_instead() -> None:
    table = batch_of_groups([1, 1, 1, 1], metrics=QUALITY)
    result = outcome("reward_shaping", {"formula": "reward / metrics.quality", "missing": "drop"}, table)
    assert result.columns["reward"].to_pylist()[0] == 2.0
    assert result.reasons.to_pylist() == [
        None,
        "the formula reward / metrics.quality gives inf",
        "the formula reward / metrics.quality gives null",
        "the formula reward / metrics.quality gives null",
    ]


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("reward + 2 * metrics.quality", [2.0, 1.0, 1.0]),
        ("reward - 2 * metrics.quality", [0.0, 1.0, 1.0]),
        ("reward * (2 * metrics.quality)", [1.0, 0.0, 1.0]),
        # A division by nothing leaves the reward as it is.
        ("reward / (4 * metrics.quality)", [0.5, 1.0, 1.0]),
    ],
)
def test_adding_subtracting_multiplying_and_dividing_by_a_weighted_metric(formula: str, expected: list[float]) -> None:
    table = batch_of_groups([1, 1, 1], metrics=QUALITY[:3])
    assert bound("reward_shaping", {"formula": formula}, table)["reward"] == expected


def test_a_shaped_reward_is_reported_and_what_the_verifier_gave_stays() -> None:
    table = batch_of_groups([1, 0], metrics=['{"quality": 1}', "{}"])
    stages = [{"reward_shaping": {"formula": "0.5 * (reward + metrics.quality)"}}, {"clip_reward": {"max": 0.75}}]
    assert build_chain(stages).run(table).decisions["reward"].to_pylist() == [0.75, None]


def test_priorities_come_from_a_formula_over_the_group() -> None:
    table = batch_of_groups([0, 1, 1, None], [2])
    args = {"formula": "abs(reward - avg(reward) OVER (PARTITION BY group_id))", "missing": -1}
    assert bound("priority", args, table)["priority"] == pytest.approx([2 / 3, 1 / 3, 1 / 3, -1, 0])
    assert bound("priority", {"formula": "1 / reward"}, table)["priority"] == [0.0, 1.0, 1.0, 0.0, 0.5]


def test_tags_are_scores_that_later_stages_and_queries_see() -> None:
    columns = {
        "is_long": "num_response_tokens > 10",
        "words": "len(string_split(response, ' '))",
        "kind": "finish_reason",
    }
    table = batch_of_groups([0, 1], num_response_tokens=[10, 11])
    chain = build_chain([{"tag": {"columns": columns}}, {"threshold": {"column": "is_long", "min": 1}}])
    result = chain.run(table)
    assert result.decisions["kept"].to_pylist() == [False, True]
    assert result.scores[0].table.drop_columns(["experience_id"]).to_pylist() == [
        {"is_long": False, "words": 7, "kind": "stop"},
        {"is_long": True, "words": 7, "kind": "stop"},
    ]
    assert result.scores[0].table.schema.field("words").type == pa.int64()


def test_a_row_that_divides_by_zero_has_no_value_and_fails_no_batch() -> None:
    table = batch_of_groups([0, 1], num_response_tokens=[4, 0])
    chain = build_chain([{"reward_shaping": {"formula": "7 % num_response_tokens", "missing": "drop"}}])
    decisions = chain.run(table).decisions
    assert decisions["reason"].to_pylist() == [None, "the formula 7 % num_response_tokens gives null"]
    assert decisions["reward"][0].as_py() == 3


def test_a_tag_may_be_a_hash_and_is_the_same_when_it_is_stored() -> None:
    chain = build_chain([{"tag": {"columns": {"h": "hash(response)"}}}, {"sql": "FROM batch WHERE h = hash(response)"}])
    table = batch_of_groups([0] * 20)
    first = chain.run(table)
    assert max(first.scores[0].table["h"].to_pylist()) > 2**63
    assert first.decisions["kept"].to_pylist() == [True] * 20
    again = chain.run(table, stored_scores=stored(first.scores))
    assert (again.scores, again.decisions["kept"].to_pylist()) == ([], [True] * 20)


def test_tags_that_are_stored_are_not_computed_again() -> None:
    chain = build_chain([{"tag": {"columns": {"words": "len(string_split(response, ' '))"}}}])
    table = batch_of_groups([0, 1])
    (scores,) = chain.run(table, stored_scores=replaced(chain, table, {100: {"words": 42}})).scores
    assert scores.table["experience_id"].to_pylist() == [101]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"drop_stale": {}}, r"the key 'max' is missing"),
        ({"drop_stale": {"max": -1}}, r"the key 'max' is wrong"),
        ({"threshold": {"column": "reward"}}, r"give min, max or both"),
        ({"threshold": {"column": "reward", "min": 2, "max": 1}}, r"min 2 is above max 1"),
        (
            {"threshold": {"column": "quality", "min": 0}},
            r"'quality', which the batch does not have; allowed: experience_id",
        ),
        ({"threshold": {"column": "response", "min": 0}}, r"'response' is not a number"),
        ({"threshold": {"column": "reward", "min": math.nan}}, r"'min' is wrong: .*a finite number"),
        ({"clip_reward": {"max": math.inf}}, r"'max' is wrong: .*a finite number"),
        ({"reward_threshold": {"min": math.nan}}, r"'min' is wrong: .*a finite number"),
        ({"pass_rate": {"correct_above": math.nan}}, r"'correct_above' is wrong: .*a finite number"),
        ({"mix": {"shares": {"a": math.nan}}}, r"'shares.a' is wrong: .*a finite number"),
        ({"human_review": {"timeout": math.inf}}, r"'timeout' is wrong: .*a finite number"),
        ({"llm_judge": {"endpoint": "policy", "scale": [0, math.inf]}}, r"'scale.1' is wrong: .*a finite number"),
        ({"clip_reward": {}}, r"give min, max or both"),
        ({"reward_shaping": {"formula": "reward +"}}, r"stage 1 .*not an expression: syntax error"),
        (
            {"reward_shaping": {"formula": "reward", "missing": "skip"}},
            r"the key 'missing' is wrong: .*'keep' or 'drop'",
        ),
        ({"priority": {"formula": "random()"}}, r"another value every time"),
        ({"priority": {"formula": "1", "missing": math.nan}}, r"the key 'missing' is wrong"),
        ({"tag": {"columns": {}}}, r"the key 'columns' is wrong"),
        ({"tag": {"columns": {"reward": "1"}}}, r"'reward' is a column of every batch"),
        ({"tag": {"columns": {"rank": "rank() OVER (ORDER BY reward)"}}}, r"reads other rows than its own"),
        ({"tag": {"columns": {"parts": "string_split(response, ' ')"}}}, r"neither a number nor a text"),
    ],
)
def test_wrong_arguments_are_refused(stage: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])


@pytest.mark.parametrize(
    "stage",
    [
        {"drop_stale": {"max": 1}},
        {"threshold": {"column": "reward", "min": 0}},
        {"clip_reward": {"min": 0}},
        {"reward_shaping": {"formula": "reward + metrics.quality", "missing": "drop"}},
        {"priority": {"formula": "reward - avg(reward) OVER ()"}},
        {"tag": {"columns": {"half": "reward / 2"}}},
    ],
)
def test_an_empty_batch_and_one_without_any_value_are_decided(stage: dict[str, object]) -> None:
    chain = build_chain([stage], require_reward=False)
    assert chain.run(batch_of_groups(staleness=[])).decisions.num_rows == 0
    nothing = batch_of_groups([None, None], metrics=[None, None], staleness=[None, None])
    assert chain.run(nothing).decisions.num_rows == 2
