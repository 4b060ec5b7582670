"""The structure that a sampled answer must have: JSON of a schema, a regular expression, one of several texts, or a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rftdata.errors import RftError

Kind = Literal["json", "json_object", "regex", "choice", "grammar"]

_ALLOWED = (
    "{type: json_schema, json_schema: {schema: {…}}}, {type: json_object}, {type: regex, regex: …}, {type: choice, choice: [texts]} or "
    "{type: grammar, grammar: …}"
)


@dataclass(frozen=True)
class Structure:
    """A constraint on an answer. Tokens that cannot continue it are not sampled, and log-probabilities are those among the others.

    Attributes:
        value: a JSON schema as text, a regular expression, texts to choose from, or a grammar in EBNF; empty for any JSON object.
    """

    kind: Kind
    value: str | tuple[str, ...] = ""

    @classmethod
    def of(cls, response_format: Mapping[str, Any]) -> Structure | None:
        """Return the structure of a `response_format`, as OpenAI's interface has it; None for text.

        Raises:
            RftError: the format is unknown or lacks its value.
        """
        kind = response_format.get("type")
        if kind == "text":
            return None
        if kind == "json_object":
            return cls("json_object")
        value = response_format.get("json_schema" if kind == "json_schema" else str(kind))
        if kind == "json_schema" and isinstance(value, Mapping) and isinstance(value.get("schema"), Mapping):
            return cls("json", json.dumps(value["schema"], sort_keys=True))
        if kind == "choice" and isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value):
            return cls("choice", tuple(value))
        if kind in ("regex", "grammar") and isinstance(value, str):
            return cls(kind, value)
        raise RftError("a response_format is not valid", value=dict(response_format), allowed=_ALLOWED)
