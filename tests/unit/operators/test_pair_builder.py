"""Preference pairs from group rewards, against groups small enough to check by eye."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from operators.chain.build import build_chain
from operators.experience.pair_builder import PairBuilder
from rftdata.errors import ConfigError
from tests.support.batches import batch_of_groups


def built(*groups: Sequence[float | None], columns: dict[str, Any] | None = None, **args: Any) -> list[tuple[int, int]]:
    """Pairs as (chosen, rejected); experiences count from 100 over all groups."""
    operator = PairBuilder.from_args(args)
    assert isinstance(operator, PairBuilder)
    return [(pair.chosen_id, pair.rejected_id) for pair in operator.pairs(batch_of_groups(*groups, **(columns or {})))]


def lengths(*values: int) -> dict[str, Any]:
    return {"num_trained_tokens": list(values)}


def test_the_better_answer_is_chosen_where_the_margin_is_reached() -> None:
    # Group 0: 1.0 over 0.2 (0.8) and over 0.6 (0.4), 0.6 over 0.2 (0.4). Group 1: nothing differs by a half.
    assert built([0.2, 1.0, 0.6], [0.5, 0.9]) == [(101, 100)]
    assert built([0.2, 1.0, 0.6], [0.5, 0.9], margin=0.4) == [(101, 100), (101, 102), (102, 100), (104, 103)]


def test_a_margin_that_is_reached_exactly_counts_whatever_floating_point_makes_of_it() -> None:
    assert 0.3 - 0.1 < 0.2
    assert built([0.3, 0.1], margin=0.2) == [(100, 101)]


def test_ties_make_no_pair() -> None:
    assert built([1, 1, 1], [0, 0], [0.5, 0.5 + 1e-12], margin=1e-6) == []
    assert built([1, 1], margin=1e-12) == []


def test_a_correction_turns_a_pair_round() -> None:
    assert built([1, 0]) == [(100, 101)]
    assert built([0, 1]) == [(101, 100)]


def test_a_group_has_at_most_max_pairs_and_the_largest_differences_come_first() -> None:
    assert built([0.0, 0.3, 0.7, 1.0], margin=0.1, max_pairs=2) == [(103, 100), (102, 100)]


def test_equal_pairs_are_spread_over_the_rollouts() -> None:
    # Rewards 1, 1, 0, 0: four equal candidates. Two pairs use all four rollouts.
    pairs = built([1, 1, 0, 0], max_pairs=2, ties="order")
    assert pairs == [(100, 102), (101, 103)]
    assert built([1, 1, 0, 0], max_pairs=9, ties="order") == [(100, 102), (101, 103), (100, 103), (101, 102)]


def test_of_equal_pairs_those_closest_in_length_are_taken() -> None:
    columns = lengths(9, 3, 8, 4)
    assert built([1, 1, 0, 0], max_pairs=2, columns=columns) == [(100, 102), (101, 103)]
    assert built([1, 1, 0, 0], max_pairs=1, columns=lengths(9, 3, 2, 30)) == [(101, 102)]
    assert built([1, 1, 0, 0], max_pairs=1, columns=lengths(9, 3, 2, 30), ties="order") == [(100, 102)]


@pytest.mark.parametrize(("ratio", "expected"), [(None, 2), (3, 2), (2.9, 1), (1, 0)])
def test_pairs_of_very_different_length_are_not_built(ratio: float | None, expected: int) -> None:
    # The only chosen one has 6 tokens, the rejected ones 2 (ratio 3) and 8 (ratio 1.33).
    assert len(built([1, 0, 0], columns=lengths(6, 2, 8), max_length_ratio=ratio)) == expected


def test_an_empty_answer_is_infinitely_far_from_any_other() -> None:
    assert built([1, 0], columns=lengths(0, 5), max_length_ratio=100) == []


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), -float("inf")])
def test_rows_without_a_finite_reward_are_left_out(reward: float | None) -> None:
    assert built([1, reward, 0]) == [(100, 102)]


def test_rollouts_of_several_turns_and_answers_to_another_prompt_are_left_out() -> None:
    turns = {"rollout_index": [0, 0, 1, 2], "turn_index": [0, 1, 0, 0]}
    assert built([1, 1, 0, 1], columns=turns) == [(103, 102)]
    assert built([1, 0, 0], columns={"prompt": ["a", "b", "a"]}) == [(100, 102)]


def test_as_a_stage_it_drops_what_no_pair_uses_and_states_why() -> None:
    chain = build_chain([{"pair_builder": {"margin": 0.5, "max_pairs": 1, "ties": "order"}}], min_group_size=1)
    rows = chain.run(batch_of_groups([1, 1, 0], [0.5, 0.4])).decisions.to_pylist()
    assert [row["kept"] for row in rows] == [True, False, True, False, False]
    assert {row["stage"] for row in rows if not row["kept"]} == {"pair_builder"}
    assert rows[1]["reason"] == "no pair of its group uses it (margin 0.5, at most 1 pairs)"
    assert all(row["reward"] is None for row in rows)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"margin": 0}, "margin"),
        ({"max_pairs": 0}, "max_pairs"),
        ({"ties": "coin"}, "ties"),
        ({"max_length_ratio": 0.5}, "max_length_ratio"),
        ({"margins": 1}, "did you mean 'margin'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PairBuilder.from_args(args)
