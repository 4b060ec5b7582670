"""Pictures of scores over rollouts, a line for each variant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Curve:
    """One line: scores at numbers of rollouts."""

    label: str
    rollouts: Sequence[float]
    scores: Sequence[float]
    style: str = "-"


def draw(file: Path, curves: Sequence[Curve], *, title: str, scores: str, target: float | None = None) -> None:
    """Write the picture as .png or .svg.

    Args:
        scores: name of the vertical axis.
        target: score that a horizontal line marks.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for curve in curves:
        axes.plot(curve.rollouts, curve.scores, curve.style, label=curve.label)
    if target is not None:
        axes.axhline(target, color="grey", linewidth=0.8)
    axes.set(xlabel="rollouts", ylabel=scores, title=title)
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)
