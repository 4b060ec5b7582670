"""The built-in operators on experiences, against hand-made numbers and degenerate groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pyarrow as pa
import pytest

from operators.base import Operator, StageOutcome
from operators.chain.resolve import resolve_stage
from tests.support.batches import batch_of_groups


def outcome(name: str, args: object, table: pa.Table) -> StageOutcome:
    operator: Operator = resolve_stage(name, args)
    assert set(operator.reads or ()) <= set(table.column_names)
    return operator.apply(table)


def reasons(name: str, args: object, table: pa.Table) -> list[str | None]:
    found: list[str | None] = outcome(name, args, table).reasons.to_pylist()
    return found


def test_truncated_responses_are_dropped_and_unknown_endings_stay() -> None:
    table = batch_of_groups([0, 0, 0, 0], finish_reason=["stop", "length", "abort", None])
    assert reasons("drop_truncated", None, table) == [None, "finish_reason is length", "finish_reason is abort", None]
    only_abort = reasons("drop_truncated", {"finish_reasons": ["abort"]}, table)
    assert only_abort == [None, None, "finish_reason is abort", None]


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ([0, 1, 0], None),
        ([0] * 8, "reward is 0 in all 8 rollouts of the group"),
        ([0.25] * 2, "reward is 0.25 in all 2 rollouts of the group"),
        ([1], "the group has one rollout (reward 1), which has nothing to be compared with"),
        ([None, None], "no rollout of the group has a reward"),
        ([math.nan, math.nan], "no rollout of the group has a reward"),
        ([math.nan, 1, 1], "reward is 1 in all 3 rollouts of the group"),
        ([None, 1, 0], None),
        ([math.inf, 1, 1], "reward is 1 in all 3 rollouts of the group"),
        ([0, 1e-9], "rewards of the 2 rollouts of the group lie between 0 and 1e-09, no more than 1e-06 apart"),
    ],
)
def test_groups_without_spread_are_dropped_whole(rewards: Sequence[float | None], reason: str | None) -> None:
    table = batch_of_groups([0, 1], rewards)
    assert reasons("drop_zero_variance_groups", {}, table) == [None, None, *[reason] * len(rewards)]


def test_rollouts_are_compared_and_not_their_turns() -> None:
    table = batch_of_groups([0, 1, 0, 1], rollout_index=[0, 0, 1, 1], turn_index=[0, 1, 0, 1])
    assert reasons("drop_zero_variance_groups", {}, table) == ["reward is 0.5 in all 2 rollouts of the group"] * 4


def test_rows_of_a_group_need_not_be_neighbours() -> None:
    table = batch_of_groups([0, 1], [1, 1]).take([2, 0, 3, 1])
    same = "reward is 1 in all 2 rollouts of the group"
    assert reasons("drop_zero_variance_groups", {}, table) == [same, None, same, None]


def test_reward_threshold_names_the_bound_that_was_broken() -> None:
    table = batch_of_groups([0.1, 0.5, 0.9, None, math.nan])
    assert reasons("reward_threshold", {"min": 0.5, "max": 0.8}, table) == [
        "reward 0.1 < min 0.5",
        None,
        "reward 0.9 > max 0.8",
        "reward is null",
        "reward is NaN",
    ]


def test_length_penalty_is_the_soft_overlong_punishment_of_dapo() -> None:
    table = batch_of_groups([1, 1, 1, 1, None], num_trained_tokens=[60, 80, 90, 101, 90])
    result = outcome("length_penalty", {"max_tokens": 100, "cache_tokens": 20}, table)
    assert result.reasons.null_count == 5
    assert result.columns["reward"].to_pylist() == [1.0, 1.0, 0.5, 0.0, None]
    halved = outcome("length_penalty", {"max_tokens": 100, "cache_tokens": 20, "weight": 0.5}, table)
    assert halved.columns["reward"].to_pylist() == [1.0, 1.0, 0.75, 0.5, None]
