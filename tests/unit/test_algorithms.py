"""Algorithms against numbers worked out by hand, and against groups and values that break formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rftcore.algorithms import ALGORITHMS, build_algorithm
from rftcore.algorithms.base import (
    KLConfig,
    TokenBatch,
    aggregation_weights,
    kl_k1,
    kl_k2,
    kl_k3,
)
from rftcore.algorithms.dpo import DPO, DPOConfig
from rftcore.algorithms.grpo import GRPO, GRPOConfig
from rftcore.algorithms.sft import SFT
from rftdata.errors import ConfigError, PluginError, RftError


@dataclass
class Section:
    """The `algorithm` section as `build_algorithm` reads it."""

    name: str
    group_size: int = 8
    args: dict[str, Any] = field(default_factory=dict)


def advantages(rewards: list[float], groups: list[int], rollouts: list[int] | None = None) -> list[float]:
    rollout_index = rollouts if rollouts is not None else list(range(len(rewards)))
    return GRPO().advantages(torch.tensor(rewards), torch.tensor(groups), torch.tensor(rollout_index)).tolist()


def tokens(ratio: list[float], advantage: list[float], reference: list[float] | None = None) -> TokenBatch:
    """Tokens with these ratios; the current log-probability is log(ratio), the behaviour's is 0."""
    return TokenBatch(
        logprobs_N=torch.tensor(ratio).log().requires_grad_(),
        behavior_logprobs_N=torch.zeros(len(ratio)),
        advantages_N=torch.tensor(advantage),
        reference_logprobs_N=None if reference is None else torch.tensor(reference),
        sequence_N=torch.arange(len(ratio)),
    )


def gradient(loss_N: Tensor, batch: TokenBatch) -> list[float]:
    (grad,) = torch.autograd.grad(loss_N.sum(), batch.logprobs_N)
    return grad.tolist()


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

    @pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-8, -3.7])
    def test_are_exactly_zero_in_a_group_of_equal_rewards(self, reward: float) -> None:
        assert advantages([reward] * 7, [0] * 7) == [0.0] * 7

    def test_are_zero_for_a_single_rollout_even_of_several_turns(self) -> None:
        assert advantages([5.0], [0]) == [0.0]
        assert advantages([5.0, 1.0], [0, 0], [3, 3]) == [0.0, 0.0]

    def test_are_empty_for_an_empty_batch(self) -> None:
        empty = torch.zeros(0, dtype=torch.int64)
        assert GRPO().advantages(torch.zeros(0), empty, empty).tolist() == []

    @pytest.mark.parametrize("reward", [math.nan, math.inf])
    def test_refuse_a_reward_that_is_not_a_number_and_name_it(self, reward: float) -> None:
        with pytest.raises(RftError, match="row 2, rollout 1 of group 7") as caught:
            advantages([0.0, 1.0, reward], [7, 7, 7], [5, 0, 1])
        assert str(reward) in str(caught.value)


class TestGRPOLoss:
    # Clip range [0.8, 1.28]; ratios 0.5, 1, 1.2, 1.5.
    clip = GRPOConfig(clip=[0.2, 0.28])

    def test_of_a_good_rollout_is_clipped_upwards_only(self) -> None:
        # A = 2: min(ρ·2, clip(ρ)·2): 0.5 -> min(1.0, 1.6); 1 -> 2; 1.2 -> 2.4; 1.5 -> min(3.0, 2.56).
        batch = tokens([0.5, 1.0, 1.2, 1.5], [2.0] * 4)
        found = GRPO(self.clip).loss(batch)
        assert found.loss_N.tolist() == pytest.approx([-1.0, -2.0, -2.4, -2.56])
        assert found.metrics_N["clip_fraction"].tolist() == [0, 0, 0, 1]
        # d(-ρA)/d(log π) = -ρA, and nothing where the clip binds.
        assert gradient(found.loss_N, batch) == pytest.approx([-1.0, -2.0, -2.4, 0.0])

    def test_of_a_bad_rollout_is_clipped_downwards_only(self) -> None:
        # A = -1: min(-ρ, -clip(ρ)): 0.5 -> min(-0.5, -0.8); 1 -> -1; 1.2 -> -1.2; 1.5 -> min(-1.5, -1.28).
        batch = tokens([0.5, 1.0, 1.2, 1.5], [-1.0] * 4)
        found = GRPO(self.clip).loss(batch)
        assert found.loss_N.tolist() == pytest.approx([0.8, 1.0, 1.2, 1.5])
        assert found.metrics_N["clip_fraction"].tolist() == [1, 0, 0, 0]
        assert gradient(found.loss_N, batch) == pytest.approx([0.0, 1.0, 1.2, 1.5])

    def test_of_an_advantage_of_zero_is_zero(self) -> None:
        batch = tokens([0.5, 1.5], [0.0, 0.0])
        found = GRPO(self.clip).loss(batch)
        assert [abs(value) for value in found.loss_N.tolist()] == [0.0, 0.0]
        assert [abs(value) for value in gradient(found.loss_N, batch)] == [0.0, 0.0]
        assert found.metrics_N["clip_fraction"].tolist() == [0, 0]

    def test_stays_finite_when_policies_have_nothing_in_common(self) -> None:
        batch = TokenBatch(
            torch.tensor([-1.0, -900.0], requires_grad=True),
            torch.tensor([-900.0, -1.0]),
            torch.tensor([-1.0, 1.0]),
            None,
            torch.arange(2),
        )
        found = GRPO().loss(batch)
        assert torch.isfinite(found.loss_N).all()
        assert all(math.isfinite(value) for value in gradient(found.loss_N, batch))

    def test_adds_the_penalty_for_leaving_the_reference(self) -> None:
        # ρ = 1, A = 1 gives -1. log π = 0, log π_ref = log 2: k3 = 2 - 1 - log 2 = 0.3068528; times 0.1.
        algorithm = GRPO(GRPOConfig(kl=KLConfig(type="k3", coef=0.1)))
        assert algorithm.needs_reference
        found = algorithm.loss(tokens([1.0], [1.0], reference=[math.log(2)]))
        assert found.loss_N.item() == pytest.approx(-1.0 + 0.03068528)
        assert found.metrics_N["kl_reference"].item() == pytest.approx(0.3068528)

    def test_needs_no_reference_without_a_coefficient(self) -> None:
        assert not GRPO(GRPOConfig(kl=KLConfig(type="k3", coef=0.0))).needs_reference


def test_sft_is_the_negative_log_likelihood_and_ignores_rewards() -> None:
    # Probabilities 0.5 and 0.25: losses log 2 and log 4.
    algorithm = SFT()
    assert algorithm.loss(tokens([0.5, 0.25], [9.0, -9.0])).loss_N.tolist() == pytest.approx([math.log(2), math.log(4)])
    index = torch.zeros(2, dtype=torch.int64)
    assert algorithm.advantages(torch.tensor([math.nan, 1.0]), index, index).tolist() == [0.0, 0.0]


class TestKLEstimators:
    def test_against_numbers(self) -> None:
        # p = 0.5, q = 0.25: log p - log q = log 2 = 0.6931472. k1 = 0.6931472; k2 = 0.6931472² / 2 = 0.2402265;
        # k3 = q/p - 1 - log(q/p) = 0.5 - 1 + 0.6931472 = 0.1931472.
        p, q = torch.tensor(0.5).log(), torch.tensor(0.25).log()
        assert kl_k1(p, q).item() == pytest.approx(0.6931472)
        assert kl_k2(p, q).item() == pytest.approx(0.2402265)
        assert kl_k3(p, q).item() == pytest.approx(0.1931472)

    def test_k1_and_k3_average_to_the_divergence(self) -> None:
        # Exactly, by summing over three outcomes instead of sampling them.
        p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
        divergence = (p * (p / q).log()).sum().item()
        assert (p * kl_k1(p.log(), q.log())).sum().item() == pytest.approx(divergence)
        assert (p * kl_k3(p.log(), q.log())).sum().item() == pytest.approx(divergence)

    def test_k3_of_policies_far_apart_is_finite(self) -> None:
        assert torch.isfinite(kl_k3(torch.tensor(-500.0), torch.tensor(0.0)))


def pair_tokens(
    chosen: tuple[list[float], list[float]], rejected: tuple[list[float], list[float]], first: int = 0
) -> TokenBatch:
    """One pair, as (log-probabilities, the reference's); `first` is the experience of its chosen answer."""
    return TokenBatch(
        logprobs_N=torch.tensor(chosen[0] + rejected[0]).requires_grad_(),
        behavior_logprobs_N=torch.zeros(len(chosen[0]) + len(rejected[0])),
        advantages_N=torch.zeros(len(chosen[0]) + len(rejected[0])),
        reference_logprobs_N=torch.tensor(chosen[1] + rejected[1]),
        sequence_N=torch.tensor([first] * len(chosen[0]) + [first + 1] * len(rejected[0])),
    )


def dpo(batch: TokenBatch, share: float = 1.0, **args: Any) -> tuple[Tensor, dict[str, float]]:
    loss, metrics = DPO(DPOConfig(**args)).objective(batch, torch.zeros(len(batch.sequence_N)), share)
    return loss, {name: value.item() for name, value in metrics.items()}


class TestDPO:
    # Chosen, two tokens: log π = -1 - 2 = -3 against -1.5 - 2.5 = -4, so r_w = 1. Rejected, one: -4 against -2, so r_l = -2.
    batch = pair_tokens(([-1.0, -2.0], [-1.5, -2.5]), ([-4.0], [-2.0]))

    def test_is_minus_the_log_sigmoid_of_the_scaled_difference_of_log_ratios(self) -> None:
        # h = 0.1 (1 + 2) = 0.3; -log σ(0.3) = log(1 + e^-0.3) = log 1.7408182 = 0.5543552.
        loss, metrics = dpo(self.batch, beta=0.1)
        assert loss.item() == pytest.approx(0.5543552, abs=1e-6)
        expected = {"chosen_reward": 0.1, "rejected_reward": -0.2, "pair_margin": 0.3, "pair_accuracy": 1.0}
        assert metrics == pytest.approx(expected, abs=1e-6)

    def test_gradient_lifts_the_chosen_and_lowers_the_rejected_by_how_wrong_the_margin_is(self) -> None:
        # dL/dlog π(y_w) = -β σ(-h) = -0.1 · 0.4255575, at each of its tokens; the rejected one's has the other sign.
        (grad,) = torch.autograd.grad(dpo(self.batch, beta=0.1)[0], self.batch.logprobs_N)
        assert grad.tolist() == pytest.approx([-0.04255575, -0.04255575, 0.04255575], abs=1e-7)

    def test_label_smoothing_allows_for_pairs_that_are_the_wrong_way_round(self) -> None:
        # 0.9 · 0.5543552 + 0.1 · (0.5543552 + 0.3) = 0.5843552.
        assert dpo(self.batch, beta=0.1, label_smoothing=0.1)[0].item() == pytest.approx(0.5843552, abs=1e-6)

    def test_length_normalised_log_ratios_are_per_token(self) -> None:
        # r_w = 1/2, r_l = -2/1; h = 0.1 · 2.5 = 0.25; log(1 + e^-0.25) = log 1.7788008 = 0.5759394.
        assert dpo(self.batch, beta=0.1, length_normalised=True)[0].item() == pytest.approx(0.5759394, abs=1e-6)

    def test_the_reference_itself_is_at_log_two(self) -> None:
        loss, metrics = dpo(pair_tokens(([-1.0, -2.0], [-1.0, -2.0]), ([-3.0], [-3.0])))
        assert loss.item() == pytest.approx(math.log(2)) and metrics["pair_accuracy"] == 0.0

    def test_a_pair_the_wrong_way_round_is_not_accurate(self) -> None:
        # h = 0.1 (-2 - 1) = -0.3; log(1 + e^0.3) = 0.8543552.
        loss, metrics = dpo(pair_tokens(([-4.0], [-2.0]), ([-1.0, -2.0], [-1.5, -2.5])), beta=0.1)
        assert loss.item() == pytest.approx(0.8543552, abs=1e-6)
        assert metrics["pair_margin"] == pytest.approx(-0.3, abs=1e-6) and metrics["pair_accuracy"] == 0.0

    def test_a_far_margin_is_finite(self) -> None:
        far = pair_tokens(([-900.0], [0.0]), ([0.0], [-900.0]))
        loss, _ = dpo(far, beta=1.0)
        (grad,) = torch.autograd.grad(loss, far.logprobs_N)
        assert loss.item() == pytest.approx(1800.0) and grad.tolist() == pytest.approx([-1.0, 1.0])

    def test_an_answer_without_a_token_that_counts_has_a_log_ratio_of_zero(self) -> None:
        # h = 0.1 (0 - (-2)) = 0.2; log(1 + e^-0.2) = 0.5981389. Alone and normalised too.
        empty = pair_tokens(([], []), ([-4.0], [-2.0]), first=6)
        assert dpo(empty, beta=0.1)[0].item() == pytest.approx(0.5981389, abs=1e-6)
        assert dpo(empty, beta=0.1, length_normalised=True)[0].item() == pytest.approx(0.5981389, abs=1e-6)

    def test_two_pairs_of_a_micro_batch_are_kept_apart(self) -> None:
        other = pair_tokens(([-4.0], [-2.0]), ([-1.0, -2.0], [-1.5, -2.5]), first=4)
        tensors = {name: torch.cat([getattr(self.batch, name), getattr(other, name)]) for name in vars(other)}
        # 0.5543552 and 0.8543552, in a batch of four pairs.
        loss, metrics = dpo(TokenBatch(**tensors), 0.25, beta=0.1)
        assert loss.item() == pytest.approx((0.5543552 + 0.8543552) / 4, abs=1e-6)
        assert metrics["pair_accuracy"] == 0.25

    @pytest.mark.parametrize("args", [{"beta": 0}, {"label_smoothing": 0.5}, {"label_smoothing": -0.1}])
    def test_settings_that_mean_nothing_are_refused(self, args: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(args))):
            build_algorithm(Section("dpo", args=args))


class TestAggregation:
    # Experience 0 has 1 token that counts, experience 1 has 3, experience 2 none. Losses 6; 1, 2, 3.
    mask = torch.tensor([[False, True, False, False], [False, True, True, True], [False] * 4])
    loss = torch.tensor([[9.0, 6.0, 9.0, 9.0], [9.0, 1.0, 2.0, 3.0], [9.0] * 4])

    @pytest.mark.parametrize(
        ("mode", "expected"),
        [
            ("token-mean", 3.0),  # (6 + 1 + 2 + 3) / 4
            ("seq-mean-token-mean", 4.0),  # (6 + (1 + 2 + 3)/3) / 2: the empty experience is not a sequence
            ("seq-mean-token-sum", 6.0),  # (6 + 6) / 2
        ],
    )
    def test_of_two_sequences(self, mode: Any, expected: float) -> None:
        assert (self.loss * aggregation_weights(self.mask, mode)).sum().item() == pytest.approx(expected)

    @pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
    def test_of_an_empty_mask_is_zero_and_not_nan(self, mode: Any) -> None:
        assert aggregation_weights(torch.zeros(2, 3, dtype=torch.bool), mode).tolist() == [[0.0] * 3] * 2

    def test_refuses_an_unknown_mode(self) -> None:
        with pytest.raises(ValueError, match="token-mean"):
            aggregation_weights(self.mask, "mean")  # type: ignore[arg-type]


class TestBuildAlgorithm:
    @pytest.mark.parametrize("name", sorted(ALGORITHMS.builtins))
    def test_makes_every_built_in_from_its_defaults(self, name: str) -> None:
        algorithm = build_algorithm(Section(name))
        assert algorithm.name == name
        assert all(description.description for description in algorithm.Config.model_fields.values())

    def test_reads_the_keys_of_the_design(self) -> None:
        args = {"clip": [0.2, 0.28], "kl": {"type": "k3", "coef": 0.001}, "aggregation": "seq-mean-token-mean"}
        algorithm = build_algorithm(Section("grpo", args=args))
        assert isinstance(algorithm, GRPO)
        assert (algorithm.config.clip.low, algorithm.config.clip.high) == (0.2, 0.28)
        assert algorithm.config.kl.coef == 0.001
        assert algorithm.aggregation == "seq-mean-token-mean"

    def test_takes_one_clip_for_both_sides(self) -> None:
        algorithm = build_algorithm(Section("grpo", args={"clip": 0.1}))
        assert isinstance(algorithm, GRPO)
        assert (algorithm.config.clip.low, algorithm.config.clip.high) == (0.1, 0.1)

    def test_names_the_nearest_key(self) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.clipp.*did you mean 'clip'"):
            build_algorithm(Section("grpo", args={"clipp": 0.2}))

    @pytest.mark.parametrize(
        "args",
        [{"clip": [0.2]}, {"clip": [-0.1, 0.2]}, {"kl": {"coef": 0.1}}, {"kl": {"type": "k4"}}, {"clip": "wide"}],
    )
    def test_refuses_values_that_mean_nothing(self, args: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"algorithm\.(clip|kl)"):
            build_algorithm(Section("grpo", args=args))

    def test_refuses_groups_too_small_to_compare(self) -> None:
        with pytest.raises(ConfigError, match="group_size"):
            build_algorithm(Section("grpo", group_size=1))
        assert build_algorithm(Section("sft", group_size=1)).group_relative is False

    def test_names_the_nearest_algorithm(self) -> None:
        with pytest.raises(PluginError, match="grpo"):
            build_algorithm(Section("gpro"))
