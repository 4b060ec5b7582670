"""Ends training that makes no progress: gradients that are not finite in a row, or steps in a row with nothing to train."""

from __future__ import annotations

import logging
import math

from rftdata.errors import RftError

logger = logging.getLogger(__name__)

_MAX_SKIPPED_IN_A_ROW = 5
MAX_EMPTY_IN_A_ROW = 20


class Divergence:
    """Counts the latest updates and steps that changed no weight.

    Attributes:
        skipped_in_a_row: latest updates whose gradients were not finite.
        empty_in_a_row: latest steps in which no pair and no token counted.
    """

    def __init__(self) -> None:
        self.skipped_in_a_row = self.empty_in_a_row = 0

    def end_step(self, *, is_empty: bool) -> None:
        """Count a step.

        Args:
            is_empty: whether none of its updates had anything to train.

        Raises:
            RftError: it is the twentieth such step in a row.
        """
        self.empty_in_a_row = self.empty_in_a_row + 1 if is_empty else 0
        if self.empty_in_a_row >= MAX_EMPTY_IN_A_ROW:
            raise RftError(
                f"{MAX_EMPTY_IN_A_ROW} steps in a row had nothing to train: no pair, or no token that counts",
                todo="see pairs_formed, groups_without_pair, pairs_dropped and num_tokens in the metrics of rft.v_train_step; pairs are formed of rollouts "
                "of one row with different rewards, and have two answers that are not empty",
            )

    def is_skipped(self, norms: dict[str, float]) -> bool:
        """Count an update; return whether one of its gradient norms is not finite.

        Raises:
            RftError: it is the fifth such update in a row.
        """
        skipped = not all(map(math.isfinite, norms.values()))
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped:
            logger.warning(
                "step skipped: a gradient is not finite, and the weights of its model are unchanged: %s", norms
            )
        if self.skipped_in_a_row >= _MAX_SKIPPED_IN_A_ROW:
            raise RftError(
                f"training has diverged: {_MAX_SKIPPED_IN_A_ROW} gradients in a row were not finite",
                value=", ".join(f"{name} {norm}" for name, norm in norms.items()),
                todo="go back to an earlier checkpoint with a smaller learning rate (trainer.learning_rate, algorithm.critic.learning_rate) or a "
                "longer warm-up",
            )
        return skipped
