"""Figures of the runs of a comparison: medians over the seeds that all systems have in common, and ratios of our seconds to TRL's."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rftcore.reporting.equal_score import to_target

Row = dict[str, Any]


def seconds_to(row: Row, target: float, *, start: str) -> float | None:
    """Return seconds until two successive evaluations have a mean of at least `target`; None if no pair has.

    Args:
        start: `process` counts from the start of the program, `sample` from the first sampling for the training.
    """
    reached = to_target(row.get("points", ()), target)
    if reached is None:
        return None
    return float(reached["seconds"]) - (row["first_sample_s"] if start == "sample" else 0.0)


def summary(rows: Sequence[Row], targets: Sequence[float]) -> list[Row]:
    """Return a row for each system: medians over the common seeds, and for each score the seconds and their ratio to the fastest way to run TRL.

    A seed is common if every system has a measured run with it: other seeds differ in difficulty. Figures are None without one, and the seconds of a score
    also where a seed did not reach it.
    """
    by_system: dict[str, dict[int, Row]] = {}
    for row in rows:
        if "error" not in row:
            by_system.setdefault(row["system"], {})[row["seed"]] = row
    common = sorted(set.intersection(*map(set, by_system.values()))) if by_system else []
    found: list[Row] = [
        {
            "system": system,
            "runs": len(runs),
            "common_seeds": common,
            **_figures([runs[seed] for seed in common], targets),
        }
        for system, runs in by_system.items()
    ]
    for place in range(len(targets)):
        for start in ("process", "sample"):
            known = [row["scores"][place][start] for row in found if row["system"].startswith("trl")]
            fastest = min((seconds for seconds in known if seconds is not None), default=None)
            for row in found:
                score = row["scores"][place]
                has_both = fastest and score[start] is not None
                score[f"{start}_of_trl"] = round(score[start] / fastest, 3) if has_both else None
    return found


def _figures(runs: Sequence[Row], targets: Sequence[float]) -> Row:
    def median(value: str) -> float | None:
        known = [run[value] for run in runs if run.get(value) is not None]
        return round(statistics.median(known), 3) if known else None

    return {
        "first_sample_s": median("first_sample_s"),
        "seconds_per_step": median("seconds_per_step"),
        "evaluation_s": median("evaluation_s"),
        "sampled_per_second": median("sampled_per_second"),
        "trained_per_second": median("trained_per_second"),
        "gpu_busy": median("gpu_busy"),
        "peak_gib": median("peak_gib"),
        "last_score": median("last_score"),
        "scores": [
            {"score": target, **{start: _median(runs, target, start) for start in ("process", "sample")}}
            for target in targets
        ],
    }


def _median(runs: Sequence[Row], target: float, start: str) -> float | None:
    seconds = [seconds_to(run, target, start=start) for run in runs]
    reached = [each for each in seconds if each is not None]
    return round(statistics.median(reached), 2) if reached and len(reached) == len(runs) else None
