"""On-policy distillation: the advantage of a token is positive where the teacher finds it more likely than the student that sampled it.

    A_t = k (log π_teacher(o_t) - log π_anchor(o_t))

The expectation of A_t under the student is -k KL(student ‖ teacher), so its policy gradient minimises that distance at each token
(Gu et al. 2023, "MiniLLM", arXiv 2306.08543, without its reward-to-go; K. Lu 2025, "On-Policy Distillation", Thinking Machines Lab).
Rewards are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import MAX_LOG_RATIO, Advantage, Credit, PartConfig, Signals, StepBatch

if TYPE_CHECKING:
    from torch import Tensor


class TeacherConfig(PartConfig):
    coef: float = Field(1.0, gt=0, description="k of the formula.")


class Teacher(Advantage):
    """Metric: `teacher_kl`, the mean of log π_anchor - log π_teacher, nats per token."""

    Config = TeacherConfig
    needs = frozenset({"teacher", "behavior"})
    uses_rewards = False
    config: TeacherConfig

    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        difference_N, metrics = teacher_difference(batch, signals)
        return Credit(advantages_N=self.config.coef * difference_N, metrics=metrics)


def teacher_difference(batch: StepBatch, signals: Signals) -> tuple[Tensor, dict[str, float]]:
    """Return log π_teacher - log π_anchor of each token, clamped to ±`MAX_LOG_RATIO`, and the metric `teacher_kl`, the mean of its negative."""
    assert signals.teacher_N is not None
    student_N = batch.behavior_N if signals.old_N is None else signals.old_N
    difference_N = (signals.teacher_N - student_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference_N, {"teacher_kl": -difference_N.mean().item() if len(difference_N) else 0.0}
