"""Policy losses and the critic's against numbers worked out by hand, and for ratios that break formulas."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rftcore.algorithms import LOSSES, build_algorithm
from rftcore.algorithms.base import Loss, Signals, Term, TokenTerm, TokenView
from rftcore.algorithms.losses.cispo import CISPO
from rftcore.algorithms.losses.dppo import DPPO
from rftcore.algorithms.losses.opmd import OPMD
from rftcore.algorithms.losses.ppo import PPO
from rftcore.algorithms.losses.rec import REC
from rftcore.algorithms.losses.reinforce import Reinforce
from rftcore.algorithms.losses.sapo import SAPO
from rftcore.algorithms.losses.sppo import SPPO
from rftcore.algorithms.losses.topr import TOPR
from rftcore.algorithms.losses.value import Value
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError
from tests.support.algorithms import outputs_of, ratio_view, step_batch, token_gradient, token_view


def part(term: type[Term], **keys: Any) -> Term:
    return term(parse_section(term.Config, keys, "loss"))


def gradient(term: type[Term], ratios: list[float], advantages: list[float], **keys: Any) -> list[float]:
    view = ratio_view(ratios, advantages)
    return token_gradient(part(term, **keys)(view).loss_U, view)


class TestPPOOverAResponse:
    def test_level_product_is_one_clipped_loss_per_response(self) -> None:
        # Ratios 1.1 · 1.05 = 1.155, A = 2: the response's loss is -2.31, half at each token, and each gradient -2.31.
        view = token_view([math.log(1.1), math.log(1.05)], advantages_N=[2.0, 2.0], sequence_N=[5, 5])
        found = part(PPO, level="product")(view)
        assert found.loss_U.tolist() == pytest.approx([-1.155, -1.155])
        assert token_gradient(found.loss_U, view) == pytest.approx([-2.31, -2.31])

    def test_level_product_is_clipped_as_a_whole(self) -> None:
        # 1.1 · 1.2 = 1.32 > 1.2: -1.2 · 2, half at each token.
        view = token_view([math.log(1.1), math.log(1.2)], advantages_N=[2.0, 2.0], sequence_N=[5, 5])
        found = part(PPO, level="product")(view)
        assert found.loss_U.tolist() == pytest.approx([-1.2, -1.2])
        assert token_gradient(found.loss_U, view) == [0.0, 0.0]


class TestCISPO:
    def test_weighs_each_token_by_its_clipped_ratio(self) -> None:
        # Weights 0.8, 1, 1.28; -w · 2 · log ρ with log 0.5 = -0.6931472, log 1.5 = 0.4054651.
        view = ratio_view([0.5, 1.0, 1.5], [2.0] * 3)
        found = part(CISPO, clip=[0.2, 0.28])(view)
        assert found.loss_U.tolist() == pytest.approx([1.1090355, 0.0, -1.0379907])
        assert token_gradient(found.loss_U, view) == pytest.approx([-1.6, -2.0, -2.56])
        assert found.metrics_U["clip_fraction"].tolist() == [1, 0, 1]

    def test_has_no_lower_bound_by_default(self) -> None:
        assert gradient(CISPO, [0.5, 1.5], [-1.0, -1.0]) == pytest.approx([0.5, 1.28])

    def test_drop_clipped_drops_what_the_clip_of_ppo_would(self) -> None:
        keys = {"clip": [0.2, 0.28], "drop_clipped": True}
        assert gradient(CISPO, [1.5, 1.5, 0.5, 0.5], [1.0, -1.0, 1.0, -1.0], **keys) == pytest.approx(
            [0, 1.28, -0.8, 0]
        )


class TestSAPO:
    def test_the_gate_is_that_of_the_advantage_s_sign(self) -> None:
        # A = 1, τ = 1: 4 σ(0) = 2; 4 σ(1) = 4 · 0.7310586. A = -1, τ = 1.05: (4 / 1.05) σ(1.05) = 3.8095238 · 0.7407749.
        view = ratio_view([1.0, 2.0, 2.0], [1.0, 1.0, -1.0])
        found = SAPO()(view)
        assert found.loss_U.tolist() == pytest.approx([-2.0, -2.9242343, 2.8219996], abs=1e-6)

    def test_the_gradient_is_that_of_the_policy_gradient_at_ratio_one_and_fades(self) -> None:
        # 4 σ (1 - σ) ρ A: 4 · 0.25 = 1; 4 · 0.7310586 · 0.2689414 · 2 = 1.5728955; 4 · 0.7407749 · 0.2592251 · 2 = 1.5362205.
        found = gradient(SAPO, [1.0, 2.0, 2.0], [1.0, 1.0, -1.0])
        assert found == pytest.approx([-1.0, -1.5728955, 1.5362205], abs=1e-5)


class TestTOPR:
    def test_tapers_bad_tokens_only(self) -> None:
        found = gradient(TOPR, [0.5, 2.0, 0.5, 2.0], [1.0, 1.0, -1.0, -1.0], level="token")
        assert found == pytest.approx([-1.0, -1.0, 0.5, 1.0])

    def test_takes_the_ratio_of_the_response(self) -> None:
        # 0.5 · 0.5 = 0.25; its geometric mean 0.5.
        view = token_view([math.log(0.5)] * 2, advantages_N=[-1.0, -1.0], sequence_N=[0, 0])
        assert token_gradient(TOPR()(view).loss_U, view) == pytest.approx([0.25, 0.25])
        assert token_gradient(part(TOPR, level="sequence")(view).loss_U, view) == pytest.approx([0.5, 0.5])

    def test_refuses_bounds_in_the_wrong_order(self) -> None:
        with pytest.raises(ConfigError, match="low must not be above high"):
            part(TOPR, low=2.0)


def test_opmd_divides_the_policy_gradient() -> None:
    # -A / (1 + τ); the loss 1.5 · log 2 / 2 at log π = -log 2.
    view = token_view([-math.log(2)], advantages_N=[1.5])
    assert OPMD()(view).loss_U.tolist() == pytest.approx([0.5198604])
    assert gradient(OPMD, [1.0, 3.0], [1.0, -1.0], tau=3.0) == pytest.approx([-0.25, 0.25])


def test_sppo_drops_tokens_far_from_their_anchor() -> None:
    # [1 / 1.3, 1.3] = [0.7692308, 1.3]. -2 log 0.8 = 0.4462871; -2 log 1.2 = -0.3646431.
    view = ratio_view([0.7, 0.8, 1.2, 1.4], [2.0] * 4)
    found = SPPO()(view)
    assert found.loss_U.tolist() == pytest.approx([0.0, 0.4462871, -0.3646431, 0.0])
    assert token_gradient(found.loss_U, view) == [0.0, -2.0, -2.0, 0.0]
    assert found.metrics_U["clip_fraction"].tolist() == [1, 0, 0, 1]


class TestReinforce:
    def test_plain_ignores_who_sampled(self) -> None:
        assert gradient(Reinforce, [0.5, 2.0], [1.0, -3.0]) == [-1.0, 3.0]
        assert build_algorithm("reinforce").signals == frozenset()

    def test_importance_weights_are_the_ratios(self) -> None:
        # -A ρ and its gradient, which is the same.
        assert gradient(Reinforce, [0.5, 2.0], [1.0, -3.0], importance=True) == pytest.approx([-0.5, 6.0])
        assert build_algorithm("reinforce", {"loss": {"importance": True}}).signals == {"behavior"}


class TestREC:
    ratios = (0.3, 0.6, 0.9, 1.1, 1.5, 3.5)

    @pytest.mark.parametrize(
        ("mode", "good", "bad"),
        [
            ("none", [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]),
            ("one-side", [1, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]),  # ρ ≤ 1.2; ρ ≥ 0.8
            ("two-side", [0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 0]),
            ("ring", [1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1]),  # besides ρ ≤ 0.4; ρ ≥ 3
        ],
    )
    def test_modes_drop_tokens_by_ratio_and_sign(self, mode: str, good: list[int], bad: list[int]) -> None:
        keys = {"mode": mode, "weight": "none"}
        assert gradient(REC, [*self.ratios], [1.0] * 6, **keys) == [-value for value in good]
        assert gradient(REC, [*self.ratios], [-1.0] * 6, **keys) == bad

    def test_gspo_one_side_drops_sequences(self) -> None:
        # sqrt(2 · 0.5) = 1 is within, sqrt(2 · 1) = 1.41 is not.
        view = token_view(
            [math.log(2), math.log(0.5), math.log(2), 0.0], advantages_N=[1.0] * 4, sequence_N=[0, 0, 1, 1]
        )
        found = part(REC, mode="gspo-one-side", weight="none")(view)
        assert token_gradient(found.loss_U, view) == [-1, -1, 0, 0]
        # sequence: the geometric means 1 and sqrt 2 as weights.
        found = part(REC, mode="none", weight="sequence")(view)
        assert token_gradient(found.loss_U, view) == pytest.approx([-1, -1, -1.4142136, -1.4142136])

    def test_weights(self) -> None:
        assert gradient(REC, [0.5, 3.0], [1.0, 1.0], mode="none") == pytest.approx([-0.5, -3.0])
        # e^(1/2) and e^(-1/2).
        keys = {"mode": "none", "weight": "advantage", "temperature": 2.0}
        assert gradient(REC, [0.5, 3.0], [1.0, -1.0], **keys) == pytest.approx([-1.6487213, 0.6065307])

    def test_regularisers(self) -> None:
        # Advantage 0: 0.5 · ½ log² 2 = 0.1201133, gradient 0.5 log 2; forward-kl: -0.5 log 2, gradient -0.5.
        view = ratio_view([2.0], [0.0])
        for name, loss, slope in (("k2", 0.1201133, 0.3465736), ("forward-kl", -0.3465736, -0.5)):
            found = part(REC, regulariser=name, coef=0.5)(view)
            assert found.loss_U.tolist() == pytest.approx([loss]) and token_gradient(
                found.loss_U, view
            ) == pytest.approx([slope])

    def test_one_side_with_importance_weights_has_the_gradient_of_ppo(self) -> None:
        for advantage in (1.0, -1.0):
            expected = gradient(PPO, [*self.ratios], [advantage] * 6)
            assert gradient(REC, [*self.ratios], [advantage] * 6) == pytest.approx(expected)

    @pytest.mark.parametrize("keys", [{"coef": 0.1}, {"regulariser": "k2"}, {"mode": "ring", "outer": 0.1}])
    def test_refuses_keys_that_do_not_fit(self, keys: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=r"regulariser and coef|outer must not be narrower"):
            part(REC, **keys)


class TestValue:
    def found(self, value: float, target: float, **keys: Any) -> tuple[Loss, float]:
        values_N = torch.tensor([value], requires_grad=True)
        view = replace(token_view([0.0], old_values_N=[0.5], returns_N=[target]), values_N=values_N)
        loss = part(Value, **keys)(view)
        (grad,) = torch.autograd.grad(loss.loss_U.sum(), values_N)
        return loss, grad.item()

    @pytest.mark.parametrize(
        ("value", "target", "loss", "slope"),
        [
            (1.0, 2.0, 0.845, 0.0),  # limited to 0.7: ½ · 1.3² is above ½ · 1²
            (0.6, 2.0, 0.98, -1.4),  # not limited: ½ · 1.4²
            (1.0, 0.0, 0.5, 1.0),  # ½ · 1² is above ½ · 0.7²
        ],
    )
    def test_is_the_larger_of_both_errors(self, value: float, target: float, loss: float, slope: float) -> None:
        found, grad = self.found(value, target)
        assert found.loss_U.tolist() == pytest.approx([loss]) and grad == pytest.approx(slope)

    def test_without_a_limit_is_half_the_squared_error(self) -> None:
        found, grad = self.found(1.0, 2.0, clip=None)
        assert found.loss_U.tolist() == [0.5] and grad == -1.0 and "value_clip_fraction" not in found.metrics_U

    def test_of_a_batch_is_the_mean_over_its_tokens_and_trains_the_critic_alone(self) -> None:
        # Returns: rewards 1 and 0 at one token each. v = v_old = 0: ½ · 1² and 0, mean 0.25.
        algorithm = build_algorithm("ppo", {"kl": {"coef": 0}})
        assert algorithm.signals == {"behavior", "values"}
        batch, zeros = step_batch([1.0, 0.0]), torch.zeros(2)
        plan = algorithm.plan(batch, Signals(values_N=zeros))
        values_N = zeros.clone().requires_grad_()
        outputs = outputs_of(plan, torch.arange(2), torch.zeros(2), values_N=values_N)
        loss, metrics = algorithm.critic_objective(plan, outputs)
        assert loss.item() == pytest.approx(0.25) and metrics["value_loss"].item() == pytest.approx(0.25)
        assert torch.autograd.grad(loss, values_N)[0].tolist() == [-0.5, 0.0]

    def test_counts_a_sequence_as_the_policys_does_however_it_was_drawn(self) -> None:
        algorithm = build_algorithm("ppo", {"kl": {"coef": 0}})
        gradients = []
        for weights in ([1.0, 1.0], [5.0, 1.0]):
            batch = replace(step_batch([1.0, -1.0]), importance_weights_B=torch.tensor(weights))
            plan = algorithm.plan(batch, Signals(values_N=torch.zeros(2)))
            logprobs_N, values_N = torch.zeros(2).requires_grad_(), torch.zeros(2).requires_grad_()
            outputs = outputs_of(plan, torch.arange(2), logprobs_N, values_N=values_N)
            objectives = algorithm.objective, algorithm.critic_objective
            total = sum((each(plan, outputs)[0] for each in objectives), torch.zeros(()))
            gradients.append(torch.autograd.grad(total, (logprobs_N, values_N)))
        for plain_N, weighted_N in zip(*gradients, strict=True):
            assert plain_N.abs().min() > 0
            assert (weighted_N / plain_N).tolist() == pytest.approx([5.0, 1.0])


class TestDPPO:
    # p and q: 0.5 and 0.45; 0.3 and 0.05; 0.05 and 0.3; 0.001 and 0.0001, a ratio of 10. TV 0.05, 0.25, 0.25, 0.0009.
    # KL: 0.45 log 0.9 + 0.55 log 1.1 = 0.00501; 0.05 log(1/6) + 0.95 log(0.95/0.7) = 0.20053; 0.3 log 6 + 0.7 log(0.7/0.95) = 0.32376;
    # 0.0001 log 0.1 + 0.9999 log(0.9999/0.999) = 0.00067.
    p, q = [0.5, 0.3, 0.05, 0.001], [0.45, 0.05, 0.3, 0.0001]

    @pytest.mark.parametrize(
        ("keys", "advantage", "dropped"),
        [
            ({}, 1.0, [1]),
            ({}, -1.0, [2]),
            ({"high": 0.3}, 1.0, []),
            ({"low": 0.04}, 1.0, [1]),
            ({"high": 0.04}, 1.0, [0, 1]),
            ({"divergence": "kl", "low": 0.2, "high": 0.2}, 1.0, [1]),
            ({"divergence": "kl", "low": 0.2, "high": 0.21}, 1.0, []),
            ({"divergence": "kl", "low": 0.32, "high": 0.2}, -1.0, [2]),
            ({"divergence": "kl", "low": 0.33, "high": 0.2}, -1.0, []),
        ],
    )
    def test_drops_tokens_whose_probability_moved_too_far_in_the_direction_of_the_advantage(
        self, keys: dict[str, Any], advantage: float, dropped: list[int]
    ) -> None:
        view = token_view(
            [math.log(p) for p in self.p], anchor_N=[math.log(q) for q in self.q], advantages_N=[advantage] * 4
        )
        found = part(DPPO, limit=8.0, **keys)(view)
        ratios = [0.0 if place in dropped else min(p / q, 8.0) for place, (p, q) in enumerate(zip(self.p, self.q))]
        assert token_gradient(found.loss_U, view) == pytest.approx([-advantage * ratio for ratio in ratios], rel=1e-5)
        assert found.metrics_U["clip_fraction"].nonzero().flatten().tolist() == dropped


POLICY_LOSSES = [
    name
    for name in sorted(LOSSES.builtins)
    if issubclass(LOSSES.load(name), TokenTerm) and LOSSES.load(name).uses_advantages
]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "dppo": [{"divergence": "kl"}],
    "ppo": [{"level": "sequence"}, {"level": "product"}, {"dual_clip": 3.0}],
    "reinforce": [{"importance": True}],
    "rec": [
        {"weight": "advantage"},
        {"mode": "gspo-one-side", "weight": "sequence"},
        {"regulariser": "k2", "coef": 1.0},
    ],
}


@pytest.mark.parametrize(
    ("name", "keys"), [(name, keys) for name in POLICY_LOSSES for keys in [{}, *VARIANTS.get(name, [])]], ids=str
)
def test_policies_with_nothing_in_common_have_a_finite_loss_and_gradient(name: str, keys: dict[str, Any]) -> None:
    term = part(LOSSES.load(name), **keys)
    for advantage in (-1.0, 0.0, 1.0, 1000.0):
        # Sequence 0 is far above its anchor, sequence 1 far below it, and 2 both.
        view: TokenView = token_view(
            [-1.0] * 6 + [-900.0] * 6 + [-1.0, -900.0, 0.0],
            anchor_N=[-900.0] * 5 + [-math.inf] + [-1.0] * 6 + [-900.0, -1.0, 0.0],
            advantages_N=[advantage] * 15,
            sequence_N=[0] * 6 + [1] * 6 + [2] * 3,
        )
        view = replace(view, kept_N=torch.arange(15) % 2 == 0)
        loss_N = term(view).loss_U
        assert loss_N.isfinite().all() and all(math.isfinite(value) for value in token_gradient(loss_N, view))


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_no_tokens_have_no_loss(name: str) -> None:
    view = replace(token_view([]), kept_N=torch.zeros(0, dtype=torch.bool))
    assert LOSSES.load(name)()(view).loss_U.tolist() == []
