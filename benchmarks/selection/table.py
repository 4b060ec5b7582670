"""The results as tables in Markdown, one for each experiment, as docs/task-selection.md has them."""

from __future__ import annotations

from typing import Any


def tables(results: dict[str, Any]) -> str:
    """All experiments, one after the other."""
    parts = []
    for name, experiment in results["experiments"].items():
        rows = [f"**{name}**: {experiment['what']}; {experiment['plan']['gap']:.0%} of the gap.", "", *_HEAD]
        rows += [
            _row(selector, figures, len(results["seeds"])) for selector, figures in experiment["selectors"].items()
        ]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


_HEAD = (
    "| selector | rollouts to the target, thousands | rollouts saved against `shuffle` | seconds of CPU | groups trained on | against `shuffle` |",
    "| --- | --- | --- | --- | --- | --- |",
)


def _row(selector: str, figures: dict[str, Any], num_seeds: int) -> str:
    against = figures.get("against_uniform")
    rollouts = _spread(figures["rollouts_to_target"], 1 / 1000)
    if figures["reached"] < num_seeds:
        rollouts = f"reached with {figures['reached']} of {num_seeds} seeds"
    anchors = figures["anchor_rollouts"]["mean"]
    if anchors:
        rollouts += f", and {anchors / 1000:.1f} for the anchors"
    return (
        f"| `{selector}` | {rollouts} | {_saved(against) if against else ''} | {_spread(figures['cpu_seconds_to_target'])} | "
        f"{100 * figures['share_of_groups_trained_on']['mean']:.0f} % | {against['verdict'] if against else ''} |"
    )


def _saved(against: dict[str, Any]) -> str:
    """1 - own / uniform's, in percent; the mean is of the seeds' shares."""
    ratios = against["rollouts_ratio"]["runs"]
    if None in ratios:
        return "–"
    saved = sorted(100 * (1 - 1 / ratio) for ratio in ratios)
    return f"{sum(saved) / len(saved):.0f} % ({saved[0]:.0f} to {saved[-1]:.0f})"


def _spread(values: dict[str, Any], scale: float = 1.0) -> str:
    if values["mean"] is None:
        return "–"
    return f"{values['mean'] * scale:.1f} ({values['min'] * scale:.1f} to {values['max'] * scale:.1f})"
