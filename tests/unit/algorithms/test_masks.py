"""Masks against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftcore.algorithms import MASKS, build_algorithm
from rftcore.algorithms.base import Signals, StepBatch, TokenMask
from rftcore.algorithms.masks.clip_b import ClipB, discriminator
from rftcore.algorithms.masks.clip_v import ClipV, expected_discriminator
from rftcore.algorithms.masks.cov import Cov
from rftcore.algorithms.masks.entropy import Entropy
from rftcore.algorithms.masks.m2po import M2PO
from rftdata.errors import ConfigError
from tests.support.algorithms import loss_and_gradient, step_batch


def kept(
    mask: type[TokenMask], batch: StepBatch, signals: Signals, advantages: list[float] | None = None, **keys: Any
) -> list[bool]:
    advantages_N = torch.tensor(advantages or [-1.0] * len(batch.sequence_N))
    found: list[bool] = mask(mask.Config(**keys))(batch, signals, advantages_N).tolist()
    return found


class TestM2PO:
    # Moments 0.04, 1, 0, 0.01; the means of the smallest are 0, 0.005, 0.0166667, 0.2625.
    batch = step_batch([0.0] * 4, behavior=[-1.2, -1.0, -1.0, -1.0])
    signals = Signals(old_N=torch.tensor([-1.0, -2.0, -1.0, -0.9]))

    @pytest.mark.parametrize(
        ("threshold", "expected"),
        [
            (0.3, [True, True, True, True]),
            (0.04, [True, False, True, True]),
            (0.01, [False, False, True, True]),
            (1e-9, [False, False, True, False]),
        ],
    )
    def test_drops_the_largest_moments_until_the_mean_is_below_the_threshold(
        self, threshold: float, expected: list[bool]
    ) -> None:
        assert kept(M2PO, self.batch, self.signals, threshold=threshold) == expected

    def test_drops_all_where_every_token_is_too_far(self) -> None:
        assert kept(M2PO, step_batch([0.0, 0.0]), Signals(old_N=torch.tensor([-2.0, 3.0]))) == [False, False]

    def test_keeps_tokens_that_no_policy_sampled(self) -> None:
        batch = step_batch([0.0] * 2, behavior=[math.nan, -1.0])
        assert kept(M2PO, batch, Signals(old_N=torch.tensor([-9.0, -1.0]))) == [True, True]

    # d = 0.2, -1, 0.1, 0, 0.3 with A > 0, then the same with A < 0: of those with A > 0 0.2, 0.1 and 0.3 count, of the others -1.
    two_sided = step_batch([0.0] * 10, behavior=[-1.2, -1.0, -1.1, -1.0, -1.3] * 2)
    moved = Signals(old_N=torch.tensor([-1.0, -2.0, -1.0, -1.0, -1.0] * 2))

    @pytest.mark.parametrize(
        ("threshold", "dropped"),
        [
            # Moments 0.01, 0.04, 0.09, 1. Means where none is above the first, the second, …: 0.01, (0.01 + 3 · 0.04) / 4 = 0.0325,
            # (0.01 + 0.04 + 2 · 0.09) / 4 = 0.0575, 0.285.
            (0.3, []),
            (0.06, [6]),
            (0.05, [4, 6]),
            (0.02, [0, 4, 6]),
            (0.005, [0, 2, 4, 6]),
        ],
    )
    def test_one_sided_counts_and_drops_only_tokens_that_a_clip_could_reach(
        self, threshold: float, dropped: list[int]
    ) -> None:
        found = kept(M2PO, self.two_sided, self.moved, [1.0] * 5 + [-1.0] * 5, form="one-sided", threshold=threshold)
        assert [place for place, is_kept in enumerate(found) if not is_kept] == dropped

    def test_one_sided_has_the_gradient_of_the_authors_clip(self) -> None:
        # Their range [e^-τ, e^τ], with τ = 0.2 for the threshold 0.05, in PPO's clip; τ itself is rounded up here, since it is kept.
        advantages = [1.0] * 5 + [-1.0] * 5
        log_ratio_N = (self.moved.old_N - self.two_sided.behavior_N).requires_grad_()
        ratio_N, advantages_N = log_ratio_N.exp(), torch.tensor(advantages)
        clipped_N = ratio_N.clamp(math.exp(-0.2001), math.exp(0.2001))
        (expected,) = torch.autograd.grad((ratio_N * advantages_N).minimum(clipped_N * advantages_N).sum(), log_ratio_N)
        kept_N = torch.tensor(kept(M2PO, self.two_sided, self.moved, advantages, form="one-sided", threshold=0.05))
        assert (ratio_N.detach() * advantages_N * kept_N).tolist() == pytest.approx(expected.tolist())

    def test_a_mask_of_each_update_reads_the_update_s_own_tokens(self) -> None:
        # Rewards 1, 0, 1, 0: A = ±0.87. Before the update d is 0.1, -1, 0.4 and -0.1, all within reach. Of the first two sequences the
        # moments are 0.01 and 1: with both no larger than 0.01 their mean is 0.01, and the second is dropped. The others are no members.
        algorithm = build_algorithm("m2po_one_sided")
        assert algorithm.masks_each_update and not build_algorithm("m2po").masks_each_update
        batch = step_batch([1.0, 0.0, 1.0, 0.0], behavior=[-1.0] * 4)
        plan = algorithm.plan(batch, Signals(old_N=torch.tensor([-1.0] * 4)))
        assert plan.metrics["mask_kept"] == 1.0
        again = Signals(old_N=torch.tensor([-0.9, -2.0, -0.6, -1.1]))
        updated = algorithm.restrict(plan, torch.tensor([True, True, False, False]), again)
        assert updated.policy_weights_N.tolist() == [0.5, 0.0, 0.0, 0.0] and updated.metrics["mask_kept"] == 0.5

    def test_the_preset_weighs_by_the_policy_that_sampled_and_drops_by_that_before_the_step(self) -> None:
        # A = ±0.7071058. log ρ = log π - log π_behavior = 0.1 and -0.9; the second token's moment is 0.81 and it is dropped.
        algorithm = build_algorithm("m2po")
        assert algorithm.signals == {"behavior", "old"}
        batch = step_batch([1.0, 0.0], behavior=[-1.1, -1.1])
        signals = Signals(old_N=torch.tensor([-1.0, -2.0]))
        loss, gradient, metrics = loss_and_gradient(algorithm, batch, [-1.0, -2.0], signals)
        # -0.7071058 e^0.1 / 2: the dropped token still counts in the mean.
        assert loss == pytest.approx(-0.3907364) and gradient == pytest.approx([-0.3907364, 0.0])
        assert metrics["mask_kept"] == 0.5


# Three tokens with p = 0.5, H = log 2: S = 0. One with H = 0.1: S = 0.5 (0.1 - 0.6931472) = -0.2965736.
# Mean -0.0741434; squares 3 · 0.0054972 + 0.0494752 = 0.0659669; / 3; std 0.1482868. The last is 0.2224302 = 1.5 std below the mean.
ENTROPY = Signals(
    old_N=torch.tensor([0.5] * 4).log(),
    entropy_N=torch.tensor([math.log(2)] * 3 + [0.1]),
    discriminator_N=torch.zeros(4),
)


class TestClipB:
    def test_drops_bad_tokens_that_cost_much_more_entropy_than_the_batch(self) -> None:
        batch = step_batch([0.0] * 4)
        assert kept(ClipB, batch, ENTROPY, mu=1.49) == [True, True, True, False]
        assert kept(ClipB, batch, ENTROPY, mu=1.51) == [True] * 4
        assert kept(ClipB, batch, ENTROPY, [-1.0, -1.0, -1.0, 1.0], mu=1.0) == [True] * 4

    def test_of_an_impossible_token_is_finite(self) -> None:
        signals = Signals(old_N=torch.tensor([-math.inf, -1.0]), entropy_N=torch.tensor([0.5, 0.5]))
        assert kept(ClipB, step_batch([0.0] * 2), signals) == [True, True]


class TestClipV:
    # D = 0 - S: 0, 0, 0, 0.2965736 with std 0.1482868: 2 std.
    def test_drops_bad_tokens_that_cost_much_more_entropy_than_their_vocabulary(self) -> None:
        batch = step_batch([0.0] * 4)
        assert kept(ClipV, batch, ENTROPY, mu=1.99, max_share=0.25) == [True, True, True, False]
        assert kept(ClipV, batch, ENTROPY, mu=2.01, max_share=0.25) == [True] * 4
        assert kept(ClipV, batch, ENTROPY, [-1.0, -1.0, -1.0, 1.0], mu=1.0, max_share=1.0) == [True] * 4

    def test_drops_a_limited_share_the_largest_first(self) -> None:
        batch = step_batch([0.0] * 4)
        assert kept(ClipV, batch, ENTROPY, mu=1.0) == [True] * 4
        signals = Signals(
            old_N=ENTROPY.old_N,
            entropy_N=torch.tensor([0.2, math.log(2), math.log(2), 0.1]),
            discriminator_N=torch.zeros(4),
        )
        assert kept(ClipV, batch, signals, mu=0.5, max_share=0.25) == [True, True, True, False]
        assert kept(ClipV, batch, signals, mu=0.5, max_share=0.5) == [False, True, True, False]

    def test_the_mean_over_the_vocabulary(self) -> None:
        # Uniform: H + log p = 0. (0.8, 0.2): H = 0.5003224; 0.64 (0.5003224 - 0.2231436) + 0.04 (0.5003224 - 1.6094379) = 0.1330842.
        probabilities = torch.tensor([[0.5, 0.5], [0.8, 0.2], [1.0, 0.0]])
        assert expected_discriminator(probabilities.log()).tolist() == pytest.approx([0.0, 0.1330842, 0.0], abs=1e-6)

    def test_a_sampled_token_s_own_discriminator_averages_to_it(self) -> None:
        # By summing over the outcomes instead of sampling them: D has mean 0 under the policy.
        p = torch.tensor([0.5, 0.3, 0.2])
        entropy = -(p * p.log()).sum()
        signals = Signals(old_N=p.log(), entropy_N=entropy.repeat(3))
        mean = (p.double() * discriminator(signals)).sum().item()
        assert expected_discriminator(p.log()[None]).item() == pytest.approx(mean, abs=1e-6)


class TestCov:
    # A - mean = ±1, log π - mean = 2, 1, -1, -2 at each sign: C = 2, 1, -1, -2 and the reverse.
    batch = step_batch([0.0] * 8, groups=[0, 0, 0, 0, 1, 1, 1, 1], rollouts=[0, 1, 2, 3] * 2)
    signals = Signals(old_N=torch.tensor([-1.0, -2.0, -4.0, -5.0] * 2))
    advantages = [3.0] * 4 + [1.0] * 4

    @pytest.mark.parametrize(("share", "chosen"), [(1e-3, 1), (0.25, 2), (0.375, 3), (0.5, 4)])
    def test_chooses_the_share_of_largest_covariance_and_at_least_one(self, share: float, chosen: int) -> None:
        found = kept(Cov, self.batch, self.signals, self.advantages, share=share)
        dropped = [place for place, is_kept in enumerate(found) if not is_kept]
        assert len(dropped) == chosen and set(dropped) <= {0, 7, 1, 6}
        assert chosen == 1 or {0, 7} <= set(dropped)

    def test_draws_among_those_between_the_bounds_whatever_their_order(self) -> None:
        keys = {"choose": "random", "low": -1.5, "high": 1.5, "share": 0.25}
        drawn = set()
        for step in range(1, 9):
            batch = replace(self.batch, step=step)
            found = kept(Cov, batch, self.signals, self.advantages, **keys)
            order = torch.tensor([5, 2, 7, 0, 1, 6, 3, 4])
            moved = step_batch(
                [0.0] * 8, groups=batch.group_B[order].tolist(), rollouts=batch.rollout_B[order].tolist(), step=step
            )
            old_N, advantages_N = self.signals.old_N[order], torch.tensor(self.advantages)[order]
            assert kept(Cov, moved, Signals(old_N=old_N), advantages_N.tolist(), **keys) == [found[i] for i in order]
            drawn |= {frozenset(place for place, is_kept in enumerate(found) if not is_kept)}
        assert all(len(each) == 2 and each <= {1, 2, 5, 6} for each in drawn) and len(drawn) > 2
        assert kept(Cov, self.batch, self.signals, self.advantages, choose="random", low=2.5) == [True] * 8

    def test_needs_no_mask_of_its_own_but_a_loss_that_reads_it_does(self) -> None:
        with pytest.raises(ConfigError, match=r"kl_cov acts on tokens that a mask names.*algorithm\.mask: cov"):
            build_algorithm("grpo", {"loss": "kl_cov"})
        # The loss that reads the mask keeps the weight of all tokens; any other one drops those that it names.
        for loss, weights in (("kl_cov", [0.25] * 4), ("ppo", [0.0, 0.25, 0.25, 0.25])):
            algorithm = build_algorithm("kl_cov", {"loss": loss})
            batch = step_batch([1.0, 0.0], tokens=[2, 2])
            plan = algorithm.plan(batch, Signals(old_N=torch.tensor([-0.1, -1.0, -1.0, -1.0])))
            assert plan.policy_weights_N.tolist() == weights and plan.metrics["mask_kept"] == 0.75


class TestEntropyMask:
    def test_keeps_the_share_of_highest_entropy(self) -> None:
        # Five entropies: the 0.8 quantile lies at place 3.2, 0.4 + 0.2 · 0.1; the 0.5 quantile is the third.
        signals = Signals(entropy_N=torch.tensor([0.3, 0.1, 0.5, 0.4, 0.2]))
        assert kept(Entropy, step_batch([0.0] * 5), signals) == [False, False, True, False, False]
        assert kept(Entropy, step_batch([0.0] * 5), signals, share=0.5) == [True, False, True, True, False]
        assert kept(Entropy, step_batch([0.0] * 5), signals, share=1.0) == [True] * 5


@pytest.mark.parametrize("name", sorted(MASKS.builtins))
def test_an_empty_batch_has_nothing_to_drop(name: str) -> None:
    empty = torch.zeros(0)
    signals = Signals(old_N=empty, entropy_N=empty, discriminator_N=empty)
    assert MASKS.load(name)()(step_batch([], [], []), signals, empty).tolist() == []
