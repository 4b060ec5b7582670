"""The `algorithm` section of a configuration: a preset, and the parts that replace or change its own.

A preset is data: the same keys as a user's, plus what the reference page shows. A user's keys are merged into it key by key. Naming
another part (`loss: {name: cispo}`) replaces the preset's part as a whole, since its keys belong to the part that it names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rftcore.algorithms.choice import PartChoice
from rftcore.algorithms.kl import KLConfig
from rftdata.config import Section


class EntropyConfig(Section):
    coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus in the loss.")


class ScheduleConfig(Section):
    """A coefficient that changes with the step. YAML may also give one number.

    It rises linearly from `start` to `peak` over `warmup_steps`, then falls to `end` over `decay_steps` on a half cosine.
    """

    start: float = Field(0.0, ge=0, le=1, description="Value before the first step.")
    peak: float = Field(0.1, ge=0, le=1, description="Value after the warm-up.")
    end: float = Field(0.1, ge=0, le=1, description="Value after the decay.")
    warmup_steps: int = Field(0, ge=0, description="Steps from start to peak.")
    decay_steps: int = Field(0, ge=0, description="Steps from peak to end.")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"peak": value, "end": value} if isinstance(value, int | float) else value

    def at(self, step: int) -> float:
        """Return the value in a step; steps count from 1."""
        if step <= self.warmup_steps:
            return self.start + (self.peak - self.start) * step / self.warmup_steps
        progress = 1.0 if not self.decay_steps else min(1.0, (step - self.warmup_steps) / self.decay_steps)
        return self.end + (self.peak - self.end) * 0.5 * (1.0 + math.cos(math.pi * progress))


class ExpertConfig(Section):
    """A separate loss for sequences that an expert wrote; `loss` then applies to the others only."""

    loss: PartChoice = Field(PartChoice(name="sft"), description="Loss of an expert's tokens.")
    coef: ScheduleConfig = Field(
        ScheduleConfig(), description="μ: the expert's loss has weight μ, the other 1 - μ. A number or a schedule."
    )


class CriticConfig(Section):
    """A value model, trained beside the policy."""

    loss: PartChoice = Field(PartChoice(name="value"), description="Loss of the critic.")
    path: str | None = Field(
        None,
        description="Folder of the model that the critic starts from, such as a reward model; by default the policy's.",
    )
    learning_rate: float = Field(1e-5, gt=0, description="Peak learning rate of the critic.")
    warmup_steps: int = Field(0, ge=0, description="Number of first steps in which only the critic is trained.")


class TeacherConfig(Section):
    """A model whose distribution is imitated. YAML may also give the path alone."""

    path: str = Field(description="Folder of a model with the policy's vocabulary, or a Hugging Face id.")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value


class PairsConfig(Section):
    """How preference pairs are formed from the rewards of a drawn group; the rules are those of the operator `pair_builder`."""

    margin: float = Field(0.0, ge=0, description="Smallest difference of rewards. Equal rewards never form a pair.")
    max_pairs: int = Field(1, ge=1, description="Largest number of pairs of a group; with 1 the best over the worst.")
    ties: Literal["length", "order"] = Field(
        "length",
        description="Which of equally good pairs is taken: the one closest in length, or the one of the earliest rollouts.",
    )
    max_length_ratio: float | None = Field(
        None, ge=1, description="Largest ratio of the longer answer's tokens to the shorter one's."
    )


class AlgorithmConfig(Section):
    """An algorithm in full, after the merge with its preset."""

    advantage: PartChoice | None = Field(
        None, description="Computes advantages from rewards; none for losses without them."
    )
    loss: PartChoice = Field(description="The policy loss, or the loss of sequences or pairs.")
    mask: PartChoice | None = Field(None, description="Chooses tokens that give no gradient.")
    kl: KLConfig = Field(KLConfig(), description="Penalty for the distance from the reference model.")
    entropy: EntropyConfig = Field(EntropyConfig(), description="Bonus for entropy.")
    aggregation: PartChoice = Field(
        PartChoice(name="token-mean"),
        description="How tokens are weighted in the loss: token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm, or your own.",
    )
    correction: tuple[PartChoice, ...] = Field(
        (),
        description="Weights for the mismatch between engine and trainer: truncate, mask or your own; or a list, whose weights are multiplied.",
    )
    expert: ExpertConfig | None = Field(None, description="Separate loss for sequences that an expert wrote.")
    pairs: PairsConfig | None = Field(
        None,
        description="For a loss of pairs: form them from the rewards of each drawn group ({} for the defaults). Without it, stored pairs are drawn.",
    )
    train_on: Literal["responses", "all"] = Field(
        "responses",
        description="Tokens that count: those of responses that the loss mask selects, or all, including prompts.",
    )
    critic: CriticConfig | None = Field(None, description="A value model, for advantages that need one.")
    teacher: TeacherConfig | None = Field(
        None,
        description="Model that a distillation imitates; without one, the log-probabilities that explorer.teacher stored are read.",
    )
    old_logprobs: Literal["behavior", "recomputed"] | None = Field(
        None,
        description="What ratios compare with: the engine's recorded log-probabilities, or the trainer's own, recomputed before the"
        " step. By default behavior, and recomputed where a part needs it.",
    )

    @field_validator("correction", mode="before")
    @classmethod
    def _one_correction(cls, value: Any) -> Any:
        return [value] if isinstance(value, str | Mapping) else value
