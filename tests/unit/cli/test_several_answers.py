"""mean@n, best@k and pass@k against every choice of k answers, and their standard errors over questions by hand."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import mean

import pytest

from rftcore.reporting.several_answers import best_at_k, measures, pass_at_k


@pytest.mark.parametrize("rewards", [[0.0], [1.0, 0.0, 0.0], [0.5, 1.0, 1.0, 0.0, 0.25], [1.0] * 4, [0.0] * 6])
def test_estimates_are_means_over_every_choice_of_k_answers(rewards: list[float]) -> None:
    passed = sum(reward >= 1 for reward in rewards)
    for k in range(1, len(rewards) + 1):
        best = [max(chosen) for chosen in combinations(rewards, k)]
        assert best_at_k(rewards, k) == pytest.approx(mean(best))
        assert pass_at_k(len(rewards), passed, k) == pytest.approx(mean(float(reward >= 1) for reward in best))


def test_each_question_counts_once_in_means_and_standard_errors() -> None:
    rewards = {7: [1.0, 0.0, 0.0, 0.0], 8: [1.0, 1.0, 1.0, 1.0], 9: [0.5, 0.5, 0.0, 0.0]}
    total, pass_at, best_at = measures(rewards, 1.0)
    assert list(pass_at) == list(best_at) == [1, 2, 4]
    assert total.value == pytest.approx((0.25 + 1 + 0.25) / 3)
    # Sample variance of 1/4, 1, 1/4: 3/16.
    assert total.standard_error == pytest.approx(math.sqrt(3 / 16 / 3))
    assert pass_at[2].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert best_at[4].value == pytest.approx((1 + 1 + 0.5) / 3)
    assert measures(rewards, 0.5)[1][4].value == 1.0
    one, _, _ = measures({1: [0.0, 1.0, 1.0]}, 1.0)
    assert (one.value, one.standard_error) == (pytest.approx(2 / 3), None)
