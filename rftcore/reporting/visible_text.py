"""Control characters as escapes, because models, tools and environments write texts, and a terminal would obey them."""

from __future__ import annotations

import unicodedata

# Marks that change the direction of the text around them.
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def visible(text: str) -> str:
    """Return a text whose control characters are escapes, except line breaks; a tab is four spaces."""
    if text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def _visible(character: str) -> str:
    if character in "\n ":
        return character
    if character == "\t":
        return "    "
    if character in _BIDIRECTIONAL or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character
