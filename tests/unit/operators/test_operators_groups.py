"""Operators that look at whole groups, against numbers worked out by hand."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

from operators.chain.build import build_chain
from operators.chain.resolve import resolve_stage
from rftdata.errors import ConfigError
from tests.support.batches import batch_of_groups
from tests.unit.operators.test_operators_experience import outcome, reasons


def bound(name: str, args: object, table: pa.Table) -> dict[str, list[object]]:
    """The columns that a stage gives, after it was checked against the batch as a chain does it."""
    operator = resolve_stage(name, args)
    operator.validate_schema(table.schema)
    found = operator.apply(table)
    assert found.reasons.null_count == table.num_rows
    return {column: values.to_pylist() for column, values in found.columns.items()}


def test_the_pass_rate_counts_rollouts_whose_reward_is_above_the_bound() -> None:
    found = bound("pass_rate", None, batch_of_groups([0, 1, 1, 0.5], [0, 0], [None, math.nan], [None, 1]))
    assert found["pass_rate"] == [0.75] * 4 + [0.0] * 2 + [None] * 2 + [1.0] * 2
    assert found["num_correct"] == [3] * 4 + [0] * 2 + [None] * 2 + [1] * 2


def test_the_pass_rate_of_a_metric() -> None:
    table = batch_of_groups(
        [0, 0, 0, 0], metrics=['{"accuracy": 0.9}', '{"accuracy": 0.4}', "{}", '{"accuracy": true}']
    )
    found = bound("pass_rate", {"column": "metrics.accuracy", "correct_above": 0.5}, table)
    assert found["pass_rate"] == pytest.approx([2 / 3] * 4)
    assert found["num_correct"] == [2] * 4


def test_a_rollout_of_several_turns_counts_once_with_the_mean_of_its_turns() -> None:
    table = batch_of_groups([1, 0, 0, 0], rollout_index=[0, 0, 0, 1], turn_index=[0, 1, 2, 0])
    assert bound("pass_rate", {"correct_above": 0.3}, table)["pass_rate"] == [0.5] * 4
    assert bound("pass_rate", {"correct_above": 0.4}, table)["pass_rate"] == [0.0] * 4


def test_roles_of_a_group_are_compared_with_themselves() -> None:
    # x wins both games of the first group and one of the second; o's rewards are the opposite. The mean of a game is 0.
    table = batch_of_groups(
        [1, -1, 1, -1], [1, -1, -1, 1], rollout_index=[0, 0, 1, 1] * 2, turn_index=[0, 1] * 4, role=["x", "o"] * 4
    )
    assert bound("pass_rate", None, table)["pass_rate"] == [1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 0.5, 0.5]
    assert [reason is None for reason in reasons("drop_zero_variance_groups", {}, table)] == [False] * 4 + [True] * 4
    normalised = bound("normalize_reward", {"method": "rank"}, table)["reward"]
    assert normalised == [0.5] * 4 + [1.0, 0.0, 0.0, 1.0]
    chain = build_chain([{"sql": "SELECT * FROM batch WHERE role = 'x' AND reward > 0"}])
    assert chain.run(table).decisions["kept"].to_pylist() == [True, False, True, False, True, False, False, False]


def test_the_pass_rate_is_a_column_for_the_next_stage() -> None:
    chain = build_chain([{"pass_rate": {}}, {"threshold": {"column": "pass_rate", "max": 0.6}}])
    result = chain.run(batch_of_groups([0, 1], [1, 1]))
    assert result.decisions["kept"].to_pylist() == [True, True, False, False]
    assert result.decisions["reason"].to_pylist()[2] == "pass_rate 1 > max 0.6"
    assert result.scores[0].table["pass_rate"].to_pylist() == [0.5, 0.5, 1.0, 1.0]


def test_dynamic_sampling_keeps_groups_that_are_neither_all_correct_nor_all_wrong() -> None:
    table = batch_of_groups([0, 1, 1], [1, 1, 1], [0, 0, -1], [None, math.nan, None], [1])
    assert reasons("balance_groups", {}, table) == [
        *[None] * 3,
        *["3 of 3 rollouts are correct: the pass rate is not below 1"] * 3,
        *["0 of 3 rollouts are correct: the pass rate is not above 0"] * 3,
        *["no rollout of the group has a value of reward"] * 3,
        "1 of 1 rollouts are correct: the pass rate is not below 1",
    ]


def test_the_bounds_of_dynamic_sampling_are_not_in_the_range() -> None:
    args = {"column": "metrics.accuracy", "correct_above": 0.5, "min_pass_rate": 0.25, "max_pass_rate": 0.75}
    right, wrong = '{"accuracy": 1}', '{"accuracy": 0}'
    table = batch_of_groups(
        [0] * 4, [0] * 4, [0] * 4, metrics=[right] + [wrong] * 3 + [right] * 2 + [wrong] * 2 + [right] * 3 + [wrong]
    )
    found = outcome("balance_groups", args, table).reasons.to_pylist()
    assert [reason is None for reason in found] == [False] * 4 + [True] * 4 + [False] * 4


def test_the_surplus_side_of_a_group_loses_its_last_rollouts() -> None:
    surplus = "surplus: the group has fewer rollouts that are not {}"
    table = batch_of_groups([1, 0, 1, None, 1], [0, 0, 1])
    assert reasons("balance_groups", {"equalize": True}, table) == [
        None,
        None,
        surplus.format("correct"),
        "neither correct nor wrong: it has no value",
        surplus.format("correct"),
        None,
        surplus.format("wrong"),
        None,
    ]


def test_the_surplus_does_not_depend_on_the_order_of_the_rows() -> None:
    table = batch_of_groups([1, 0, 1, 0, 1, 1]).take([5, 3, 0, 1, 4, 2])
    kept = [
        row
        for row, reason in zip([5, 3, 0, 1, 4, 2], reasons("balance_groups", {"equalize": True}, table))
        if not reason
    ]
    assert sorted(kept) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("args", "groups", "expected"),
    [
        # Mean 2, deviation with R − 1: sqrt((1 + 0 + 1) / 2) = 1.
        ({"eps": 0}, [[1, 2, 3]], [-1, 0, 1]),
        # Mean 0.5, deviation sqrt(4 · 0.25 / 3) = 0.57735.
        ({"eps": 0}, [[0, 1, 0, 1]], [-0.8660254, 0.8660254, -0.8660254, 0.8660254]),
        ({}, [[0.1, 0.1, 0.1]], [0, 0, 0]),
        ({}, [[7]], [0]),
        ({"eps": 0}, [[1, 3, None]], [-0.70710678, 0.70710678, None]),
        ({"method": "min_max"}, [[1, 2, 5]], [0, 0.25, 1]),
        ({"method": "min_max"}, [[2, 2]], [0.5, 0.5]),
        ({"method": "min_max", "by": "batch"}, [[0, 1], [4, 2]], [0, 0.25, 1, 0.5]),
        ({"method": "rank"}, [[10, 30, 20]], [0, 1, 0.5]),
        # Places 1 to 5: the three equal ones share (2 + 3 + 4) / 3 = 3.
        ({"method": "rank"}, [[5, 1, 5, 9, 5]], [0.5, 0, 0.5, 1, 0.5]),
        ({"method": "rank"}, [[3], [1, 2]], [0.5, 0, 1]),
        ({"method": "rank", "by": "batch"}, [[3], [1, 2]], [1, 0, 0.5]),
    ],
)
def test_rewards_on_one_scale(args: object, groups: list[list[float | None]], expected: list[float | None]) -> None:
    found = outcome("normalize_reward", args, batch_of_groups(*groups)).columns["reward"].to_pylist()
    assert found == pytest.approx(expected)


def test_what_is_no_number_is_not_counted_and_stays_what_it_is() -> None:
    for method in ("z_score", "min_max", "rank"):
        table = batch_of_groups([0, 1, math.nan, math.inf, None], [None])
        found = outcome("normalize_reward", {"method": method}, table).columns["reward"].to_pylist()
        assert found[0] < found[1]
        assert math.isnan(found[2])
        assert found[3:] == [math.inf, None, None]


def test_turns_of_a_rollout_get_the_place_of_their_mean() -> None:
    table = batch_of_groups([0, 1, 1, 2], rollout_index=[0, 0, 1, 2], turn_index=[0, 1, 0, 0])
    assert outcome("normalize_reward", {"method": "min_max"}, table).columns["reward"].to_pylist() == pytest.approx(
        [0, 0, 1 / 3, 1]
    )


@pytest.mark.parametrize(
    "name", ["pass_rate", "balance_groups", "normalize_reward", "sample", "dedup_exact", "dedup_near"]
)
def test_an_empty_batch_is_decided(name: str) -> None:
    args = {"sample": {"fraction": 0.5}, "balance_groups": {"equalize": True}}.get(name, {})
    assert len(outcome(name, args, batch_of_groups()).reasons) == 0


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"balance_groups": {"min_pass_rate": 0.5, "max_pass_rate": 0.5}}, r"min_pass_rate 0.5 is not below"),
        ({"balance_groups": {"column": "response"}}, r"'response' is not a number"),
        ({"pass_rate": {"column": "reward - avg(reward) OVER ()"}}, r"reads other rows than its own"),
        ({"pass_rate": {"column": "accuracy"}}, r"reads the column 'accuracy', which the batch does not have"),
        ({"normalize_reward": {"method": "zscore"}}, r"the key 'method' is wrong: .*'z_score', 'min_max' or 'rank'"),
    ],
)
def test_wrong_arguments_are_refused(stage: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])
