"""How the values of several rewards become one."""

from __future__ import annotations

from rftcore.config.reward import Combination, RewardConfig


class RewardTotal:
    """The combination of the values of rewards, which are added in their order.

    - sum: Σ weight · value
    - product: Π value ** weight, of values of 0 or more
    - first_failure: Σ weight · value up to the first failure, included

    Attributes:
        value: the combination so far.
        has_failed: whether a value was a failure, so that no further reward counts.
    """

    def __init__(self, combination: Combination, value: float | None = None) -> None:
        """`value`: a combination to continue."""
        neutral = 1.0 if combination == "product" else 0.0
        self._combination = combination
        self.value = neutral if value is None else value
        self.has_failed = False

    def add(self, reward: RewardConfig, value: float) -> None:
        """Add the value of the next reward.

        Raises:
            ValueError: a product of a negative value.
        """
        if self._combination == "product":
            if value < 0 and reward.weight != 0:
                raise ValueError("a product needs values of 0 or more")
            self.value *= value**reward.weight
        else:
            self.value += reward.weight * value
            self.has_failed = self._combination == "first_failure" and reward.fails(value)
