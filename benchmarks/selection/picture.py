"""Picture of the results: learning curves, and the rollouts that each selector needed, as a share of those of uniform choice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.selection.summary import UNIFORM

_WIDEST = 2.5
_COLOURS = {
    "shuffle": "#222222",
    "sequential": "#8a8a8a",
    "random": "#b8b09a",
    "easy_to_hard": "#b8860b",
    "difficulty": "#1b6ca8",
    "difficulty_alone": "#7fb4dd",
    "speed": "#c8553d",
    "greso": "#2a9d6f",
    "plr": "#8f5bb5",
}


def draw(results: dict[str, Any], file: Path) -> None:
    """Write the picture, a column for every experiment."""
    from matplotlib.figure import Figure

    experiments = results["experiments"]
    figure = Figure(figsize=(4.2 * len(experiments), 8.5), dpi=110, layout="constrained")
    grid = figure.subplots(2, len(experiments), squeeze=False, height_ratios=(3, 2))
    for column, (name, experiment) in enumerate(experiments.items()):
        _curves(grid[0][column], name, experiment)
        _needs(grid[1][column], experiment)
    figure.savefig(file)


def _curves(axes: Any, name: str, experiment: dict[str, Any]) -> None:
    for selector, figures in experiment["selectors"].items():
        for number, curve in enumerate(figures["curves"].values()):
            axes.plot(
                [rollouts / 1000 for rollouts, _ in curve],
                [score for _, score in curve],
                color=_COLOURS.get(selector, "#555555"),
                linewidth=1.6 if selector == UNIFORM else 0.9,
                label=selector if number == 0 else None,
            )
    for target in experiment["target"].values():
        axes.axhline(target, color="#222222", linewidth=0.6, linestyle=":")
    axes.set(title=name, xlabel="rollouts, thousands", ylabel="held-out score")
    axes.legend(fontsize="small", loc="lower right")
    axes.grid(alpha=0.3)


def _needs(axes: Any, experiment: dict[str, Any]) -> None:
    """Draw a dot for each seed, an arrow where the target was not reached, and a ring with the rollouts of the anchors.

    Rings beyond `_WIDEST` are left out, since they would hide the differences between the others.
    """
    uniform = experiment["selectors"].get(UNIFORM)
    if uniform is None:
        return
    names = list(experiment["selectors"])
    base = uniform["rollouts_to_target"]["runs"]
    for row, selector in enumerate(names):
        figures, colour = experiment["selectors"][selector], _COLOURS.get(selector, "#555555")
        for seed, theirs in enumerate(base):
            if theirs is None:
                continue
            mine = figures["rollouts_to_target"]["runs"][seed]
            whole = figures["rollouts_to_target_with_anchors"]["runs"][seed]
            axes.plot(
                (mine or experiment["plan"]["budget"]) / theirs, row, "o" if mine else ">", color=colour, markersize=6
            )
            if mine and whole > mine:
                axes.plot(whole / theirs, row, "o", color=colour, markersize=6, fillstyle="none")
    axes.axvline(1.0, color="#222222", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="rollouts to the target, as a share of shuffle's", xlim=(0, _WIDEST))
    axes.grid(alpha=0.3)
