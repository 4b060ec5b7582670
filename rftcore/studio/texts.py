"""Texts of models, tasks and people as HTML: escaped, with characters visible that would hide or reorder others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup, escape

from rftcore.reporting.visible_text import visible


def finalized(value: Any) -> Any:
    """Return a value as templates print it: texts with escapes in place of control and bidirectional characters, before markup is escaped."""
    if value is None:
        return ""
    if type(value) is str:
        return visible(value)
    return value


def exact(text: str) -> Markup:
    """Return a text unchanged, for fields that are edited and sent back; of half characters, which no page can have, the escapes."""
    return escape(text.encode("utf-8", "backslashreplace").decode())


def shown(text: str) -> Markup:
    """Return a text of a model, in which escapes of invisible characters are marked."""
    if text.isprintable():
        return escape(text)
    parts: list[str] = []
    for character in text:
        seen = visible(character)
        parts.append(
            escape(seen) if seen == character or character == "\t" else f'<span class="control">{escape(seen)}</span>'
        )
    return Markup("".join(parts))


def heat_class(logprob: float | None) -> str:
    """Return the class of a token by its log-probability: `heat-0` (certain) to `heat-5` (surprising)."""
    if logprob is None:
        return "heat-none"
    bounds: Sequence[float] = (-0.05, -0.3, -1.0, -2.5, -5.0)
    return f"heat-{next((i for i, bound in enumerate(bounds) if logprob >= bound), len(bounds))}"
