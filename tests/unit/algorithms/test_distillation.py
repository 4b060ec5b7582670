"""Distances from a teacher by the sampled token and over the whole vocabulary; the first estimates the second."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rftcore.algorithms.advantages.jsd import SampledJSD, SampledJSDConfig
from rftcore.algorithms.advantages.teacher import Teacher, TeacherConfig
from rftcore.algorithms.base import Credit, Signals
from rftcore.algorithms.losses.jsd import JSD, JSDConfig
from tests.support.algorithms import step_batch


def credit(advantage: Teacher | SampledJSD, student: list[float], teacher: list[float]) -> Credit:
    batch = step_batch([math.nan], tokens=[len(student)], behavior=student)
    return advantage(batch, Signals(teacher_N=torch.tensor(teacher)))


def test_on_policy_distillation_rewards_what_the_teacher_finds_more_likely() -> None:
    # k = 2: 2 (-1 + 3) = 4 and 2 (-2 + 0.5) = -3. Mean of student - teacher: (-2 + 1.5) / 2 = -0.25.
    found = credit(Teacher(TeacherConfig(coef=2.0)), [-3.0, -0.5], [-1.0, -2.0])
    assert found.advantages_N.tolist() == pytest.approx([4.0, -3.0])
    assert found.metrics == {"teacher_kl": pytest.approx(-0.25)}


def test_recomputed_log_probabilities_come_before_the_engine_s() -> None:
    batch = step_batch([0.0], tokens=[1], behavior=[-9.0])
    signals = Signals(teacher_N=torch.tensor([-1.0]), old_N=torch.tensor([-3.0]))
    assert Teacher()(batch, signals).advantages_N.tolist() == pytest.approx([2.0])
    assert SampledJSD(SampledJSDConfig(beta=1.0))(batch, signals).advantages_N.tolist() == pytest.approx([2.0])


@pytest.mark.parametrize("part", [Teacher(), SampledJSD(), SampledJSD(SampledJSDConfig(beta=0.0))])
def test_a_token_that_one_of_the_two_excludes_has_a_finite_advantage(part: Teacher | SampledJSD) -> None:
    found = credit(part, [-1e30, 0.0], [0.0, -math.inf])
    assert found.advantages_N.isfinite().all()
    assert credit(part, [], []).advantages_N.tolist() == []


class TestSampledJSD:
    @pytest.mark.parametrize(
        ("form", "beta", "expected"),
        [
            # Student 0.2, teacher 0.6. β = ½: m = 0.4, so ½ log(0.4 / 0.2). β = ¼: m = 0.3, so ¾ log(0.3 / 0.2).
            ("gradient", 0.5, 0.5 * math.log(2.0)),
            ("gradient", 0.25, 0.75 * math.log(1.5)),
            ("gradient", 1.0, math.log(3.0)),
            ("gradient", 0.0, 2.0),  # 0.6 / 0.2 - 1
            # -(½ log(0.6 / 0.4) + ½ log(0.2 / 0.4)) = -½ log 0.75
            ("per-token", 0.5, -0.5 * math.log(0.75)),
            # -(¼ log(0.6 / 0.3) + ¾ log(0.2 / 0.3))
            ("per-token", 0.25, -0.25 * math.log(2.0) - 0.75 * math.log(2.0 / 3.0)),
            ("per-token", 0.0, math.log(3.0)),
            ("per-token", 1.0, -math.log(3.0)),
        ],
    )
    def test_against_numbers(self, form: str, beta: float, expected: float) -> None:
        config = SampledJSDConfig.model_validate({"form": form, "beta": beta, "coef": 3.0})
        found = credit(SampledJSD(config), [math.log(0.2)], [math.log(0.6)])
        assert found.advantages_N.item() == pytest.approx(3.0 * expected, rel=1e-5)

    @pytest.mark.parametrize("beta", [0.0, 0.2, 0.5, 0.9, 1.0])
    def test_its_expected_policy_gradient_is_the_gradient_of_the_divergence(self, beta: float) -> None:
        # Exactly, by summing over the vocabulary: Σ_v s(v) A(v) ∇log s(v) = -∇JSD(s, t).
        logits, teacher = self.distributions()
        logprobs = logits.log_softmax(-1)
        advantages = credit(
            SampledJSD(SampledJSDConfig(beta=beta)), logprobs.tolist(), teacher.log_softmax(-1).tolist()
        ).advantages_N
        expected = (logprobs.detach().exp() * advantages * logprobs).sum()
        (policy_gradient,) = torch.autograd.grad(expected, logits)
        (gradient,) = torch.autograd.grad(JSD(JSDConfig(beta=beta)).read(logits[None], teacher[None]).sum(), logits)
        assert gradient.abs().max() > 0.01
        torch.testing.assert_close(policy_gradient, -gradient, rtol=1e-4, atol=1e-6)

    def test_per_token_at_one_half_does_not_know_which_of_the_two_is_the_teacher(self) -> None:
        part = SampledJSD(SampledJSDConfig(form="per-token"))
        there = credit(part, [-0.5, -3.0], [-3.0, -0.5]).advantages_N
        assert there[0].item() == pytest.approx(there[1].item()) and there[0] > 0

    @staticmethod
    def distributions() -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(0)
        logits, teacher = (2.0 * torch.randn(9, generator=random) for _ in range(2))
        return logits.requires_grad_(), teacher


class TestJSD:
    # Student (0.5, 0.5), teacher (0.8, 0.2).
    student = torch.tensor([[0.5, 0.5]]).log()
    teacher = torch.tensor([[0.8, 0.2]]).log()

    @pytest.mark.parametrize(
        ("beta", "expected"),
        [
            (0.0, 0.8 * math.log(1.6) + 0.2 * math.log(0.4)),
            (1.0, 0.5 * math.log(0.625) + 0.5 * math.log(2.5)),
            # m = (0.65, 0.35): ½ (0.8 log(0.8/0.65) + 0.2 log(0.2/0.35)) + ½ (0.5 log(0.5/0.65) + 0.5 log(0.5/0.35))
            (
                0.5,
                0.5 * (0.8 * math.log(0.8 / 0.65) + 0.2 * math.log(0.2 / 0.35))
                + 0.25 * (math.log(0.5 / 0.65) + math.log(0.5 / 0.35)),
            ),
        ],
    )
    def test_against_numbers(self, beta: float, expected: float) -> None:
        assert JSD(JSDConfig(beta=beta)).read(self.student, self.teacher).tolist() == pytest.approx([expected])

    @pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
    def test_of_tokens_that_one_excludes_is_finite(self, beta: float) -> None:
        logits = torch.tensor([[0.0, -math.inf, 1.0], [900.0, 0.0, 0.0]], requires_grad=True)
        teacher = torch.tensor([[-math.inf, 0.0, 1.0], [-900.0, 0.0, 0.0]])
        found = JSD(JSDConfig(beta=beta)).read(logits, teacher)
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        assert found.isfinite().all() and gradient.isfinite().all()

    @pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
    def test_does_not_depend_on_a_constant_added_to_a_row(self, beta: float) -> None:
        part = JSD(JSDConfig(beta=beta))
        torch.testing.assert_close(
            part.read(self.student + 3.0, self.teacher - 2.0), part.read(self.student, self.teacher)
        )
