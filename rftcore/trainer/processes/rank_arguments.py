"""What a rank needs to build its learner: small, and the same for all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.trainer.learner_arguments import LearnerArguments


@dataclass(frozen=True, kw_only=True)
class RankArguments:
    """The arguments of a learner, and its algorithm by name: it may consist of a user's classes, so each rank builds its own.

    Attributes:
        algorithm, algorithm_settings: name of the preset, and the keys that replace the preset's.
        run_folder: where the rank writes its stack on request; None for a rank that answers no such request.
    """

    learner: LearnerArguments
    algorithm: str
    algorithm_settings: dict[str, Any]
    run_folder: Path | None = None

    def build_algorithm(self) -> Algorithm:
        """Build the algorithm; raise the errors of `rftcore.algorithms.build_algorithm`."""
        return build_algorithm(self.algorithm, self.algorithm_settings, base_dir=self.learner.base_dir)
