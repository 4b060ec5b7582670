"""What every rank needs to build its `Learner`: small, and the same for all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.config.trainer import TrainerConfig
from rftcore.trainer.learner import Learner


@dataclass(frozen=True, kw_only=True)
class LearnerArguments:
    """See `Learner`. An algorithm may consist of a user's classes, so each rank builds it from its name and its settings.

    Attributes:
        algorithm, algorithm_settings: name of the preset, and the keys that replace the preset's.
        base_dir: folder that `./` in them is relative to.
        run_folder: where a rank writes its stack when asked.
    """

    model_path: str
    config: TrainerConfig
    algorithm: str
    algorithm_settings: dict[str, Any]
    base_dir: Path
    seed: int
    temperature: float = 1.0
    total_steps: int | None = None
    teacher_path: str | None = None
    critic_path: str | None = None
    run_folder: Path | None = None

    def build_algorithm(self) -> Algorithm:
        """Build the algorithm; the errors of `rftcore.algorithms.build_algorithm`."""
        return build_algorithm(self.algorithm, self.algorithm_settings, base_dir=self.base_dir)

    def learner(self, algorithm: Algorithm | None = None) -> Learner:
        """Build the learner of this process; the arguments of `Learner` and its errors.

        Args:
            algorithm: the algorithm where it is built already.
        """
        return Learner(
            self.model_path,
            self.config,
            algorithm or self.build_algorithm(),
            self.seed,
            temperature=self.temperature,
            total_steps=self.total_steps,
            teacher_path=self.teacher_path,
            critic_path=self.critic_path,
            base_dir=self.base_dir,
        )
