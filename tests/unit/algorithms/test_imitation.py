"""RAFT, MIX and CHORD: what is imitated, with which weight, and what takes no part in statistics."""

from __future__ import annotations

import math

import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Signals
from rftdata.errors import ConfigError
from tests.support.algorithms import loss_and_gradient, step_batch

# Rollouts with rewards 1 and 0 at log π = log π_behavior = 0, and an expert's response of two tokens with p = 0.5.
MIXED = step_batch(
    [1.0, 0.0, math.nan],
    [0, 0, 0],
    tokens=[1, 1, 2],
    behavior=[0.0, 0.0, math.nan, math.nan],
    expert=[False, False, True],
)
LOGPROBS = [0.0, 0.0, math.log(0.5), math.log(0.5)]


def test_raft_is_maximum_likelihood_on_the_best_rollouts_alone() -> None:
    # Rollout 0 (p = 0.5, 0.25) is the best: mean of log 2 and log 4, as if the others were not in the batch.
    logprobs = [math.log(0.5), math.log(0.25), -3.0, -1.0]
    batch = step_batch([1.0, 0.0, 0.5], tokens=[2, 1, 1])
    loss, gradient, metrics = loss_and_gradient(build_algorithm("raft"), batch, logprobs)
    assert loss == pytest.approx(1.5 * math.log(2)) and gradient == [-0.5, -0.5, 0.0, 0.0]
    assert metrics["imitated"] == 0.5
    assert loss == pytest.approx(
        loss_and_gradient(build_algorithm("sft"), step_batch([1.0], tokens=[2]), logprobs[:2])[0]
    )


def test_raft_without_a_best_rollout_has_no_gradient() -> None:
    loss, gradient, _ = loss_and_gradient(build_algorithm("raft"), step_batch([1.0, 1.0]), [-1.0, -2.0])
    assert loss == 0.0 and gradient == [0.0, 0.0]


def test_mix_adds_both_losses_each_over_its_own_tokens() -> None:
    # 0.9 · mean over two tokens of ∓0.7071058: gradients ∓0.3181976, together 0. 0.1 · log 2 of the expert, -0.1 / 2 each.
    loss, gradient, metrics = loss_and_gradient(build_algorithm("mix"), MIXED, LOGPROBS)
    assert loss == pytest.approx(0.1 * math.log(2))
    assert gradient == pytest.approx([-0.3181976, 0.3181976, -0.05, -0.05])
    assert metrics["expert_coef"] == 0.1 and metrics["expert_loss"] == pytest.approx(0.1 * math.log(2))


def test_an_expert_takes_no_part_in_the_statistics_of_rollouts() -> None:
    plan = build_algorithm("mix", {"advantage": {"scale": "batch"}}).plan(MIXED, Signals())
    # std of 1 and 0 alone: 0.7071068.
    assert plan.advantages_N.tolist() == pytest.approx([0.7071058, -0.7071058, 0.0, 0.0], abs=1e-6)


def test_an_expert_whom_no_engine_sampled_leaves_a_correction_finite() -> None:
    # Weights e^0.1 and e^0 on the rollouts: 0.9 / 2 · 0.7071058 · …
    algorithm = build_algorithm("mix", {"correction": "truncate"})
    signals = Signals(old_N=torch.tensor([0.1, 0.0, -1.0, -1.0]))
    _, gradient, _ = loss_and_gradient(algorithm, MIXED, [0.1, 0.0, *LOGPROBS[2:]], signals)
    assert gradient == pytest.approx([-0.3516627, 0.3181976, -0.05, -0.05])


def test_chord_gives_an_expert_s_token_less_weight_when_it_is_likely_or_hopeless() -> None:
    # p (1 - p) = 0.25 at p = 0.5: -0.1 · 0.25 / 2.
    _, gradient, _ = loss_and_gradient(build_algorithm("chord"), MIXED, LOGPROBS)
    assert gradient == pytest.approx([-0.3181976, 0.3181976, -0.0125, -0.0125])


@pytest.mark.parametrize(
    ("step", "coef"),
    [(1, 0.45), (2, 0.9), (3, 0.9 - 0.85 * 0.5 * (1 - math.cos(math.pi / 4))), (4, 0.475), (6, 0.05), (99, 0.05)],
)
def test_the_weight_of_the_expert_follows_its_schedule(step: int, coef: float) -> None:
    # Linear to 0.9 in two steps, then half a cosine to 0.05 in four: the middle (0.9 + 0.05) / 2 at step 4.
    changes = {"expert": {"coef": {"peak": 0.9, "end": 0.05, "warmup_steps": 2, "decay_steps": 4}}}
    batch = step_batch([1.0, 0.0], expert=[False, True], step=step)
    assert build_algorithm("chord", changes).plan(batch, Signals()).metrics["expert_coef"] == pytest.approx(coef)


def test_a_batch_of_experts_alone_is_supervised_fine_tuning() -> None:
    batch = step_batch([math.nan], tokens=[2], behavior=[math.nan] * 2, expert=[True])
    loss, gradient, _ = loss_and_gradient(build_algorithm("mix"), batch, [-1.0, -2.0])
    assert loss == pytest.approx(0.15) and gradient == pytest.approx([-0.05, -0.05])


def test_an_expert_beside_a_critic_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.critic learns from returns"):
        build_algorithm("ppo", {"expert": {"loss": "sft"}})
