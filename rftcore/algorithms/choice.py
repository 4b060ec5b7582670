"""`PartChoice`: the name of an algorithm's part in a configuration, with its arguments."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field, model_validator

from rftdata.config import Section


class PartChoice(Section):
    """A part by name, and its own keys. YAML may also give the name alone."""

    model_config = ConfigDict(extra="allow", frozen=True)  # the part's own Config validates the other keys

    name: str = Field(description="A built-in part, or your own by path: ./file.py:Class.")

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @property
    def args(self) -> dict[str, Any]:
        """The part's own keys, which its `Config` validates."""
        return dict(self.model_extra or {})
