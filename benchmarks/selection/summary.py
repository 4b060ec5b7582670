"""Figures of each selector: what it needed to reach the target, beside what uniform choice needed with the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

UNIFORM = "shuffle"
_POINTS_KEPT = 40
Run = dict[str, Any]


def at_target(run: Run, what: str) -> float | None:
    """Return `what` (rollouts, seconds, …) when the score first reached the target, interpolated between evaluations; None if it did not."""
    before, target = run["points"][0], run["target"]
    if before["score"] >= target:
        return float(before[what])
    for point in run["points"][1:]:
        if point["score"] >= target:
            share = (target - before["score"]) / (point["score"] - before["score"])
            return float(before[what] + share * (point[what] - before[what]))
        before = point
    return None


def spread(values: Sequence[float | None]) -> dict[str, Any]:
    """Return mean and range, None where a run has no value, and the values."""
    known = [value for value in values if value is not None]
    whole = len(known) == len(values) and known
    return {
        "mean": fmean(known) if whole else None,
        "min": min(known) if known else None,
        "max": max(known) if whole else None,
        "runs": list(values),
    }


def summarize(runs: dict[str, dict[int, Run]], budget: int) -> dict[str, Any]:
    """Return the figures of every selector.

    Args:
        runs: runs by selector and seed.
        budget: rollouts after which a run without the target ended.
    """
    found = {name: _figures(by_seed) for name, by_seed in runs.items()}
    uniform = runs.get(UNIFORM)
    for name, by_seed in runs.items():
        if uniform is not None and name != UNIFORM:
            found[name]["against_uniform"] = _against(by_seed, uniform, budget)
    return found


def _figures(by_seed: dict[int, Run]) -> dict[str, Any]:
    runs = list(by_seed.values())
    rollouts = [at_target(run, "rollouts") for run in runs]
    anchors = [run["anchor_rollouts"] for run in runs]
    return {
        "reached": sum(value is not None for value in rollouts),
        "rollouts": [run["rollouts"] for run in runs],
        "rollouts_counted_by_learner": [run["rollouts_made"] for run in runs],
        "rollouts_to_target": spread(rollouts),
        # A user without pass rates of two other models pays this once for any number of runs.
        "rollouts_to_target_with_anchors": spread(
            [None if value is None else value + anchor for value, anchor in zip(rollouts, anchors, strict=True)]
        ),
        "anchor_rollouts": spread(anchors),
        "seconds_to_target": spread([at_target(run, "seconds") for run in runs]),
        "cpu_seconds_to_target": spread([at_target(run, "cpu_seconds") for run in runs]),
        "steps_to_target": spread([at_target(run, "steps") for run in runs]),
        "share_of_groups_trained_on": spread([run["trained_groups"] / run["groups"] for run in runs]),
        "share_of_rollouts_for_screening": spread([run["screening_rollouts"] / run["rollouts"] for run in runs]),
        "selector_ms_per_step": spread([1000 * run["seconds"]["selector"] / max(run["steps"], 1) for run in runs]),
        "last_score": spread([run["points"][-1]["score"] for run in runs]),
        "share_chosen_by_level": [
            round(fmean(run["chosen"][level] / sum(run["chosen"]) for run in runs), 3)
            for level in range(len(runs[0]["chosen"]))
        ],
        "curves": {str(seed): _thinned(run["points"]) for seed, run in by_seed.items()},
    }


def _against(by_seed: dict[int, Run], uniform: dict[int, Run], budget: int) -> dict[str, Any]:
    """Return the rollouts of uniform choice over those of a selector, by seed: above 1 is a gain. A target that is not reached counts as the budget."""
    ratios: dict[str, list[float | None]] = {"rollouts": [], "seconds": [], "cpu_seconds": []}
    outcomes = []
    for seed, run in by_seed.items():
        other = uniform[seed]
        for what, values in ratios.items():
            mine, theirs = at_target(run, what), at_target(other, what)
            values.append(theirs / mine if mine and theirs else None)
        mine, theirs = (at_target(one, "rollouts") for one in (run, other))
        outcomes.append((budget if theirs is None else theirs) - (budget if mine is None else mine))
    won, lost = sum(outcome > 0 for outcome in outcomes), sum(outcome < 0 for outcome in outcomes)
    if won == lost == 0:
        verdict = "the same"
    elif len(outcomes) in (won, lost):
        verdict = "wins with every seed" if won else "loses with every seed"
    else:
        verdict = f"wins with {won}, loses with {lost} of {len(outcomes)} seeds"
    return {
        "verdict": verdict,
        "won": won,
        "lost": lost,
        **{f"{what}_ratio": spread(values) for what, values in ratios.items()},
    }


def _thinned(points: list[dict[str, Any]]) -> list[list[float]]:
    """Return [rollouts, score] of some points, including the first and the last."""
    every = max(1, -(-len(points) // _POINTS_KEPT))
    kept = points[::every] + ([points[-1]] if (len(points) - 1) % every else [])
    return [[point["rollouts"], point["score"]] for point in kept]
