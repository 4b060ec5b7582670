"""Curves of runs for the charts: what is drawn of a run, smoothed, and thinned out where a chart has fewer places than a curve has points.

A series has "x" and "y" of one length. "faint" marks the values before smoothing, "points" single measurements, and "low" and "high" the ends of error bars.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rftdata.errors import QueryError
from rftdata.reports.results import RunResults
from rftdata.run import Run

REWARD, PASS_RATE, EVALUATIONS, TOKENS, STALENESS = "reward", "pass_rate", "evaluations", "tokens_per_s", "staleness"
_METRIC = "metric:"
_MOST_POINTS = 800
Series = dict[str, Any]


def curves_of(run: Run, what: str, window: int) -> list[Series]:
    """Return the series of a run.

    Args:
        what: a constant of this module, or `metric:` and the name of a metric of trainer steps.
        window: number of points whose mean replaces each point; 1 to leave them.

    Raises:
        QueryError: `what` is unknown.
    """
    results = RunResults(run)
    if what == EVALUATIONS:
        return _evaluations(results)
    if what in (REWARD, PASS_RATE):
        # Trainer step s + 1 learns from explorer step s (from 0).
        points = [
            (point.step + 1, point.mean if what == REWARD else point.pass_rate) for point in results.train_curve()
        ]
        return _smoothed("training", points, window)
    if what == STALENESS:
        rows = run.database.fetch("studio_staleness", run_id=run.run_id)
        return _smoothed("mean staleness", [(row["trainer_step"], row["mean"]) for row in rows], window)
    if what == TOKENS or what.startswith(_METRIC):
        metric = what.removeprefix(_METRIC)
        rows = run.database.fetch("studio_steps", run_id=run.run_id, metric=metric)
        column, label = (TOKENS, "tokens/s") if what == TOKENS else ("metric", metric)
        return _smoothed(label, [(row["trainer_step"], row[column]) for row in rows], window)
    raise QueryError(
        "there is no such curve",
        value=what,
        allowed=f"{REWARD}, {PASS_RATE}, {EVALUATIONS}, {TOKENS}, {STALENESS}, {_METRIC}NAME",
    )


def _evaluations(results: RunResults) -> list[Series]:
    curves: dict[str, Series] = {}
    for each in results.evaluations():
        label = (
            f"{each.taskset}, {each.decoding}"
            if each.taskset == each.purpose
            else f"{each.purpose} {each.taskset}, {each.decoding}"
        )
        curve = curves.setdefault(label, {"label": label, "x": [], "y": [], "low": [], "high": [], "points": True})
        error = each.standard_error or 0.0
        for name, value in (
            ("x", each.trainer_step),
            ("y", each.mean),
            ("low", each.mean - error),
            ("high", each.mean + error),
        ):
            curve[name].append(value)
    return list(curves.values())


def _smoothed(label: str, points: Sequence[tuple[int, float | None]], window: int) -> list[Series]:
    known = [(x, y) for x, y in points if y is not None]
    if not known:
        return []
    if window <= 1:
        return [_series(label, known)]
    means, total = [], 0.0
    for i, (x, y) in enumerate(known):
        total += y - (known[i - window][1] if i >= window else 0.0)
        means.append((x, total / min(i + 1, window)))
    return [{**_series(label, known), "faint": True}, _series(f"{label}, mean of {window}", means)]


def _series(label: str, points: Sequence[tuple[int, float]]) -> Series:
    """Return a series of at most `_MOST_POINTS`: the means of equal stretches, each at the step where its stretch ends."""
    length = -(-len(points) // _MOST_POINTS)
    stretches = [points[i : i + length] for i in range(0, len(points), length)]
    return {
        "label": label,
        "x": [part[-1][0] for part in stretches],
        "y": [sum(y for _, y in part) / len(part) for part in stretches],
    }
