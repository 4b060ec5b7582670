"""Tables of the results in Markdown, one for each experiment, for docs/task-selection.md."""

from __future__ import annotations

from typing import Any


def tables(results: dict[str, Any]) -> str:
    """Return the tables of all experiments. Seconds are shown for real models only."""
    parts = []
    for name, experiment in results["experiments"].items():
        seconds = not name.startswith("synthetic")
        columns = [*_COLUMNS[:-1], "seconds of CPU", _COLUMNS[-1]] if seconds else _COLUMNS
        lines = [f"**{name}**: {experiment['what']}; {experiment['plan']['gap']:.0%} of the gap.", ""]
        lines += [_line(columns), _line(["---"] * len(columns))]
        for selector, figures in experiment["selectors"].items():
            cells = _cells(selector, figures, len(results["seeds"]))
            if seconds:
                cells.insert(-1, _spread(figures["cpu_seconds_to_target"]))
            lines.append(_line(cells))
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


_COLUMNS = ["selector", "rollouts to the target, thousands", "rollouts saved", "groups trained on", "against `shuffle`"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(selector: str, figures: dict[str, Any], num_seeds: int) -> list[str]:
    against = figures.get("against_uniform")
    rollouts = _spread(figures["rollouts_to_target"], 1 / 1000)
    if figures["reached"] < num_seeds:
        rollouts = f"reached with {figures['reached']} of {num_seeds} seeds"
    anchors = figures["anchor_rollouts"]["mean"]
    if anchors:
        rollouts += f", and {anchors / 1000:.1f} for the anchors"
    trained = f"{100 * figures['share_of_groups_trained_on']['mean']:.0f} %"
    return [
        f"`{selector}`",
        rollouts,
        _saved(against) if against else "",
        trained,
        against["verdict"] if against else "",
    ]


def _saved(against: dict[str, Any]) -> str:
    """Return 1 - own / uniform's in percent; the mean is that of the seeds' shares."""
    ratios = against["rollouts_ratio"]["runs"]
    if None in ratios:
        return "–"
    saved = sorted(100 * (1 - 1 / ratio) for ratio in ratios)
    mean, least, most = (round(value) for value in (sum(saved) / len(saved), saved[0], saved[-1]))
    return f"{mean} % ({least} to {most})"


def _spread(values: dict[str, Any], scale: float = 1.0) -> str:
    if values["mean"] is None:
        return "–"
    return f"{values['mean'] * scale:.1f} ({values['min'] * scale:.1f} to {values['max'] * scale:.1f})"
