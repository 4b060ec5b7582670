"""Runs compared to an equal held-out score: when a run reached it, and how it spent the time until then.

Everything is read from the buffer. Seconds begin with the first sample of the run, so that loading engines does not count.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from rftdata.buffer import Buffer
from rftdata.reports.results import RunResults, WorkerSpan
from rftdata.run import Run

Point = dict[str, Any]


def measured(buffer: Buffer, run: Run, target: float) -> dict[str, Any]:
    """Return the curve of a run, when it reached a held-out score, and how it spent the time until then.

    Returns:
        `points` (step, seconds, score) of its evaluations, `to_target` (step, seconds; None if it was not reached), `seconds` until the last step,
        `shares` of each activity in the time of trainer and explorers, `mean_staleness` and `max_staleness` of what was trained on (steps),
        `aged_out` groups, `sampled_tokens`.
    """
    results = RunResults(run)
    spans = results.spans()
    start = min(span.started for span in spans if span.activity == "sampling")
    end = max(span.ended for span in spans if span.activity == "training")
    query = "SELECT trainer_step, extract(epoch FROM finished_at)::float8 AS at FROM rft.v_train_step WHERE run_id = %s"
    trained = {row["trainer_step"]: row["at"] - start for row in buffer.sql(query, [run.run_id]).to_pylist()} | {0: 0.0}
    points = [
        {"step": each.trainer_step, "seconds": trained[each.trainer_step], "score": each.mean}
        for each in results.evaluations()
        if each.trainer_step in trained  # a step that is published may be interrupted before it is recorded
    ]
    drawn = "SELECT avg(staleness)::float8 AS mean, max(staleness) AS max FROM rft.v_consumption WHERE run_id = %s"
    staleness = buffer.sql(drawn, [run.run_id]).to_pylist()[0]
    return {
        "run": run.name,
        "points": points,
        "to_target": to_target(points, target),
        "seconds": end - start,
        "shares": {role: shares(spans, role, start, end) for role in ("trainer", "explorer")},
        "mean_staleness": staleness["mean"],
        "max_staleness": staleness["max"],
        "aged_out": sum(num for why, num in results.closed_because().items() if why.startswith("aged out")),
        "sampled_tokens": results.totals().sampled_tokens,
    }


def to_target(points: Sequence[Point], target: float) -> dict[str, Any] | None:
    """Return step and seconds of the second of two successive evaluations whose mean reaches the target; None if no pair does."""
    for before, after in itertools.pairwise(points):
        if (before["score"] + after["score"]) / 2 >= target:
            return {"step": after["step"], "seconds": after["seconds"]}
    return None


def shares(spans: Sequence[WorkerSpan], role: str, start: float, end: float) -> dict[str, float]:
    """Return the share of each activity in the time of a role's workers between two moments."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for span in spans:
        if span.role == role:
            seconds[span.activity] += max(min(span.ended, end) - max(span.started, start), 0.0)
    total = sum(seconds.values())
    return {activity: amount / total for activity, amount in sorted(seconds.items(), key=lambda each: -each[1])}
