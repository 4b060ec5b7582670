"""What a learner is built from, besides its algorithm: small, and the same in every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rftcore.config.trainer import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class LearnerArguments:
    """The models of a learner, its section of the configuration, and what it takes from other sections.

    Attributes:
        model_path: folder of a model or a checkpoint, or a Hugging Face id.
        seed: of torch's generators.
        temperature: sampling temperature of the rollouts. It has no effect with an algorithm that does not learn from samples
            (`Algorithm.learns_from_samples`).
        total_steps: length of the run; learning-rate schedules other than constant need it.
        teacher_path: folder of the teacher; None for `algorithm.teacher.path`.
        critic_path: folder of the model that a critic starts from; None for `model_path`.
        base_dir: folder that `./` in names of plug-ins is relative to.
    """

    model_path: str
    config: TrainerConfig
    seed: int
    temperature: float = 1.0
    total_steps: int | None = None
    teacher_path: str | None = None
    critic_path: str | None = None
    base_dir: Path | None = None
