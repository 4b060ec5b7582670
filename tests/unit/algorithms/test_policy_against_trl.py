"""Policy gradients against TRL's own code, from rewards to gradients: the same tensors, values and gradients to 1e-5 in float32.

Each case names what TRL is set to, and what a preset is set to besides so that the two define the same loss (`differs` on the
reference page says why). Ours is summed over micro-batches, TRL's is computed at once.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Signals
from rftcore.algorithms.presets import presets
from rftdata.errors import ConfigError
from tests.support.algorithms import loss_in_parts, step_batch
from tests.support.trl_policy import trl_loss

GROUPS = [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, -2.0, 0.25, 3.0, 0.7, 0.7, 0.7, 0.7]
"""The last group has equal rewards."""

LENGTHS = [4, 2, 1, 5, 3, 3, 6, 1, 2, 4, 1, 3]
MICRO_BATCHES = [[7, 0, 3], [1], [2, 4, 5, 6, 11], [8, 9, 10]]
MASK_BT = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def tensors(seed: int) -> dict[str, Tensor]:
    """Log-probabilities of a policy, and of four near it: ratios from about 0.4 to 2.5."""
    random = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(MASK_BT.shape, generator=random)

    logprobs_BT = -3.0 * torch.rand(MASK_BT.shape, generator=random) - 0.01
    return {
        "logprobs_BT": logprobs_BT.clone().requires_grad_(),
        "old_BT": logprobs_BT + noise(0.3),
        "reference_BT": logprobs_BT + noise(0.3),
        "sampled_BT": logprobs_BT + noise(0.4),
        "entropy_BT": noise(1.0).abs(),
    }


def ours(name: str, changes: dict[str, Any], given: dict[str, Tensor], old: Tensor | None = None) -> Tensor:
    algorithm = build_algorithm(name, {"old_logprobs": "recomputed"} | changes)
    flat = {key: values[MASK_BT] for key, values in given.items()}
    batch = step_batch(REWARDS, GROUPS, [0, 1, 2, 3] * 3, tokens=LENGTHS, behavior=flat["sampled_BT"].tolist())
    signals = Signals(
        old_N=flat["old_BT"] if old is None else old,
        reference_N=flat["reference_BT"],
        entropy_N=flat["entropy_BT"],
    )
    with_gradient = {"entropy_N": flat["entropy_BT"]} if algorithm.config.entropy.coef else {}
    return loss_in_parts(algorithm, batch, signals, flat["logprobs_BT"], MICRO_BATCHES, **with_gradient)


EPS = {"advantage": {"eps": 1e-4}}
"""What TRL adds to a standard deviation."""

VLLM = {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_clip_max": 1.5}
GRPO_CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("grpo", EPS, {"loss_type": "dapo"}),
    ("grpo", EPS | {"aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
    ("grpo", {"advantage": {"eps": 1e-4, "scale": "batch"}}, {"scale_rewards": "batch"}),
    ("grpo", {"advantage": {"scale": "none"}}, {"scale_rewards": "none"}),
    ("grpo", EPS | {"loss": {"dual_clip": 1.5}}, {"delta": 1.5}),
    ("grpo", EPS | {"loss": {"max_sequence_kl": 0.1}}, {"off_policy_mask_threshold": 0.1}),
    ("grpo", EPS | {"kl": {"type": "k3", "coef": 0.1}}, {"beta": 0.1}),
    ("grpo", EPS | {"entropy": {"coef": 0.01}}, {"entropy_coef": 0.01, "_entropy_bonus_enabled": True}),
    ("grpo", EPS | {"correction": {"name": "truncate", "high": 1.5}}, VLLM),
    (
        "grpo",
        EPS | {"correction": {"name": "mask", "low": 0.5, "high": 1.5, "keep_weight": True}},
        VLLM | {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_min": 0.5},
    ),
    (
        "grpo",
        EPS | {"correction": {"name": "truncate", "level": "sequence", "high": 1.5}},
        VLLM | {"vllm_importance_sampling_mode": "sequence_truncate"},
    ),
    (
        "grpo",
        EPS | {"correction": {"name": "mask", "level": "sequence", "high": 1.5, "keep_weight": True}},
        VLLM | {"vllm_importance_sampling_mode": "sequence_mask"},
    ),
    (
        "dr_grpo",
        {"aggregation": {"length": 256}},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "max_completion_length": 256},
    ),
    ("dapo", EPS, {"loss_type": "dapo", "epsilon_high": 0.28}),
    ("cispo", EPS, {"loss_type": "cispo", "epsilon_high": 1.28}),
    (
        "gspo",
        EPS,
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    (
        "gspo",
        EPS | {"loss": {"clip": 0.1}, "aggregation": "seq-mean-token-sum"},
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
    ),
    ("sapo", EPS, {"loss_type": "sapo"}),
    ("vespo", EPS, {"loss_type": "vespo"}),
    (
        "vespo",
        EPS | {"loss": {"k_positive": 1.0, "lambda_positive": 0.5, "k_negative": 2.0, "lambda_negative": 4.0}},
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.0,
            "vespo_lambda_pos": 0.5,
            "vespo_k_neg": 2.0,
            "vespo_lambda_neg": 4.0,
        },
    ),
    ("high_entropy", EPS, {"top_entropy_quantile": 0.2}),
    ("high_entropy", EPS | {"mask": {"share": 0.55}}, {"top_entropy_quantile": 0.55}),
]


def test_every_preset_that_claims_these_trainers_is_compared_with_them() -> None:
    claimed = {name for name, preset in presets().items() if re.search("TRL (GRPO|RLOO)Trainer", preset.compared_with)}
    # ppo has the policy loss of grpo.
    assert claimed == {name for name, _, _ in GRPO_CASES} | {"rloo", "ppo", "gdpo"}
    assert build_algorithm("ppo").config.loss == build_algorithm("grpo").config.loss


def check(found: Tensor, expected: Tensor, given: dict[str, Tensor]) -> None:
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    leaf_BT = given["logprobs_BT"]
    (found_BT,), (expected_BT,) = (torch.autograd.grad(loss, leaf_BT) for loss in (found, expected))
    torch.testing.assert_close(found_BT, expected_BT, rtol=0, atol=1e-5)
    assert (expected_BT != 0).any()


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("name", "changes", "trl"), GRPO_CASES, ids=lambda value: str(value)[:60])
def test_grpo_trainer_has_the_same_advantages_loss_and_gradient(
    name: str, changes: dict[str, Any], trl: dict[str, Any], seed: int
) -> None:
    given = tensors(seed)
    sampled = {} if trl.get("use_vllm") else {"sampled_BT": None}
    expected, advantages_B = trl_loss("GRPOTrainer", REWARDS, 4, mask_BT=MASK_BT, **given | sampled, **trl)
    check(ours(name, changes, given), expected, given)
    algorithm = build_algorithm(name, changes)
    signals = Signals(
        old_N=given["old_BT"][MASK_BT].detach(),
        reference_N=given["reference_BT"][MASK_BT],
        entropy_N=given["entropy_BT"][MASK_BT],
    )
    plan = algorithm.plan(step_batch(REWARDS, GROUPS, [0, 1, 2, 3] * 3, tokens=LENGTHS), signals)
    sequence_N = plan.batch.sequence_N
    torch.testing.assert_close(plan.advantages_N, advantages_B[sequence_N], rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", [{}, {"short": 0.5}, {"right": 2.0, "short": -1.0}])
def test_gdpo_is_that_of_the_grpo_trainer_with_several_rewards(weights: dict[str, float]) -> None:
    given = tensors(4)
    short = [
        0.0,
        1.0,
        1.0,
        0.0,
        0.3,
        0.3,
        0.3,
        0.3,
        1.0,
        0.0,
        0.0,
        0.0,
    ]  # equal in the second group, as REWARDS are in the third
    parts = [[right, other] for right, other in zip(REWARDS, short, strict=True)]
    settings = {
        "multi_objective_aggregation": "normalize_then_sum",
        "reward_weights": torch.tensor([weights.get(name, 1.0) for name in ("right", "short")]),
    }
    expected, advantages_B = trl_loss(
        "GRPOTrainer", parts, 4, mask_BT=MASK_BT, **given | {"sampled_BT": None}, **settings
    )
    algorithm = build_algorithm("gdpo", {"advantage": {"eps": 1e-4, "weights": weights}, "old_logprobs": "recomputed"})
    batch = step_batch(
        [9.0] * 12, GROUPS, [0, 1, 2, 3] * 3, tokens=LENGTHS, reward_parts_B=parts, reward_names=("right", "short")
    )
    signals = Signals(old_N=given["old_BT"][MASK_BT].detach())
    plan = algorithm.plan(batch, signals)
    torch.testing.assert_close(plan.advantages_N, advantages_B[batch.sequence_N], rtol=0, atol=1e-5)
    assert plan.metrics["reward_right"] == pytest.approx(sum(REWARDS) / 12)
    check(loss_in_parts(algorithm, batch, signals, given["logprobs_BT"][MASK_BT], MICRO_BATCHES), expected, given)
    with pytest.raises(
        ConfigError, match=r"weights names a reward that rollouts do not have \(got 'long'\); allowed: right, short"
    ):
        build_algorithm("gdpo", {"advantage": {"weights": {"long": 1.0}}}).plan(batch, signals)


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.1, 0.25)])
def test_gmpo_is_that_of_the_gmpo_trainer(low: float, high: float) -> None:
    given = tensors(3)
    settings = {"epsilon_low": low, "epsilon_high": high}
    expected, _ = trl_loss("GMPOTrainer", REWARDS, 4, mask_BT=MASK_BT, **given | {"sampled_BT": None}, **settings)
    check(ours("gmpo", EPS | {"loss": {"low": low, "high": high}}, given), expected, given)


def test_the_corrected_kl_is_trl_s_with_bias_correction_where_ratios_are_below_two() -> None:
    given = tensors(2)
    given["old_BT"] = given["logprobs_BT"].detach() + (given["old_BT"] - given["logprobs_BT"]).detach().clamp(-0.6, 0.6)
    expected, _ = trl_loss("GRPOTrainer", REWARDS, 4, mask_BT=MASK_BT, **given, beta=0.1, use_bias_correction_kl=True)
    check(ours("grpo", EPS | {"kl": {"type": "corrected", "coef": 0.1}}, given), expected, given)


RESPONSES: dict[str, Any] = {"loss": {"level": "product"}, "aggregation": "seq-mean-token-sum"}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("changes", "trl"),
    [
        (RESPONSES, {}),
        (RESPONSES | {"kl": {"type": "k1", "coef": 0.05, "where": "reward"}}, {"beta": 0.05}),
    ],
    ids=["rewards", "rewards and KL"],
)
def test_rloo_trainer_has_the_same_loss_and_gradient(changes: dict[str, Any], trl: dict[str, Any], seed: int) -> None:
    given = tensors(seed)
    needed = {key: values for key, values in given.items() if key not in ("sampled_BT", "entropy_BT")}
    expected, _ = trl_loss("RLOOTrainer", REWARDS, 4, mask_BT=MASK_BT, **needed, **trl)
    check(ours("rloo", changes, given), expected, given)


def test_rloo_per_token_has_the_gradient_of_trl_on_samples_of_the_policy_itself() -> None:
    given = tensors(0)
    given["old_BT"] = given["logprobs_BT"].detach()
    needed = {key: values for key, values in given.items() if key not in ("sampled_BT", "entropy_BT")}
    expected, _ = trl_loss("RLOOTrainer", REWARDS, 4, mask_BT=MASK_BT, **needed)
    found = ours("rloo", {"aggregation": "seq-mean-token-sum"}, given)
    (found_BT,), (expected_BT,) = (torch.autograd.grad(loss, given["logprobs_BT"]) for loss in (found, expected))
    torch.testing.assert_close(found_BT, expected_BT, rtol=0, atol=1e-5)
