"""Advantages against numbers worked out by hand, and for rollouts and groups that break formulas."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rftcore.algorithms import ADVANTAGES, build_algorithm
from rftcore.algorithms.advantages.best import Best
from rftcore.algorithms.advantages.discounted import Discounted
from rftcore.algorithms.advantages.gae import GAE
from rftcore.algorithms.advantages.gigpo import GiGPO
from rftcore.algorithms.advantages.group import Group
from rftcore.algorithms.advantages.otb import OTB
from rftcore.algorithms.advantages.pass_at_k import PassAtK
from rftcore.algorithms.advantages.remax import ReMax
from rftcore.algorithms.advantages.rollouts import accumulated
from rftcore.algorithms.advantages.turns import Turns
from rftcore.algorithms.base import PER_TURN, Advantage, Signals, StepBatch
from rftdata.errors import RftError
from tests.support.algorithms import step_batch


def advantages(part: type[Advantage], batch: StepBatch, signals: Signals | None = None, **keys: Any) -> list[float]:
    found: list[float] = part(part.Config(**keys))(batch, signals or Signals()).advantages_N.tolist()
    return found


class TestGroup:
    @pytest.mark.parametrize(
        ("keys", "rewards", "expected"),
        [
            # Means of the others: (2 + 6) / 2, (1 + 6) / 2, (1 + 2) / 2.
            ({"baseline": "leave-one-out", "scale": "none"}, [1, 2, 6], [-3.0, -1.5, 4.5]),
            # log mean exp(0, log 3) = log((1 + 3) / 2) = log 2.
            ({"baseline": "log-mean-exp", "scale": "none"}, [0, math.log(3)], [-0.6931472, 0.4054651]),
            # τ = 2: 2 log((1 + 3) / 2) with r / τ = 0 and log 3.
            ({"baseline": "log-mean-exp", "scale": "none", "tau": 2}, [0, 2 * math.log(3)], [-1.3862944, 0.8109302]),
            ({"baseline": "none", "scale": "none"}, [1, -2], [1.0, -2.0]),
            ({"scale": "none", "shift": -0.1}, [1, 0], [0.6, -0.4]),
            ({"scale": "none", "shift": -0.1}, [0.3, 0.3], [0.1, 0.1]),
            ({"scale": "none", "shift": -0.1}, [0.3], [0.1]),
            ({"baseline": "length-weighted", "scale": "none"}, [1, 0, 4], [-0.6666667, -1.6666667, 2.3333333]),
            # std 0.7071068 is not above 0.8.
            ({"skip_std": 0.8}, [1, 0], [0.0, 0.0]),
        ],
    )
    def test_baselines(self, keys: dict[str, Any], rewards: list[float], expected: list[float]) -> None:
        assert advantages(Group, step_batch(rewards), **keys) == pytest.approx(expected, abs=1e-6)

    def test_a_length_weighted_baseline_counts_the_tokens_of_whole_rollouts(self) -> None:
        # Rollout 0 has two turns of 2 and 4 tokens, rollout 1 one of 2: b = (6 · 1 + 2 · 5) / 8 = 2.
        batch = step_batch([1.0, 1.0, 5.0], rollouts=[0, 0, 1], turns=[0, 1, 0], tokens=[2, 4, 2])
        found = advantages(Group, batch, baseline="length-weighted", scale="none")
        assert found == pytest.approx([-1.0] * 6 + [3.0] * 2)

    def test_rescale_makes_up_for_groups_that_differ_in_nothing(self) -> None:
        # Two of four groups differ, with 4 of 7 rollouts: A is 7 / 4 times as large. A turn does not count for itself.
        batch = step_batch(
            [1.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 5.0],
            [0, 0, 1, 1, 2, 3, 3, 3],
            [0, 1, 0, 1, 0, 0, 0, 1],
            turns=[0, 0, 0, 0, 0, 0, 1, 0],
        )
        plain = advantages(Group, batch, scale="none")
        found = advantages(Group, batch, scale="none", rescale=True)
        assert found == pytest.approx([7 / 4 * value for value in plain]) and plain[:5] == [0.5, -0.5, 0.0, 0.0, 0.0]
        assert advantages(Group, step_batch([1.0, 1.0]), scale="none", rescale=True) == [0.0, 0.0]

    def test_scale_batch_is_one_deviation_for_all_groups(self) -> None:
        # 1, 0, 4, 0: mean 1.25; squares 0.0625 + 1.5625 + 7.5625 + 1.5625 = 10.75; / 3; std 1.8929694.
        found = advantages(Group, step_batch([1, 0, 4, 0], [0, 0, 1, 1]), scale="batch")
        assert found == pytest.approx([0.2641351, -0.2641351, 1.0565404, -1.0565404], abs=1e-6)

    @pytest.mark.parametrize("scale", ["group", "batch"])
    def test_rollouts_that_are_equal_on_average_have_none_where_their_turns_differ(self, scale: str) -> None:
        # Turns 0.3, 0.2, 0.1 and 0.1, 0.2, 0.3: means that differ by rounding at most, and a deviation to divide by of 0.
        batch = step_batch([0.3, 0.2, 0.1, 0.1, 0.2, 0.3], rollouts=[0, 0, 0, 1, 1, 1], turns=[0, 1, 2, 0, 1, 2])
        assert advantages(Group, batch, scale=scale) == [0.0] * 6
        found = advantages(Group, batch, scale="none")
        assert found == pytest.approx([0.1, 0.0, -0.1, -0.1, 0.0, 0.1], abs=1e-6)

    def test_rank_penalty_lowers_the_statistics_of_likely_rollouts(self) -> None:
        # The first is more likely: k = 1, r' = 2 (1 - 0.5 · 1/2) = 1.5 and 1. Mean 1.25, std 0.3535534.
        # A = (2 - 1.25) / 0.3535544, (1 - 1.25) / 0.3535544.
        found = advantages(Group, step_batch([2, 1], behavior=[-1.0, -2.0]), rank_penalty=0.5)
        assert found == pytest.approx([2.1213144, -0.7071048], abs=1e-5)


class TestDiscounted:
    def test_gives_rewards_to_go(self) -> None:
        # γ = 0.5: 0.5 · 1, 1; 0.
        batch = step_batch([1, 0], tokens=[2, 1])
        assert advantages(Discounted, batch, gamma=0.5, whiten=False) == [0.5, 1.0, 0.0]

    def test_whitened_over_the_tokens_of_the_batch(self) -> None:
        # Mean 0.5; variance (0 + 0.25 + 0.25) / 2 = 0.25.
        assert advantages(Discounted, step_batch([1, 0], tokens=[2, 1]), gamma=0.5) == pytest.approx([0, 1, -1])

    def test_go_through_the_turns_of_a_rollout_in_order_and_no_further(self) -> None:
        # Rows: turn 1 (2 tokens, reward 1), another rollout (reward 8), turn 0 (1 token). In time 0.25, 0.5, 1.
        batch = step_batch([1, 8, 5], rollouts=[0, 1, 0], turns=[1, 0, 0], tokens=[2, 1, 1])
        assert advantages(Discounted, batch, gamma=0.5, whiten=False) == [0.5, 1.0, 8.0, 0.25]

    def test_count_the_rewards_of_tokens(self) -> None:
        # 1 - 0.2 at the end, - 0.1 before it.
        batch = step_batch([1], tokens=[2], token_rewards_N=torch.tensor([-0.1, -0.2]))
        assert advantages(Discounted, batch, whiten=False) == pytest.approx([0.7, 0.8])

    def test_baseline_mean_compares_within_the_group_first(self) -> None:
        # ±0.5 at 1 and 3 tokens: mean -0.25, variance (0.5625 + 3 · 0.0625) / 3 = 0.25.
        batch = step_batch([1, 0], tokens=[1, 3])
        assert advantages(Discounted, batch, baseline="mean") == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-6)

    @pytest.mark.parametrize("keys", [{}, {"baseline": "mean"}])
    def test_are_zero_where_nothing_differs(self, keys: dict[str, Any]) -> None:
        assert advantages(Discounted, step_batch([0.1] * 3, tokens=[2, 1, 4]), **keys) == [0.0] * 7
        assert advantages(Discounted, step_batch([3.0]), **keys) == [0.0]

    def test_a_turn_without_tokens_still_has_the_outcome(self) -> None:
        batch = step_batch([0, 1], rollouts=[0, 0], turns=[0, 1], tokens=[2, 0])
        assert advantages(Discounted, batch, gamma=0.5, whiten=False) == [0.5, 1.0]


class TestReMax:
    def test_is_the_reward_to_go_minus_that_of_the_greedy_response(self) -> None:
        batch = step_batch([1, 0], tokens=[2, 1], baseline_rewards_B=torch.tensor([0.25, 0.25]))
        assert advantages(ReMax, batch) == [0.75, 0.75, -0.25]

    def test_counts_the_rewards_of_tokens(self) -> None:
        # 1 - 0.5 - 0.25; 1 - 0.25.
        batch = step_batch(
            [1], tokens=[2], baseline_rewards_B=torch.tensor([0.25]), token_rewards_N=torch.tensor([-0.5, 0.0])
        )
        assert advantages(ReMax, batch) == [0.25, 0.75]

    def test_without_a_greedy_reward_is_refused(self) -> None:
        with pytest.raises(RftError, match=r"no baseline rewards.*a greedy rollout"):
            build_algorithm("remax").plan(step_batch([1.0]), Signals())


class TestGAE:
    values = Signals(values_N=torch.tensor([0.5, 0.2, 0.1]))

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            # δ = 0.9 · 0.2 - 0.5, 0.9 · 0.1 - 0.2, 1 - 0.1 = -0.32, -0.11, 0.9; γλ = 0.72.
            # A = 0.9; -0.11 + 0.72 · 0.9 = 0.538; -0.32 + 0.72 · 0.538 = 0.06736.
            ({"gamma": 0.9, "lam": 0.8}, [0.06736, 0.538, 0.9]),
            ({"gamma": 0.9, "lam": 0.0}, [-0.32, -0.11, 0.9]),
            ({}, [0.5, 0.8, 0.9]),  # 1 - V
        ],
    )
    def test_against_numbers(self, keys: dict[str, Any], expected: list[float]) -> None:
        credit = GAE(GAE.Config(**keys, whiten=False))(step_batch([1], tokens=[3]), self.values)
        assert credit.advantages_N.tolist() == pytest.approx(expected)
        returns = [a + v for a, v in zip(expected, [0.5, 0.2, 0.1], strict=True)]
        assert credit.returns_N is not None and credit.returns_N.tolist() == pytest.approx(returns)

    def test_whitening_leaves_the_returns_alone(self) -> None:
        # A = 0.5, 0.8, 0.9: mean 0.7333333; squares 0.0544444 + 0.0044444 + 0.0277778 = 0.0866667; / 2; std 0.2081666.
        credit = GAE()(step_batch([1], tokens=[3]), self.values)
        assert credit.advantages_N.tolist() == pytest.approx([-1.1208970, 0.3202563, 0.8006407], abs=1e-5)
        assert credit.returns_N is not None and credit.returns_N.tolist() == pytest.approx([1.0, 1.0, 1.0])

    def test_turns_as_one_sequence_or_as_several_are_the_same(self) -> None:
        # Rows in another order than in time: turn 1 first. Values 0.1 | 0.5, 0.2 are those of the turns.
        batch = step_batch([1, 0], rollouts=[4, 4], turns=[1, 0], tokens=[1, 2])
        signals = Signals(values_N=torch.tensor([0.1, 0.5, 0.2]))
        found = advantages(GAE, batch, signals, gamma=0.9, lam=0.8, whiten=False)
        assert found == pytest.approx([0.9, 0.06736, 0.538])

    def test_a_rollout_ends_where_the_next_begins(self) -> None:
        # Each has one token: A = r - V, whatever stands beside it.
        batch, signals = step_batch([1, 0, 2]), Signals(values_N=torch.tensor([0.5, 10.0, 1.0]))
        assert advantages(GAE, batch, signals, whiten=False) == [0.5, -10.0, 1.0]

    @given(
        st.lists(st.tuples(st.floats(-1, 1), st.floats(-1, 1)), min_size=1, max_size=8),
        st.floats(0, 1),
        st.floats(0.1, 1),
    )
    @settings(max_examples=50, deadline=None)
    def test_is_the_sum_of_discounted_errors(self, tokens: list[tuple[float, float]], lam: float, gamma: float) -> None:
        rewards, values = ([token[part] for token in tokens] for part in (0, 1))
        batch = step_batch([0.0], tokens=[len(tokens)], token_rewards_N=torch.tensor(rewards))
        found = advantages(GAE, batch, Signals(values_N=torch.tensor(values)), gamma=gamma, lam=lam, whiten=False)
        after = [*values[1:], 0.0]
        errors = [r + gamma * w - v for r, v, w in zip(rewards, values, after, strict=True)]
        num = len(tokens)
        expected = [sum((gamma * lam) ** (s - t) * errors[s] for s in range(t, num)) for t in range(num)]
        assert found == pytest.approx(expected, abs=1e-5)


class TestTurns:
    batch = step_batch([0, 1, 0], rollouts=[0, 0, 1], turns=[0, 1, 0])

    def test_all_turns_have_the_advantage_of_the_last_reward(self) -> None:
        # Rollouts 1 and 0: mean 0.5, std 0.7071068; ±0.5 / 0.7071078. (`group` would have averaged 0 and 1.)
        assert advantages(Turns, self.batch) == pytest.approx([0.7071058, 0.7071058, -0.7071058], abs=1e-6)

    def test_step_norm_divides_by_the_number_of_turns(self) -> None:
        found = advantages(Turns, self.batch, step_norm=True)
        assert found == pytest.approx([0.3535529, 0.3535529, -0.7071058], abs=1e-6)

    def test_the_rewards_of_tokens_count_for_the_rollout(self) -> None:
        # Rollouts 1 - 0.5 and 0: mean 0.25, std 0.3535534; ±0.25 / 0.3535544.
        batch = step_batch([0, 1, 0], rollouts=[0, 0, 1], turns=[0, 1, 0], token_rewards_N=torch.tensor([-0.5, 0, 0]))
        assert advantages(Turns, batch) == pytest.approx([0.7071048, 0.7071048, -0.7071048], abs=1e-6)

    def test_are_those_of_grpo_for_rollouts_of_one_turn(self) -> None:
        batch = step_batch([1, 0, 3, 2, 2], [0, 0, 0, 1, 1], tokens=[2, 1, 3, 1, 1])
        assert advantages(Turns, batch) == advantages(Group, batch)


# Rollout 0: states 7, 8, rewards 0, 1. Rollout 1: states 7, 9, rewards 0, 0. γ = 0.5: R = 0.5, 1; 0, 0.
PLACES: dict[str, Any] = {"rollouts": [0, 0, 1, 1], "turns": [0, 1, 0, 1], "state_BA": torch.tensor([7, 8, 7, 9])}


class TestGiGPO:
    batch = step_batch([1, 1, 0, 0], **PLACES, step_rewards_BA=torch.tensor([0.0, 1.0, 0.0, 0.0]))

    def test_adds_the_comparison_within_a_state_to_that_within_the_group(self) -> None:
        # A_E = ±0.5. State 7 has R = 0.5 and 0: A_S = ±0.25. States 8 and 9 have one turn each: 0.
        assert advantages(GiGPO, self.batch, gamma=0.5, norm="none") == [0.75, 0.5, -0.75, -0.5]
        assert advantages(GiGPO, self.batch, gamma=0.5, norm="none", omega=2.0) == [1.0, 0.5, -1.0, -0.5]

    def test_norm_std_scales_both(self) -> None:
        # A_E = ±0.5 / (0.7071068 + 1e-6), A_S = ±0.25 / (0.3535534 + 1e-6).
        found = advantages(GiGPO, self.batch, gamma=0.5)
        assert found == pytest.approx([1.4142106, 0.7071058, -1.4142106, -0.7071058], abs=1e-6)

    def test_without_rewards_of_turns_the_last_has_that_of_the_rollout(self) -> None:
        batch = step_batch([1, 1, 0, 0], **PLACES)
        assert advantages(GiGPO, batch, gamma=0.5, norm="none") == [0.75, 0.5, -0.75, -0.5]

    def test_the_same_state_of_another_group_is_another_state(self) -> None:
        # Each group: A_E = ±0.5, and each state 7 has one turn in it but group 0's pair.
        batch = step_batch([1, 0, 1, 0], [0, 0, 1, 1], [0, 1, 0, 1], state_BA=torch.tensor([7, 7, 7, 8]))
        assert advantages(GiGPO, batch, norm="none") == [1.0, -1.0, 0.5, -0.5]

    def test_are_zero_where_nothing_differs(self) -> None:
        batch = step_batch([0.1] * 4, **PLACES)
        assert advantages(GiGPO, batch, gamma=1.0) == [0.0] * 4
        assert advantages(GiGPO, step_batch([5.0], state_BA=torch.tensor([3]))) == [0.0]

    def test_without_states_is_refused(self) -> None:
        with pytest.raises(RftError, match=r"no state .*, which the algorithm's parts read"):
            build_algorithm("gigpo").plan(step_batch([1.0, 0.0]), Signals())


class TestBest:
    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({}, [1, 0, 1, 0]),  # the best reward twice
            ({"num": 2}, [1, 0, 1, 0]),
            ({"num": 3}, [1, 0, 1, 1]),
            ({"num": 9}, [1, 1, 1, 1]),
            ({"num": 3, "above": 0.5}, [1, 0, 1, 0]),
            ({"above": 1.0}, [0, 0, 0, 0]),
        ],
    )
    def test_keeps_the_rollouts_with_the_highest_rewards(self, keys: dict[str, Any], expected: list[float]) -> None:
        batch = step_batch([1, 0, 1, 0.5])
        assert advantages(Best, batch, **keys) == expected
        counted_N = Best(Best.Config(**keys))(batch, Signals()).counted_N
        assert counted_N is not None and counted_N.tolist() == [value == 1 for value in expected]

    def test_counts_a_rollout_once_by_its_last_turn(self) -> None:
        # Rollouts: 1 (turns 0, 1), 0.5, 0. The second best is 0.5.
        batch = step_batch([0, 1, 0.5, 0], rollouts=[0, 0, 1, 2], turns=[0, 1, 0, 0])
        assert advantages(Best, batch, num=2) == [1, 1, 1, 0]

    def test_counts_the_rewards_of_tokens(self) -> None:
        # 1 - 0.7 against 0.5: a KL penalty in the reward decides.
        assert advantages(Best, step_batch([1, 0.5], token_rewards_N=torch.tensor([-0.7, 0.0]))) == [0, 1]

    def test_a_group_of_equal_rewards_has_no_best(self) -> None:
        assert advantages(Best, step_batch([1, 1, 2, 0], [0, 0, 1, 1])) == [0, 0, 1, 0]


@pytest.mark.parametrize("name", sorted(ADVANTAGES.builtins))
def test_an_empty_batch_and_one_without_tokens_have_no_advantages(name: str) -> None:
    part = ADVANTAGES.load(name)
    empty = torch.zeros(0)
    signals = Signals(
        **dict.fromkeys(("old_N", "reference_N", "teacher_N", "values_N", "entropy_N", "collision_N"), empty)
    )
    for rewards in ([], [1.0, 0.0]):
        optional = {
            f"{key}_BA" if key in PER_TURN else f"{key}_B": torch.zeros(
                len(rewards), dtype=torch.int64 if key == "state" else torch.float32
            )
            for key in ("step_rewards", "state", "baseline_rewards", "role_baselines")
        }
        optional |= {"reward_parts_B": torch.zeros(len(rewards), 2), "reward_names": ("right", "short")}
        batch = step_batch(rewards, [0] * len(rewards), tokens=[0] * len(rewards), **optional)
        assert part()(batch, signals).advantages_N.tolist() == []


class TestPassAtK:
    @pytest.mark.parametrize("k", [2, 3, 4, 6, 9])
    def test_is_the_mean_gain_over_all_sets_of_k(self, k: int) -> None:
        rewards = [0.3, 1.0, 0.0, 1.0, -2.0, 0.7]
        expected = []
        for place, own in enumerate(rewards):
            sets = [*itertools.combinations(rewards[:place] + rewards[place + 1 :], min(k, 6) - 1)]
            expected.append(sum(max(own, *others) - max(others) for others in sets) / len(sets))
        assert advantages(PassAtK, step_batch(rewards), k=k) == pytest.approx(expected, abs=1e-6)

    def test_estimates_the_gradient_of_the_best_reward_of_k_without_bias(self) -> None:
        # Three actions with probabilities p and rewards; n = 3 rollouts, k = 2. d E[max of 2] / d log p summed over all 27 outcomes.
        p, rewards, k, num = torch.tensor([0.5, 0.3, 0.2]).double(), [0.0, 1.0, 3.0], 2, 3
        gradient = torch.zeros(3, dtype=torch.float64)
        for outcome in itertools.product(range(3), repeat=num):
            found = advantages(PassAtK, step_batch([rewards[action] for action in outcome]), k=k)
            for action, value in zip(outcome, found, strict=True):
                gradient[action] += p[[*outcome]].prod() * k / num * value
        leaf = p.clone().requires_grad_()
        best = sum(leaf[a] * leaf[b] * max(rewards[a], rewards[b]) for a in range(3) for b in range(3))
        (expected,) = torch.autograd.grad(best, leaf)
        # Probabilities sum to 1: only what differs between actions counts. Of the outcomes, p d/dp is compared.
        found, wanted = gradient / p, expected
        assert (found - found @ p).tolist() == pytest.approx((wanted - wanted @ p).tolist())

    def test_counts_a_rollout_of_several_turns_once(self) -> None:
        # The second rollout's reward is that of its last turn: 4 is the best by 3, and both turns have it.
        batch = step_batch([1.0, 9.0, 4.0], rollouts=[0, 1, 1], turns=[0, 0, 1])
        assert advantages(PassAtK, batch, k=2) == pytest.approx([0.0, 3.0, 3.0])
        assert advantages(PassAtK, step_batch([5.0])) == [0.0]


class TestOTB:
    def test_the_tail_of_the_longest_rollout_has_no_advantage_or_its_return(self) -> None:
        # p = 0.5 of two tokens: w = 1 - 1 + 0.5 = 0.5 everywhere. At the first tokens b = (1 + 0) / 2; rollout 0 alone has a second one.
        batch = step_batch([1.0, 0.0], tokens=[2, 1])
        signals = Signals(old_N=torch.full((3,), 0.5).log(), collision_N=torch.full((3,), 0.5))
        assert advantages(OTB, batch, signals) == pytest.approx([0.5, 0.0, -0.5])
        assert advantages(OTB, batch, signals, keep_tail=True) == pytest.approx([0.5, 1.0, -0.5])

    def test_a_certain_token_adds_nothing_to_the_weight(self) -> None:
        # w = 0 for the first rollout's certain token, and 1 - 2/3 + 1/3 = 2/3 for one of three: b is the second's return.
        batch = step_batch([1.0, 0.0])
        signals = Signals(old_N=torch.tensor([1.0, 1 / 3]).log(), collision_N=torch.tensor([1.0, 1 / 3]))
        assert advantages(OTB, batch, signals) == pytest.approx([1.0, 0.0], abs=1e-6)


@given(lengths=st.lists(st.integers(1, 40), max_size=6), factor=st.sampled_from([0.0, 0.5, 0.97, 1.0]))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_accumulated_is_the_recursion_over_each_rollout(lengths: list[int], factor: float) -> None:
    values = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(len(lengths)))
    expected, place, last = [], 0, []
    for length in lengths:
        running, own = 0.0, []
        for value in reversed(values[place : place + length].tolist()):
            running = value + factor * running
            own.append(running)
        expected += own[::-1]
        last += [False] * (length - 1) + [True]
        place += length
    found = accumulated(values, torch.tensor(last, dtype=torch.bool), factor)
    assert found.dtype == torch.float64 and found.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-6)
