"""Losses of pairs and of single judged responses against numbers worked out by hand, and inputs that break formulas."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Signals
from rftcore.algorithms.losses.orpo import log1mexp
from rftcore.checks.algorithm import check_needed_models
from rftdata.errors import ConfigError, RftError
from tests.support.algorithms import loss_and_gradient, outputs_of, step_batch

Expected = tuple[float, list[float], dict[str, float]]


def kto(responses: list[tuple[float, list[float], list[float]]], z: float, **args: Any) -> Expected:
    """Loss, gradient and metrics of responses, each (reward, log-probabilities, the reference's)."""
    batch = step_batch([each[0] for each in responses], tokens=[len(each[1]) for each in responses])
    signals = Signals(
        reference_N=torch.tensor([value for each in responses for value in each[2]]), mismatched_kl=torch.tensor(z)
    )
    logprobs = [value for each in responses for value in each[1]]
    return loss_and_gradient(build_algorithm("kto", {"loss": args}), batch, logprobs, signals)


class TestKTO:
    # Desirable: r = (-1 - 2) - (-1.5 - 2.5) = 1. Undesirable: r = -4 - (-2) = -2.
    good = (1.0, [-1.0, -2.0], [-1.5, -2.5])
    bad = (0.0, [-4.0], [-2.0])

    def test_of_a_desirable_and_an_undesirable_response(self) -> None:
        # β = 0.1, z = 0.5. Gains 0.1 (1 - 0.5) = 0.05 and 0.1 (0.5 + 2) = 0.25: σ(-0.05) = 0.4875026, σ(-0.25) = 0.4378235.
        loss, gradient, metrics = kto([self.good, self.bad], 0.5)
        assert loss == pytest.approx((0.4875026 + 0.4378235) / 2, abs=1e-6)
        # dL/dr = ∓β σ(g) σ(-g) / 2: 0.1 · 0.2498439 / 2 and 0.1 · 0.2461341 / 2, at each token of the response.
        assert gradient == pytest.approx([-0.01249219, -0.01249219, 0.01230670], abs=1e-7)
        # The implied rewards are 0.1 and -0.2; both lie on the right side of z.
        expected = {"implied_reward": -0.05, "desirable": 0.5, "kto_accuracy": 1.0, "kl_mismatched": 0.5}
        assert metrics == pytest.approx(expected, abs=1e-6)

    def test_weights_multiply_each_kind(self) -> None:
        loss, *_ = kto([self.good, self.bad], 0.5, desirable_weight=2.0, undesirable_weight=0.5)
        assert loss == pytest.approx((2.0 * 0.4875026 + 0.5 * 0.4378235) / 2, abs=1e-6)

    def test_a_negative_estimate_of_the_divergence_counts_as_zero(self) -> None:
        # Gains 0.1 and 0.2: σ(-0.1) = 0.4750208, σ(-0.2) = 0.4501660.
        assert kto([self.good, self.bad], -3.0)[0] == pytest.approx((0.4750208 + 0.4501660) / 2, abs=1e-6)

    def test_a_reward_at_the_threshold_is_undesirable(self) -> None:
        # 0.1 has no exact float: a mean over three tokens could be above it.
        responses = [(0.1, [-1.0] * 3, [-1.0] * 3)]
        assert kto(responses, 0.0, threshold=0.1)[2]["desirable"] == 0.0
        assert kto(responses, 0.0, threshold=0.09)[2]["desirable"] == 1.0

    @pytest.mark.parametrize("reward", [-1.0, 1.0])
    def test_of_one_kind_alone_or_far_from_the_reference_is_finite(self, reward: float) -> None:
        loss, gradient, _ = kto([(reward, [-900.0], [0.0]), (reward, [0.0], [-900.0]), (reward, [-1.0], [-1.0])], 2.0)
        assert math.isfinite(loss) and all(map(math.isfinite, gradient))

    def test_a_response_without_tokens_is_left_out(self) -> None:
        assert kto([self.good, (1.0, [], [])], 0.5)[0] == pytest.approx(0.4875026, abs=1e-6)

    def test_refuses_a_response_without_a_reward(self) -> None:
        with pytest.raises(RftError, match="1 of 2 rewards"):
            kto([self.good, (math.nan, [-1.0], [-1.0])], 0.0)


def pairs(preset: str, *sides: list[float], **args: Any) -> Expected:
    """Loss, gradient and metrics of pairs; sides are log-probabilities, chosen and rejected in turn."""
    batch = step_batch([math.nan] * len(sides), tokens=[len(side) for side in sides])
    return loss_and_gradient(
        build_algorithm(preset, {"loss": args}), batch, [value for side in sides for value in side]
    )


class TestORPO:
    def test_is_the_likelihood_and_the_odds_ratio_of_mean_probabilities(self) -> None:
        # Chosen: mean (log 0.8 + log 0.2) / 2 = log 0.4, odds 0.4 / 0.6 = 2/3. Rejected: p 0.2, odds 1/4. Ratio 8/3.
        # -log σ(log 8/3) = -log(8/11) = 0.3184537; NLL = -log 0.4 = 0.9162907; λ = 0.5.
        loss, gradient, metrics = pairs("orpo", [math.log(0.8), math.log(0.2)], [math.log(0.2)], odds_coef=0.5)
        assert loss == pytest.approx(0.9162907 + 0.5 * 0.3184537, abs=1e-6)
        # d log odds / d log p = 1 / (1 - p): 5/3 and 5/4. d/d log ratio of -log σ = -3/11. Half of it per chosen token.
        chosen = -0.5 - 0.5 * (3 / 11) * (5 / 3) / 2
        assert gradient == pytest.approx([chosen, chosen, 0.5 * (3 / 11) * 1.25], abs=1e-6)
        assert metrics["nll"] == pytest.approx(0.9162907) and metrics["log_odds_ratio"] == pytest.approx(
            math.log(8 / 3)
        )
        assert metrics["pair_margin"] == pytest.approx(0.5 * math.log(2))

    @pytest.mark.parametrize("sides", [([], [-1.0]), ([-1.0], []), ([0.0], [-1e-9]), ([-900.0], [0.0]), ([], [])])
    def test_of_certain_impossible_and_empty_responses_is_finite(self, sides: tuple[list[float], list[float]]) -> None:
        # A pair of which both are empty has no tokens at all; another one stands beside it.
        loss, gradient, _ = pairs("orpo", *sides, [-1.0], [-2.0])
        assert math.isfinite(loss) and all(map(math.isfinite, gradient))

    @pytest.mark.parametrize("x", [-1e-6, -0.1, -0.7, -5.0, -80.0])
    def test_log1mexp_is_exact_near_zero_and_far_from_it(self, x: float) -> None:
        value = torch.tensor(x, requires_grad=True)
        result = log1mexp(value)
        exact = torch.tensor(x, dtype=torch.float64).expm1().neg().log().item()
        assert result.item() == pytest.approx(exact, rel=2e-6, abs=1e-30)
        (gradient,) = torch.autograd.grad(result, value)
        assert gradient.item() == pytest.approx(-math.exp(x) / -math.expm1(x), rel=1e-5)


class TestSimPO:
    def test_compares_mean_log_probabilities_with_a_margin(self) -> None:
        # Means -1.5 and -2; β = 2: rewards -3 and -4; margin 1 - 0.4 = 0.6; -log σ(0.6) = log(1 + e^-0.6) = 0.4374879.
        loss, gradient, metrics = pairs("simpo", [-1.0, -2.0], [-2.0], beta=2.0, gamma=0.4)
        assert loss == pytest.approx(0.4374879, abs=1e-6)
        # -σ(-0.6) · β / n: 0.3543437 · 2 / 2 per chosen token, 0.3543437 · 2 for the rejected one.
        assert gradient == pytest.approx([-0.3543437, -0.3543437, 0.7086874], abs=1e-6)
        expected = {
            "chosen_reward": -3.0,
            "rejected_reward": -4.0,
            "pair_margin": 1.0,
            "pair_accuracy": 1.0,
            "pairs_dropped": 0.0,
        }
        assert metrics == pytest.approx(expected)

    def test_of_empty_and_impossible_responses_is_finite(self) -> None:
        loss, gradient, _ = pairs("simpo", [], [-900.0], [-900.0], [])
        assert math.isfinite(loss) and all(map(math.isfinite, gradient))


class TestRewardModel:
    @staticmethod
    def loss(scores: list[float], rewards: list[float] | None = None, **args: Any) -> Expected:
        algorithm = build_algorithm("reward_model", {"loss": args})
        values_N = torch.tensor(scores, requires_grad=True)
        plan = algorithm.plan(step_batch(rewards or [math.nan] * len(scores)), Signals())
        index_N = torch.arange(len(scores))
        loss, metrics = algorithm.objective(
            plan, outputs_of(plan, index_N, torch.zeros(len(scores)), values_N=values_N)
        )
        (gradient,) = torch.autograd.grad(loss, values_N)
        return loss.item(), gradient.tolist(), {name: value.item() for name, value in metrics.items()}

    def test_is_the_log_odds_of_the_preference(self) -> None:
        # -log σ(1.2 - 0.7) = log(1 + e^-0.5) = 0.4740770; σ(-0.5) = 0.3775407.
        loss, gradient, metrics = self.loss([1.2, 0.7])
        assert loss == pytest.approx(0.4740770, abs=1e-6)
        assert gradient == pytest.approx([-0.3775407, 0.3775407], abs=1e-6)
        expected = {"chosen_reward": 1.2, "rejected_reward": 0.7, "pair_margin": 0.5, "pair_accuracy": 1.0}
        assert metrics == pytest.approx(expected)

    def test_margins_are_set_by_a_number_and_by_recorded_rewards(self) -> None:
        # 0.5 - 0.1 - 0.25 (3 - 1) = -0.1: log(1 + e^0.1) = 0.7443967.
        assert self.loss([1.2, 0.7], [3.0, 1.0], margin=0.1, reward_margin=0.25)[0] == pytest.approx(
            0.7443967, abs=1e-6
        )

    def test_centring_pulls_the_sum_of_a_pair_to_zero(self) -> None:
        # 0.4740770 + 0.01 (1.2 + 0.7)² = 0.5101770; both gradients rise by 0.02 · 1.9.
        loss, gradient, _ = self.loss([1.2, 0.7], centering=0.01)
        assert loss == pytest.approx(0.5101770, abs=1e-6)
        assert gradient == pytest.approx([-0.3775407 + 0.038, 0.3775407 + 0.038], abs=1e-6)

    def test_of_scores_far_apart_is_finite(self) -> None:
        loss, gradient, _ = self.loss([-1e4, 1e4, 1e4, -1e4])
        assert loss == pytest.approx(1e4) and gradient == pytest.approx([-0.5, 0.5, 0.0, 0.0])

    def test_reads_rewards_only_for_a_margin_from_them(self) -> None:
        assert not build_algorithm("reward_model").uses_rewards
        assert build_algorithm("reward_model", {"loss": {"reward_margin": 1.0}}).uses_rewards
        with pytest.raises(RftError, match="1 of 2 rewards"):
            self.loss([1.2, 0.7], [3.0, math.nan], reward_margin=0.25)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("dpo", {"train_on": "all"}, "and dpo judges responses"),
        ("grpo", {"train_on": "all"}, "and ppo judges responses"),
        ("kto", {"advantage": {"name": "group"}}, "one per sequence, reads no advantages"),
        ("reward_model", {"kl": {"type": "k3", "coef": 0.1}}, "kl is for losses per token"),
        ("on_policy_distillation", {"advantage": None}, "needs advantages"),
        ("jsd", {"advantage": {"name": "teacher"}}, "reads no advantages"),
    ],
)
def test_parts_that_do_not_fit_are_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(name, args)


class TestModels:
    def test_whole_distributions_need_a_teacher(self) -> None:
        with pytest.raises(ConfigError, match=r"set algorithm\.teacher to a model"):
            check_needed_models(build_algorithm("jsd"), has_evaluation=False)
        check_needed_models(build_algorithm("jsd", {"teacher": {"path": "./teacher"}}), has_evaluation=True)
        check_needed_models(build_algorithm("jsd_sampled"), has_evaluation=True)

    def test_a_reward_model_answers_no_tasks(self) -> None:
        with pytest.raises(ConfigError, match="remove the eval section"):
            check_needed_models(build_algorithm("reward_model"), has_evaluation=True)
        check_needed_models(build_algorithm("reward_model"), has_evaluation=False)

    def test_an_expert_s_loss_reads_no_teacher(self) -> None:
        with pytest.raises(ConfigError, match="without advantages and whole distributions"):
            build_algorithm("grpo", {"expert": {"loss": "jsd"}})
