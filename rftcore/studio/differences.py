"""The difference of two texts, within a bounded time whatever the texts are: models repeat themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence

Piece = tuple[str, str]
"""`same`, `deleted` or `inserted`, and a text."""

_WORDS = re.compile(r"\s+|\w+|[^\w\s]")
_MOST_EDITS = 150


def difference(old: str, new: str) -> list[Piece]:
    """Return the pieces of two texts in order, by words; by lines if too many words differ; as a whole if too many lines do, too."""
    for parts in (_WORDS.findall, _lines):
        found = _difference(parts(old), parts(new))
        if found is not None:
            return found
    return [("deleted", old), ("inserted", new)]


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def _difference(before: Sequence[str], after: Sequence[str]) -> list[Piece] | None:
    """Return the pieces of two lists of words; None if more than `_MOST_EDITS` words were deleted and inserted."""
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    rest = 0
    while rest < min(len(before), len(after)) - same and before[-1 - rest] == after[-1 - rest]:
        rest += 1
    a, b = before[same : len(before) - rest], after[same : len(after) - rest]
    edits = _edits(a, b)
    if edits is None:
        return None
    words = (
        [("same", word) for word in before[:same]] + edits + [("same", word) for word in before[len(before) - rest :]]
    )
    return _joined(words)


def _edits(a: Sequence[str], b: Sequence[str]) -> list[Piece] | None:
    """Return a shortest edit script (Myers 1986, "An O(ND) Difference Algorithm and Its Variations", figure 2); None beyond the limit."""
    furthest = {1: 0}  # x - y -> the furthest x that the edits so far reach
    history: list[dict[int, int]] = []
    for num_edits in range(_MOST_EDITS + 1):
        history.append(dict(furthest))
        for k in range(-num_edits + 2 * max(0, num_edits - len(b)), num_edits - 2 * max(0, num_edits - len(a)) + 1, 2):
            x, _ = _after_edit(furthest, k, num_edits)
            y = x - k
            while x < len(a) and y < len(b) and a[x] == b[y]:
                x, y = x + 1, y + 1
            furthest[k] = x
            if x >= len(a) and y >= len(b):
                return _script(a, b, history)
    return None


def _after_edit(furthest: dict[int, int], k: int, num_edits: int) -> tuple[int, bool]:
    """Return the x after the last of the edits, on the diagonal k, and whether it is an insertion."""
    inserted, deleted = furthest.get(k + 1, -1), furthest.get(k - 1, -2) + 1
    is_insertion = k == -num_edits or (k != num_edits and deleted <= inserted)
    return inserted if is_insertion else deleted, is_insertion


def _script(a: Sequence[str], b: Sequence[str], history: list[dict[int, int]]) -> list[Piece]:
    """Return the edits that lead to the end, from the end to the beginning and then turned round."""
    found: list[Piece] = []
    x, y = len(a), len(b)
    for num_edits in range(len(history) - 1, -1, -1):
        start, is_insertion = _after_edit(history[num_edits], x - y, num_edits)
        while x > start:
            x, y = x - 1, y - 1
            found.append(("same", a[x]))
        if num_edits and is_insertion:
            y -= 1
            found.append(("inserted", b[y]))
        elif num_edits:
            x -= 1
            found.append(("deleted", a[x]))
    return found[::-1]


def _joined(words: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of one sort; what was deleted comes before what was inserted in its place."""
    pieces: list[Piece] = []
    changed: dict[str, list[str]] = {"deleted": [], "inserted": []}

    def close() -> None:
        for sort, texts in changed.items():
            if texts:
                pieces.append((sort, "".join(texts)))
                texts.clear()

    for sort, word in words:
        if sort != "same":
            changed[sort].append(word)
            continue
        close()
        if pieces and pieces[-1][0] == "same":
            pieces[-1] = ("same", pieces[-1][1] + word)
        else:
            pieces.append(("same", word))
    close()
    return pieces
