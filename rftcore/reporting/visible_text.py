"""Control characters as escapes, because models, tools and environments write texts, and a terminal would obey them."""

from __future__ import annotations

import re
import unicodedata

# Marks that change the direction of the text around them.
_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_HIDDEN_IN_JSON = re.compile(f"[\x7f-\x9f\u2028\u2029\ud800-\udfff{''.join(sorted(_BIDIRECTIONAL))}]")


def visible(text: str) -> str:
    """Return a text whose control characters are escapes, except line breaks; a tab is four spaces."""
    if text.isprintable():
        return text
    return "".join(_visible(character) for character in text)


def visible_json(text: str) -> str:
    """Return JSON with these characters as escapes of JSON, which leaves some of them as they are. Its value is the same."""
    return _HIDDEN_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _visible(character: str) -> str:
    if character in "\n ":
        return character
    if character == "\t":
        return "    "
    if character in _BIDIRECTIONAL or unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character
