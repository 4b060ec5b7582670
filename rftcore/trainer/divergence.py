"""When training has diverged: gradients are not finite, one update after the other."""

from __future__ import annotations

import logging
import math

from rftdata.errors import RftError

logger = logging.getLogger(__name__)

_MAX_SKIPPED_IN_A_ROW = 5


class Divergence:
    """Counts updates that were skipped because a gradient was not finite.

    Attributes:
        skipped_in_a_row: how many, up to the last update.
    """

    def __init__(self) -> None:
        self.skipped_in_a_row = 0

    def saw(self, norms: dict[str, float]) -> bool:
        """Return whether one of an update's gradient norms is not finite.

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
            )  # fmt: skip
        return skipped
