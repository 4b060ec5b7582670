"""Stored rows that the chain of their run dropped, which a later training leaves out by default.

`rft.v_left_out` has them. A row that was corrected after its verdict is used, and so are the others of its group if one stage had dropped the group whole:
their rewards may differ now. An answer that was cut off stays dropped, even if the others are used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

_SHOWN = 5


@dataclass(frozen=True)
class DropCount:
    """How many experiences one stage dropped for one reason."""

    stage: str
    reason: str
    num_experiences: int


def drop_counts(dropped: Iterable[tuple[str, str]]) -> tuple[DropCount, ...]:
    """Count experiences by the (stage, reason) that dropped each, most first."""
    return tuple(DropCount(stage, reason, count) for (stage, reason), count in Counter(dropped).most_common())


def by_reason(counts: Iterable[DropCount]) -> str:
    """Describe counts on one line: the largest ones, and the number of the others."""
    counts = list(counts)
    shown = [f"{count.num_experiences:,} by {count.stage} ({count.reason})" for count in counts[:_SHOWN]]
    others = sum(count.num_experiences for count in counts[_SHOWN:])
    return ", ".join([*shown, *([f"{others:,} for {len(counts) - _SHOWN} other reasons"] if others else [])])
