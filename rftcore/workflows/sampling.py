"""Changes of the sampling parameters that a workflow may ask for in one call of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from rftcore.engines.base import Decoding
from rftcore.engines.structure import Structure
from rftdata.errors import RftError


class SamplingChanges(TypedDict, total=False):
    """What replaces the parameters of the run in one call.

    Attributes:
        temperature, top_p, top_k: of sampling.
        max_tokens: longest answer; the run's own limit still holds.
        stop: texts that end the answer, instead of the run's.
        response_format: what the answer must be, as in OpenAI's interface: `{"type": "json_schema", "json_schema": {"schema": …}}`,
            `{"type": "json_object"}`; also `{"type": "regex" | "choice" | "grammar", …}`.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    max_tokens: int | None
    stop: str | Sequence[str] | None
    response_format: Mapping[str, Any] | None


def changed(decoding: Decoding, changes: SamplingChanges) -> Decoding:
    """Return sampling parameters with changes; None changes nothing.

    Raises:
        RftError: a parameter is unknown, or its value is not allowed.
    """
    given = {name: value for name, value in changes.items() if value is not None}
    if not given:
        return decoding
    unknown = sorted(set(given) - set(SamplingChanges.__annotations__))
    if unknown:
        raise RftError(
            "model.chat does not know an argument",
            value=unknown[0],
            allowed=", ".join(("tools", "parse", "template_args", *SamplingChanges.__annotations__)),
        )
    for name, is_valid, allowed in _RULES:
        if name in given and not is_valid(given[name]):
            raise RftError(f"model.chat got an invalid {name}", value=given[name], allowed=allowed)
    response_format, stop = given.pop("response_format", None), given.get("stop")
    if stop is not None:
        given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)  # type: ignore[arg-type]  # checked above
    if "max_tokens" in given:
        given["max_tokens"] = min(int(given["max_tokens"]), decoding.max_tokens)  # type: ignore[call-overload]
    if response_format is not None:
        given["structure"] = Structure.of(response_format)  # type: ignore[arg-type]  # checked above
    return replace(decoding, **given)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_texts(value: object) -> bool:
    if isinstance(value, str):
        return bool(value)
    return isinstance(value, list | tuple) and all(isinstance(text, str) and text for text in value)


_RULES: tuple[tuple[str, Any, str], ...] = (
    ("temperature", lambda value: _is_number(value) and value >= 0, "a number of 0 or more"),
    ("top_p", lambda value: _is_number(value) and 0 < value <= 1, "a number above 0 and up to 1"),
    ("top_k", lambda value: _is_whole(value) and value >= 0, "0 (all tokens) or more"),
    ("max_tokens", lambda value: _is_whole(value) and value >= 1, "1 or more"),
    ("stop", _are_texts, "a text, or a list of texts, none of them empty"),
    ("response_format", lambda value: isinstance(value, Mapping), "a mapping with a type"),
)
