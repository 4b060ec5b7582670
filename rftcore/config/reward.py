"""Configuration of rewards: a list of functions with their arguments, and how their values combine.

An entry is a name (`exact_match`, `./reward.py:score`), or a mapping of a name with keys of its own: `{name: format, weight: 0.2, pattern: …}`. Every key that
is not listed here is an argument of the function, and is validated when the function is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_serializer, model_validator

from rftdata.config import Section

Combination = Literal["sum", "product", "first_failure"]


class RewardConfig(Section):
    """One reward.

    Attributes:
        as_: the key `as`, which Python reserves.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(
        min_length=1,
        description="A built-in reward, reward_model:FOLDER, or the path of your own. Other keys are its arguments (`rft docs write-a-reward`).",
    )
    weight: float = Field(
        1.0,
        allow_inf_nan=False,
        description="Factor of its value in the sum, exponent in the product. With 0 it is stored and does not count.",
    )
    as_: str | None = Field(
        None,
        alias="as",
        min_length=1,
        description="Name of its part in reward_parts; by default the function's. Needed if one function is listed twice.",
    )
    threshold: float | None = Field(
        None,
        allow_inf_nan=False,
        description="With reward_combination: first_failure, the reward fails below this value; by default at 0 and below.",
    )

    @property
    def key(self) -> str:
        """What distinguishes the entry from the others of its list."""
        return self.as_ or self.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the function."""
        return dict(self.model_extra or {})

    def fails(self, value: float) -> bool:
        """Return whether the value is a failure, with which `first_failure` ends."""
        return value <= 0 if self.threshold is None else value < self.threshold

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("weight", "threshold", mode="before")
    @classmethod
    def _is_a_number(cls, value: Any) -> Any:
        if isinstance(value, bool | str):
            raise ValueError("it must be a number")
        return value

    @model_serializer
    def _shortest(self) -> Any:
        """Write a name without further keys as the name alone."""
        further = {"weight": self.weight, "as": self.as_, "threshold": self.threshold}
        defaults = {"weight": 1.0, "as": None, "threshold": None}
        changed = {key: value for key, value in further.items() if value != defaults[key]} | self.arguments
        return {"name": self.name, **changed} if changed else self.name


def listed_rewards(value: object) -> object:
    """Return the value of a key `reward` as a list; one name or one mapping is a list of one."""
    return [value] if isinstance(value, str | dict | RewardConfig) else value


def check_rewards(rewards: Sequence[RewardConfig], combination: Combination, key: str = "explorer.reward") -> None:
    """Refuse rewards that do not fit together.

    Args:
        key: the list's key in the file, for messages.

    Raises:
        ValueError: two have the same name, or a weight or a threshold does not fit the combination.
    """
    keys = [reward.key for reward in rewards]
    doubled = sorted({key for key in keys if keys.count(key) > 1})
    if doubled:
        raise ValueError(
            f"{', '.join(doubled)} is named more than once in {key}; give each a name of its own, {{name: …, as: …}}, or name it once with a weight"
        )
    for reward in rewards:
        if combination != "first_failure" and reward.threshold is not None:
            raise ValueError(
                f"the threshold of the reward {reward.key} has no effect with reward_combination: {combination}; set reward_combination: first_failure, or "
                "remove the threshold"
            )
        if combination == "product" and reward.weight < 0:
            raise ValueError(
                f"the reward {reward.key} has the weight {reward.weight:g}, and with reward_combination: product a weight is an exponent of 0 or more"
            )
