"""Places in the text of an answer at which the reading of calls goes on."""

from __future__ import annotations

import re

_SPACE = re.compile(r"\s*")


def after_malformed(text: str, start: int, begin: str, end: str) -> int:
    """Return the place after a malformed call: after its end, or at the next beginning.

    Args:
        start: a place in the call.
        begin, end: marks of a call.
    """
    ends, begins = text.find(end, start), text.find(begin, start)
    if ends < 0 or 0 <= begins < ends:
        return begins if begins >= 0 else len(text)
    return ends + len(end)


def after_space(text: str, place: int) -> int:
    """Return the first place from `place` on that is no white space."""
    found = _SPACE.match(text, place)
    return place if found is None else found.end()
