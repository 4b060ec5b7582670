"""Algorithms against numbers worked out by hand, and against groups and values that break formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from rftcore.algorithms import AGGREGATIONS, KL_ESTIMATORS, build_algorithm
from rftcore.algorithms.advantages.group import Group
from rftcore.algorithms.aggregation import token_weights
from rftcore.algorithms.base import Signals
from rftcore.algorithms.losses.ppo import PPO, PPOConfig
from rftcore.algorithms.presets import presets
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError, PluginError, RftError
from tests.support.algorithms import loss_and_gradient, outputs_of, ratio_view, step_batch, token_gradient, token_view


def advantages(rewards: list[float], groups: list[int], rollouts: list[int] | None = None) -> list[float]:
    return Group()(step_batch(rewards, groups, rollouts), Signals()).advantages_N.tolist()


class TestGRPOAdvantages:
    def test_are_the_deviations_from_the_group_mean_in_units_of_its_deviation(self) -> None:
        # Group 0: rewards 1, 0, 0, 1. Mean 0.5; squares 4 × 0.25 = 1; unbiased variance 1/3; std 0.5773503.
        # A = ±0.5 / (0.5773503 + 1e-6) = ±0.8660239.
        # Group 1: rewards 2, 6. Mean 4; variance (4 + 4)/1 = 8; std 2.8284271; A = ∓2 / 2.8284281 = ∓0.7071065.
        found = advantages([1, 0, 0, 1, 2, 6], [0, 0, 0, 0, 1, 1], [0, 1, 2, 3, 0, 1])
        assert found == pytest.approx([0.8660239, -0.8660239, -0.8660239, 0.8660239, -0.7071065, 0.7071065], abs=1e-6)

    def test_do_not_depend_on_the_order_of_rows(self) -> None:
        found = advantages([2, 1, 0, 6, 0, 1], [1, 0, 0, 1, 0, 0], [0, 0, 1, 1, 2, 3])
        assert found == pytest.approx([-0.7071065, 0.8660239, -0.8660239, 0.7071065, -0.8660239, 0.8660239], abs=1e-6)

    def test_count_a_rollout_once_however_many_turns_it_has(self) -> None:
        # Rollout 0 has three turns with reward 1, rollout 1 one with reward 0: mean over rollouts 0.5 (over turns it
        # would be 0.75), std sqrt(0.25 + 0.25) = 0.7071068; A = ±0.5 / 0.7071078 = ±0.7071058.
        found = advantages([1, 1, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1])
        assert found == pytest.approx([0.7071058, 0.7071058, 0.7071058, -0.7071058], abs=1e-6)

    def test_use_the_own_reward_of_a_turn_that_was_relabelled_alone(self) -> None:
        # Rollout 0: turns 1 and 0, so 0.5; rollout 1: 0. Mean 0.25; std sqrt(2 × 0.0625) = 0.3535534.
        # A = (1 - 0.25), (0 - 0.25), (0 - 0.25), each / 0.3535544.
        found = advantages([1, 0, 0], [0, 0, 0], [0, 0, 1])
        assert found == pytest.approx([2.1213144, -0.7071048, -0.7071048], abs=1e-5)

    def test_are_zero_where_only_turns_differ_and_rollouts_do_not(self) -> None:
        # Rollout 0: 0.5; rollout 1: turns 1 and 0. Both 0.5, so the deviation is 0 and nothing can be measured in units of it.
        assert advantages([0.5, 1, 0], [0, 0, 0], [0, 1, 1]) == [0.0, 0.0, 0.0]
        assert advantages([0.1, 0.1, 0.1, 0.1], [0, 0, 0, 0], [0, 1, 1, 1]) == [0.0] * 4

    @pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-8, -3.7])
    def test_are_exactly_zero_in_a_group_of_equal_rewards(self, reward: float) -> None:
        assert advantages([reward] * 7, [0] * 7) == [0.0] * 7

    def test_are_zero_for_a_single_rollout_even_of_several_turns(self) -> None:
        assert advantages([5.0], [0]) == [0.0]
        assert advantages([5.0, 1.0], [0, 0], [3, 3]) == [0.0, 0.0]

    def test_are_empty_for_an_empty_batch(self) -> None:
        assert advantages([], [], []) == []

    @pytest.mark.parametrize("reward", [math.nan, math.inf])
    def test_refuse_a_reward_that_is_not_a_number_and_name_it(self, reward: float) -> None:
        with pytest.raises(RftError, match="row 2, rollout 1 of group 7") as caught:
            build_algorithm("grpo").plan(step_batch([0.0, 1.0, reward], [7, 7, 7], [5, 0, 1]), Signals())
        assert str(reward) in str(caught.value)


class TestClippedLoss:
    # Clip range [0.8, 1.28]; ratios 0.5, 1, 1.2, 1.5.
    loss = PPO(parse_section(PPOConfig, {"clip": [0.2, 0.28]}))

    def test_of_a_good_rollout_is_clipped_upwards_only(self) -> None:
        # A = 2: min(ρ·2, clip(ρ)·2): 0.5 -> min(1.0, 1.6); 1 -> 2; 1.2 -> 2.4; 1.5 -> min(3.0, 2.56).
        view = ratio_view([0.5, 1.0, 1.2, 1.5], [2.0] * 4)
        found = self.loss(view)
        assert found.loss_U.tolist() == pytest.approx([-1.0, -2.0, -2.4, -2.56])
        assert found.metrics_U["clip_fraction"].tolist() == [0, 0, 0, 1]
        # d(-ρA)/d(log π) = -ρA, and nothing where the clip binds.
        assert token_gradient(found.loss_U, view) == pytest.approx([-1.0, -2.0, -2.4, 0.0])

    def test_of_a_bad_rollout_is_clipped_downwards_only(self) -> None:
        # A = -1: min(-ρ, -clip(ρ)): 0.5 -> min(-0.5, -0.8); 1 -> -1; 1.2 -> -1.2; 1.5 -> min(-1.5, -1.28).
        view = ratio_view([0.5, 1.0, 1.2, 1.5], [-1.0] * 4)
        found = self.loss(view)
        assert found.loss_U.tolist() == pytest.approx([0.8, 1.0, 1.2, 1.5])
        assert found.metrics_U["clip_fraction"].tolist() == [1, 0, 0, 0]
        assert token_gradient(found.loss_U, view) == pytest.approx([0.0, 1.0, 1.2, 1.5])

    def test_of_an_advantage_of_zero_is_zero(self) -> None:
        view = ratio_view([0.5, 1.5], [0.0, 0.0])
        found = self.loss(view)
        assert [abs(value) for value in found.loss_U.tolist()] == [0.0, 0.0]
        assert [abs(value) for value in token_gradient(found.loss_U, view)] == [0.0, 0.0]
        assert found.metrics_U["clip_fraction"].tolist() == [0, 0]

    def test_stays_finite_when_policies_have_nothing_in_common(self) -> None:
        view = token_view([-1.0, -900.0], anchor_N=[-900.0, -1.0], advantages_N=[-1.0, 1.0])
        found = PPO()(view)
        assert torch.isfinite(found.loss_U).all()
        assert all(math.isfinite(value) for value in token_gradient(found.loss_U, view))

    def test_dual_clip_limits_a_bad_token_far_above_its_anchor(self) -> None:
        # A = -1, ρ = 5: -ρA = 5 without, c · |A| = 3 with c = 3; ρ = 2 stays. A good token is not touched.
        loss = PPO(parse_section(PPOConfig, {"dual_clip": 3.0}))
        view = ratio_view([5.0, 2.0, 1.1], [-1.0, -1.0, 1.0])
        found = loss(view)
        assert found.loss_U.tolist() == pytest.approx([3.0, 2.0, -1.1])
        assert token_gradient(found.loss_U, view) == pytest.approx([0.0, 2.0, -1.1])

    def test_level_sequence_uses_the_geometric_mean_of_the_sequence(self) -> None:
        # Ratios 1.1 and 1.3 of one sequence: sqrt(1.43) = 1.1958261, A = 2. Each token's gradient is -s A.
        loss = PPO(parse_section(PPOConfig, {"level": "sequence"}))
        view = token_view([math.log(1.1), math.log(1.3)], advantages_N=[2.0, 2.0], sequence_N=[3, 3])
        found = loss(view)
        assert found.loss_U.tolist() == pytest.approx([-2.3916521] * 2)
        assert token_gradient(found.loss_U, view) == pytest.approx([-2.3916521] * 2)

    def test_max_sequence_kl_drops_bad_tokens_of_sequences_far_from_the_anchor(self) -> None:
        # Sequence 0: mean log(π_anchor/π) = log 2 = 0.69 > 0.5; sequence 1: 0. Its good token stays.
        loss = PPO(parse_section(PPOConfig, {"max_sequence_kl": 0.5}))
        view = token_view([-math.log(2)] * 2 + [0.0], advantages_N=[-1.0, 1.0, -1.0], sequence_N=[0, 0, 1])
        assert loss(view).loss_U.tolist() == pytest.approx([0.0, -0.5, 1.0])


class TestKLPenalty:
    def test_in_the_loss_is_added_at_each_token(self) -> None:
        # ρ = 1, A = 0 (equal rewards). log π = 0, log π_ref = log 2: k3 = 2 - 1 - log 2 = 0.3068528; times 0.1.
        algorithm = build_algorithm("grpo", {"kl": {"type": "k3", "coef": 0.1}})
        assert algorithm.signals == {"behavior", "reference"}
        signals = Signals(reference_N=torch.tensor([math.log(2)] * 2))
        loss, _, metrics = loss_and_gradient(algorithm, step_batch([1.0, 1.0]), [0.0, 0.0], signals)
        assert loss == pytest.approx(0.03068528)
        assert metrics["kl_reference"] == pytest.approx(0.3068528)

    def test_in_the_reward_changes_the_advantages(self) -> None:
        # k1 = log π_anchor - log π_ref = 0 - (-1) = 1 and 0. Rewards 1 - 0.5 and 1: A = ∓0.5 / (0.25 · 1.41421) = ∓0.7071.
        algorithm = build_algorithm("grpo", {"kl": {"type": "k1", "coef": 0.5, "where": "reward"}})
        plan = algorithm.plan(step_batch([1.0, 1.0]), Signals(reference_N=torch.tensor([-1.0, 0.0])))
        assert plan.advantages_N.tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-4)
        assert plan.kl_weights_N is None and plan.metrics["kl_reference"] == pytest.approx(0.5)

    @pytest.mark.parametrize("name", sorted(KL_ESTIMATORS.builtins))
    def test_straight_through_keeps_the_value_and_has_the_gradient_of_k2(self, name: str) -> None:
        # log π - log π_ref = -1 and 0.5; advantages are 0. The gradient of ½x² is x; times 0.1, over two tokens.
        signals, logprobs = Signals(reference_N=torch.tensor([0.0, -1.5])), [-1.0, -1.0]
        batch = step_batch([1.0, 1.0], behavior=logprobs)
        penalty = {"type": name, "coef": 0.1}
        plain, *_ = loss_and_gradient(build_algorithm("grpo", {"kl": penalty}), batch, logprobs, signals)
        algorithm = build_algorithm("grpo", {"kl": penalty | {"straight_through": True}})
        loss, gradient, _ = loss_and_gradient(algorithm, batch, logprobs, signals)
        assert loss == pytest.approx(plain) and gradient == pytest.approx([-0.05, 0.025])

    def test_needs_no_reference_without_a_coefficient(self) -> None:
        assert build_algorithm("grpo", {"kl": {"type": "k3", "coef": 0.0}}).signals == {"behavior"}

    def test_a_target_adapts_the_coefficient_within_a_fifth(self) -> None:
        # KL 0.3 against a target of 0.1 is off by more than 0.2: coef · (1 + 0.2 · 2 / 10) = 0.104.
        kl = {"type": "k1", "coef": 0.1, "target": 0.1, "horizon": 10}
        algorithm = build_algorithm("grpo", {"kl": kl})
        plan = algorithm.plan(step_batch([0.0, 1.0]), Signals(reference_N=torch.zeros(2)))
        algorithm.observe(plan, {"kl_reference": 0.3})
        assert algorithm.state_dict() == {"kl_coef": pytest.approx(0.104)}
        again = build_algorithm("grpo", {"kl": kl})
        again.load_state_dict(algorithm.state_dict())
        assert again.plan(step_batch([0.0, 1.0]), Signals(reference_N=torch.zeros(2))).kl_coef == pytest.approx(0.104)


def test_sft_is_the_negative_log_likelihood_and_ignores_rewards() -> None:
    # Probabilities 0.5 and 0.25: losses log 2 and log 4, mean 1.5 log 2.
    algorithm = build_algorithm("sft")
    batch = step_batch([math.nan, 1.0])
    loss, grad, _ = loss_and_gradient(algorithm, batch, [math.log(0.5), math.log(0.25)])
    assert loss == pytest.approx(1.5 * math.log(2)) and grad == pytest.approx([-0.5, -0.5])
    assert not algorithm.uses_rewards


Sides = tuple[list[float], list[float]]


def dpo(*pairs: tuple[Sides, Sides], **args: Any) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient and metrics of pairs; a side is (log-probabilities, the reference's)."""
    sides = [side for pair in pairs for side in pair]
    batch = step_batch([math.nan] * len(sides), tokens=[len(side[0]) for side in sides])
    signals = Signals(reference_N=torch.tensor([value for side in sides for value in side[1]]))
    return loss_and_gradient(
        build_algorithm("dpo", {"loss": args}), batch, [value for side in sides for value in side[0]], signals
    )


class TestDPO:
    # Chosen, two tokens: log π = -1 - 2 = -3 against -1.5 - 2.5 = -4, so r_w = 1. Rejected, one: -4 against -2, so r_l = -2.
    pair: tuple[Sides, Sides] = (([-1.0, -2.0], [-1.5, -2.5]), ([-4.0], [-2.0]))
    swapped: tuple[Sides, Sides] = (([-4.0], [-2.0]), ([-1.0, -2.0], [-1.5, -2.5]))

    def test_is_minus_the_log_sigmoid_of_the_scaled_difference_of_log_ratios(self) -> None:
        # h = 0.1 (1 + 2) = 0.3; -log σ(0.3) = log(1 + e^-0.3) = log 1.7408182 = 0.5543552.
        loss, _, metrics = dpo(self.pair, beta=0.1)
        assert loss == pytest.approx(0.5543552, abs=1e-6)
        expected = {
            "chosen_reward": 0.1,
            "rejected_reward": -0.2,
            "pair_margin": 0.3,
            "pair_accuracy": 1.0,
            "pairs_dropped": 0.0,
        }
        assert metrics == pytest.approx(expected, abs=1e-6)

    def test_gradient_lifts_the_chosen_and_lowers_the_rejected_by_how_wrong_the_margin_is(self) -> None:
        # dL/dlog π(y_w) = -β σ(-h) = -0.1 · 0.4255575, at each of its tokens; the rejected one's has the other sign.
        assert dpo(self.pair, beta=0.1)[1] == pytest.approx([-0.04255575, -0.04255575, 0.04255575], abs=1e-7)

    def test_label_smoothing_allows_for_pairs_that_are_the_wrong_way_round(self) -> None:
        # 0.9 · 0.5543552 + 0.1 · (0.5543552 + 0.3) = 0.5843552.
        assert dpo(self.pair, beta=0.1, label_smoothing=0.1)[0] == pytest.approx(0.5843552, abs=1e-6)

    def test_length_normalised_log_ratios_are_per_token(self) -> None:
        # r_w = 1/2, r_l = -2/1; h = 0.1 · 2.5 = 0.25; log(1 + e^-0.25) = log 1.7788008 = 0.5759394.
        assert dpo(self.pair, beta=0.1, length_normalised=True)[0] == pytest.approx(0.5759394, abs=1e-6)

    @pytest.mark.parametrize(
        ("args", "expected"),
        [
            ({"form": "ipo", "beta": 0.5}, 4.0),  # (3 - 1 / (2 · 0.5))²
            ({"form": "hinge", "beta": 0.1}, 0.7),  # 1 - 0.1 · 3
            ({"form": "hinge", "beta": 1.0}, 0.0),
            # (0.9 · 0.5543552 - 0.1 · 0.8543552) / 0.8
            ({"form": "robust", "beta": 0.1, "label_smoothing": 0.1}, 0.5168552),
        ],
    )
    def test_other_forms_of_the_loss(self, args: dict[str, Any], expected: float) -> None:
        assert dpo(self.pair, **args)[0] == pytest.approx(expected, abs=1e-6)

    def test_the_reference_itself_is_at_log_two(self) -> None:
        loss, _, metrics = dpo((([-1.0, -2.0], [-1.0, -2.0]), ([-3.0], [-3.0])))
        assert loss == pytest.approx(math.log(2)) and metrics["pair_accuracy"] == 0.0

    def test_a_pair_the_wrong_way_round_is_not_accurate(self) -> None:
        # h = 0.1 (-2 - 1) = -0.3; log(1 + e^0.3) = 0.8543552.
        loss, _, metrics = dpo(self.swapped, beta=0.1)
        assert loss == pytest.approx(0.8543552, abs=1e-6)
        assert metrics["pair_margin"] == pytest.approx(-0.3, abs=1e-6) and metrics["pair_accuracy"] == 0.0

    def test_a_far_margin_is_finite(self) -> None:
        loss, grad, _ = dpo((([-900.0], [0.0]), ([0.0], [-900.0])), beta=1.0)
        assert loss == pytest.approx(1800.0) and grad == pytest.approx([-1.0, 1.0])

    @pytest.mark.parametrize(
        "empty", [(([], []), ([-4.0], [-2.0])), (([-4.0], [-2.0]), ([], [])), (([], []), ([], []))]
    )
    def test_a_pair_with_an_empty_answer_is_dropped_and_counted(self, empty: tuple[Sides, Sides]) -> None:
        # The mean is over the other two pairs, and so are metrics.
        loss, gradient, metrics = dpo(self.pair, empty, self.swapped, beta=0.1)
        assert loss == pytest.approx((0.5543552 + 0.8543552) / 2, abs=1e-6)
        assert gradient[:3] == pytest.approx([-0.02127788, -0.02127788, 0.02127788], abs=1e-7)
        assert gradient[3:-3] == [0.0] * (len(gradient) - 6)
        assert metrics["pairs_dropped"] == 1.0 and metrics["pair_accuracy"] == 0.5

    def test_pairs_that_are_all_dropped_give_no_loss(self) -> None:
        loss, gradient, metrics = dpo((([], []), ([-4.0], [-2.0])))
        assert loss == 0.0 and gradient == [0.0] and metrics["pairs_dropped"] == 1.0

    def test_pairs_are_kept_apart_also_in_different_micro_batches(self) -> None:
        # 0.5543552 and 0.8543552; the mean over both pairs, in one micro-batch or in two.
        loss, _, metrics = dpo(self.pair, self.swapped, beta=0.1)
        assert loss == pytest.approx((0.5543552 + 0.8543552) / 2, abs=1e-6) and metrics["pair_accuracy"] == 0.5
        algorithm = build_algorithm("dpo", {"loss": {"beta": 0.1}})
        sides = [*self.pair, *self.swapped]
        batch = step_batch([math.nan] * 4, tokens=[2, 1, 1, 2])
        plan = algorithm.plan(batch, Signals(reference_N=torch.tensor([value for side in sides for value in side[1]])))
        logprobs_N = torch.tensor([value for side in sides for value in side[0]])
        parts = [
            algorithm.objective(plan, outputs_of(plan, index_N, logprobs_N[index_N]))[0].item()
            for index_N in (torch.arange(3, 6), torch.arange(3))
        ]
        assert parts == pytest.approx([0.8543552 / 2, 0.5543552 / 2], abs=1e-6)

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            ({"form": "exo_pair"}, "exo_pair needs label_smoothing above 0"),
            ({"form": {}}, "form needs at least one loss"),
            ({"form": {"hinge": -1.0, "sft": 1.0}}, "a weight that is not negative"),
            (
                {"form": {"hinge": 1.0}, "label_smoothing": 0.1},
                "label_smoothing is for the forms sigmoid, robust, exo_pair",
            ),
        ],
    )
    def test_forms_that_mean_nothing_are_refused(self, args: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):  # from another preset, whose keys are replaced as a whole
            build_algorithm("orpo", {"loss": {"name": "dpo"} | args})

    @pytest.mark.parametrize("args", [{"beta": 0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}])
    def test_settings_that_mean_nothing_are_refused(self, args: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(args))):
            build_algorithm("dpo", {"loss": args})


class TestAggregation:
    # Sequence 0 has 1 token, sequence 1 has 3, sequence 2 none. Losses 6; 1, 2, 3.
    sequence_N = torch.tensor([0, 1, 1, 1])
    loss_N = torch.tensor([6.0, 1.0, 2.0, 3.0])

    @pytest.mark.parametrize(
        ("choice", "expected"),
        [
            ("token-mean", 3.0),  # (6 + 1 + 2 + 3) / 4
            ("seq-mean-token-mean", 4.0),  # (6 + (1 + 2 + 3)/3) / 2: the empty experience is not a sequence
            ("seq-mean-token-sum", 6.0),  # (6 + 6) / 2
            ({"name": "seq-mean-token-sum-norm", "length": 12}, 0.5),  # (6 + 6) / 2 / 12
        ],
    )
    def test_of_two_sequences(self, choice: Any, expected: float) -> None:
        aggregation = build_algorithm("grpo", {"aggregation": choice}).aggregation
        weights_N = token_weights(self.sequence_N, torch.arange(3), aggregation, torch.ones(4, dtype=torch.bool))
        assert (self.loss_N * weights_N).sum().item() == pytest.approx(expected)

    def test_counts_only_the_tokens_of_its_term(self) -> None:
        # Tokens 0 and 2: (6 + 2) / 2.
        counted_N = torch.tensor([True, False, True, False])
        weights_N = token_weights(self.sequence_N, torch.arange(3), AGGREGATIONS.load("token-mean")(), counted_N)
        assert (self.loss_N * weights_N).sum().item() == pytest.approx(4.0)

    @pytest.mark.parametrize("name", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
    def test_of_an_empty_mask_is_zero_and_not_nan(self, name: str) -> None:
        weights_N = token_weights(
            self.sequence_N, torch.arange(3), AGGREGATIONS.load(name)(), torch.zeros(4, dtype=torch.bool)
        )
        assert weights_N.tolist() == [0.0] * 4

    def test_a_length_goes_with_the_name_that_needs_one(self) -> None:
        for aggregation in ("seq-mean-token-sum-norm", {"name": "token-mean", "length": 5}):
            with pytest.raises(ConfigError, match=r"algorithm\.aggregation\.length"):
                build_algorithm("grpo", {"aggregation": aggregation})


class TestBuildAlgorithm:
    @pytest.mark.parametrize("name", sorted(presets()))
    def test_makes_every_preset_from_its_defaults(self, name: str) -> None:
        algorithm = build_algorithm(name, group_size=8)
        assert algorithm.name == name
        for part in (algorithm.loss, algorithm.advantage, algorithm.mask, algorithm.expert, algorithm.value):
            assert part is None or all(field.description for field in part.Config.model_fields.values())

    def test_reads_the_keys_of_the_design(self) -> None:
        args = {
            "loss": {"clip": [0.2, 0.28]},
            "kl": {"type": "k3", "coef": 0.001},
            "aggregation": "seq-mean-token-mean",
        }
        algorithm = build_algorithm("grpo", args)
        assert isinstance(algorithm.loss, PPO)
        assert (algorithm.loss.config.clip.low, algorithm.loss.config.clip.high) == (0.2, 0.28)
        assert algorithm.config.kl.coef == 0.001
        assert algorithm.config.aggregation.name == "seq-mean-token-mean"

    def test_takes_one_clip_for_both_sides(self) -> None:
        algorithm = build_algorithm("grpo", {"loss": {"clip": 0.1}})
        assert isinstance(algorithm.loss, PPO)
        assert (algorithm.loss.config.clip.low, algorithm.loss.config.clip.high) == (0.1, 0.1)

    def test_naming_another_part_leaves_the_preset_s_keys_of_it_out(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("name: grpo\nloss: {clip: 0.1, dual_clip: 3}\n")
        assert isinstance(build_algorithm("./mine.yaml", {"loss": {"dual_clip": 2}}, base_dir=tmp_path).loss, PPO)
        replaced = build_algorithm("./mine.yaml", {"loss": {"name": "sft"}, "advantage": None}, base_dir=tmp_path)
        assert not replaced.uses_rewards and replaced.advantage is None

    def test_presets_that_name_each_other_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text("name: ./b.yaml\n")
        (tmp_path / "b.yaml").write_text("name: ./a.yaml\n")
        with pytest.raises(ConfigError, match="circle"):
            build_algorithm("./a.yaml", base_dir=tmp_path)

    def test_names_the_nearest_key(self) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.loss\.clipp.*did you mean 'clip'"):
            build_algorithm("grpo", {"loss": {"clipp": 0.2}})
        with pytest.raises(ConfigError, match=r"algorithm\.clip"):
            build_algorithm("grpo", {"clip": 0.2})

    @pytest.mark.parametrize(
        "args",
        [
            {"loss": {"clip": [0.2]}},
            {"loss": {"clip": [-0.1, 0.2]}},
            {"kl": {"coef": 0.1}},
            {"loss": {"clip": "wide"}},
            {"loss": {"dual_clip": 1.1}},
        ],
    )
    def test_refuses_values_that_mean_nothing(self, args: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.(loss\.(clip|dual_clip)|kl)"):
            build_algorithm("grpo", args)

    def test_refuses_groups_too_small_to_compare(self) -> None:
        with pytest.raises(ConfigError, match="group_size"):
            build_algorithm("grpo", group_size=1)
        assert build_algorithm("sft", group_size=1).group_relative is False

    @pytest.mark.parametrize(
        ("name", "args", "message"),
        [
            ("grpo", {"loss": {"name": "dpo"}}, "one per pair, reads no advantages"),
            ("sft", {"loss": {"name": "ppo"}}, "needs advantages"),
            ("dpo", {"kl": {"type": "k3", "coef": 0.1}}, "kl is for losses per token"),
            ("dpo", {"entropy": {"coef": 0.1}}, "entropy is for losses per token"),
            ("sft", {"kl": {"type": "k1", "coef": 0.1, "where": "reward"}}, "changes how advantages count"),
            ("sft", {"correction": "truncate"}, "changes how advantages count"),
            ("grpo", {"kl": {"type": "corrected", "coef": 0.1, "where": "reward"}}, "this estimator is for the loss"),
            (
                "grpo",
                {"kl": {"type": "k1", "coef": 0.1, "where": "reward", "straight_through": True}},
                "a reward has no gradient",
            ),
            ("grpo", {"correction": "truncate", "old_logprobs": "behavior"}, "leave old_logprobs out"),
            ("grpo", {"expert": {"loss": "ppo"}}, "responses that have no advantage"),
        ],
    )
    def test_refuses_parts_that_do_not_fit_each_other(self, name: str, args: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            build_algorithm(name, args)

    def test_names_the_nearest_algorithm(self) -> None:
        with pytest.raises(PluginError, match="grpo"):
            build_algorithm("gpro")
