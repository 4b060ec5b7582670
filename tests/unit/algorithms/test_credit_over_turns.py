"""Credit over turns: advantages of `returns` and `turn_rank` against loops in NumPy that follow the formulas, and against numbers by hand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import numpy as np
import pytest
import torch

from rftcore.algorithms import ADVANTAGES, build_algorithm
from rftcore.algorithms.base import Signals, StepBatch
from rftdata.errors import RftError
from tests.support.algorithms import step_batch
from tests.unit.algorithms.test_turns_in_sequences import batches

Turns = dict[tuple[int, int], list[float]]


def credit(name: str, batch: StepBatch, **keys: Any) -> list[float]:
    part = ADVANTAGES.load(name)
    found: list[float] = part(part.Config(**keys))(batch, Signals()).advantages_N.tolist()
    return found


def returns_of(rewards: Turns, gamma: float) -> Turns:
    return {
        key: [sum(gamma**later * reward for later, reward in enumerate(of[t:])) for t in range(len(of))]
        for key, of in rewards.items()
    }


def expected_returns(rewards: Turns, gamma: float) -> dict[tuple[int, int, int], float]:
    found = {}
    returns = returns_of(rewards, gamma)
    for group in {g for g, _ in returns}:
        rollouts = {key: np.array(of) for key, of in returns.items() if key[0] == group}
        mean = np.mean([of.mean() for of in rollouts.values()])
        variance = sum(((of - mean) ** 2).mean() for of in rollouts.values()) / max(1, len(rollouts) - 1)
        for (_, r), of in rollouts.items():
            for t, value in enumerate(of):
                equal = len(rollouts) < 2 or np.sqrt(variance) < 1e-8
                found[group, r, t] = 0.0 if equal else float((value - mean) / (np.sqrt(variance) + 1e-6))
    return found


def expected_turn_rank(rewards: Turns, gamma: float) -> dict[tuple[int, int, int], float]:
    same: dict[Hashable, list[float]] = defaultdict(list)
    returns = returns_of(rewards, gamma)
    for (g, _), of in returns.items():
        for t, value in enumerate(of):
            same[g, t].append(value)
    found = {}
    for (g, r), of in returns.items():
        for t, value in enumerate(of):
            others = np.array(same[g, t])
            equal = len(others) < 2 or bool(others.max() == others.min())
            found[g, r, t] = 0.0 if equal else float((value - others.mean()) / (others.std(ddof=1) + 1e-6))
    return found


@pytest.mark.parametrize(("name", "expected"), [("returns", expected_returns), ("turn_rank", expected_turn_rank)])
@pytest.mark.parametrize("seed", range(8))
def test_advantages_are_those_of_the_formula(name: str, expected: Any, seed: int) -> None:
    """One row per turn and one per rollout, with turns without tokens; the second group has one to three rollouts."""
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 4, random.integers(1, 5)).tolist() for _ in range(3 + seed % 3)]
    gamma = float(random.choice([0.5, 0.9, 1.0]))
    outcomes = random.choice([-1.0, 0.0, 1.0], len(tokens)).tolist()
    split, whole = batches(tokens, outcomes, seed, token_rewards=True)
    assert split.step_rewards_BA is not None and split.token_rewards_N is not None
    rewards: Turns = defaultdict(list)
    own = split.sum_per_sequence(split.token_rewards_N).double() + split.step_rewards_BA[:, 0].double()
    for b, reward in enumerate(own.tolist()):
        rewards[int(split.group_B[b]), int(split.rollout_B[b])].append(reward)
    place = [(int(split.group_B[b]), int(split.rollout_B[b]), int(split.turn_BA[b, 0])) for b in range(len(own))]
    by_turn = expected(rewards, gamma)
    wanted = [by_turn[place[b]] for b in split.sequence_N.tolist()]
    assert credit(name, split, gamma=gamma) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert credit(name, whole, gamma=gamma) == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    for (g, r), of in rewards.items():
        of[-1] += outcomes[r]
        assert (g, r, len(of) - 1) in by_turn
    by_turn = expected(rewards, gamma)
    wanted = [by_turn[place[b]] for b in split.sequence_N.tolist()]
    assert credit(name, whole, gamma=gamma, outcome="last") == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def turns_of(*rollouts: list[float], groups: list[int] | None = None) -> StepBatch:
    """One token per turn and one row per rollout's turn, with these rewards of turns."""
    places = [(r, t, reward) for r, of in enumerate(rollouts) for t, reward in enumerate(of)]
    return step_batch(
        [0.0] * len(places),
        [0 if groups is None else groups[r] for r, _, _ in places],
        [r for r, _, _ in places],
        turns=[t for _, t, _ in places],
        step_rewards_BA=torch.tensor([reward for _, _, reward in places]),
    )


def test_rollouts_of_equal_sums_and_different_turns_have_small_advantages() -> None:
    # Returns (1, 1) and (1, 0): m = (1 + 0.5) / 2, s² = ((0.0625 + 0.0625) / 2 + (0.0625 + 0.5625) / 2) / 1 = 0.375.
    batch = turns_of([0.0, 1.0], [1.0, 0.0])
    assert credit("returns", batch) == pytest.approx([0.4082476, 0.4082476, 0.4082476, -1.2247429], rel=1e-5)
    # The first turns have equal returns, so nothing is said about them; the second differ by 1, std 0.7071068.
    assert credit("turn_rank", batch) == pytest.approx([0.0, 0.7071058, 0.0, -0.7071058], rel=1e-5)


def test_each_rollout_has_weight_one_whatever_its_number_of_turns() -> None:
    # Returns (3, 2, 1) and (0): m = (2 + 0) / 2 = 1; with one weight per turn it would be 1.5.
    assert credit("returns", turns_of([1.0, 1.0, 1.0], [0.0]), norm="none") == pytest.approx([2.0, 1.0, 0.0, -1.0])


def test_rollouts_of_one_turn_have_the_advantages_of_group() -> None:
    batch = turns_of([1.0], [0.0], [0.5], [2.0], [2.0], groups=[0, 0, 0, 1, 1])
    rewards = step_batch([1.0, 0.0, 0.5, 2.0, 2.0], [0, 0, 0, 1, 1])
    assert credit("returns", batch) == credit("turn_rank", batch) == pytest.approx(credit("group", rewards))


@pytest.mark.parametrize("name", ["returns", "turn_rank"])
@pytest.mark.parametrize(
    "rollouts",
    [[[1.0, 0.0, 1.0]], [[0.5], [0.5], [0.5]], [[0.0, 0.0], [0.0]]],
    ids=["a group of one", "equal returns", "no reward"],
)
def test_a_group_in_which_nothing_differs_has_advantages_of_exactly_zero(
    name: str, rollouts: list[list[float]]
) -> None:
    assert set(credit(name, turns_of(*rollouts))) == {0.0}


@pytest.mark.parametrize("name", ["returns", "turn_rank"])
def test_rollouts_without_rewards_of_turns_are_refused_and_zeros_never_stand_in(name: str) -> None:
    algorithm = build_algorithm("grpo", {"advantage": name})
    assert algorithm.group_relative
    with pytest.raises(RftError, match=r"no step rewards .*, which the algorithm's parts read"):
        algorithm.plan(step_batch([1.0, 0.0]), Signals())


def test_rows_of_experts_take_no_part_in_the_comparison() -> None:
    batch = turns_of([1.0], [0.0], [7.0])
    expert = torch.tensor([False, False, True])
    algorithm = build_algorithm("grpo", {"advantage": "returns", "expert": {"coef": 0.1}})
    plan = algorithm.plan(StepBatch(**{**vars(batch), "expert_B": expert}), Signals())
    assert plan.advantages_N.tolist() == pytest.approx([0.7071058, -0.7071058, 0.0])
