"""Where the seconds of a step go: each role's time by activity, between the first sample and the end of the last step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rftdata.reports.results import WorkerSpan


def step_table(spans: Sequence[WorkerSpan], steps: int, start: float, end: float) -> list[dict[str, Any]]:
    """Return seconds a step of every role, activity and detail, the longest of each role first. Numbers in details are left out."""
    seconds: defaultdict[tuple[str, str, str], float] = defaultdict(float)
    for span in spans:
        inside = min(span.ended, end) - max(span.started, start)
        if inside > 0:
            detail = " ".join(word for word in (span.detail or "").split() if not any(map(str.isdigit, word)))
            seconds[span.role, span.activity, detail] += inside
    rows = [
        {"role": role, "activity": activity, "for": detail, "seconds_per_step": round(total / steps, 4)}
        for (role, activity, detail), total in seconds.items()
    ]
    return sorted(rows, key=lambda row: (row["role"], -row["seconds_per_step"]))
