"""The learning curve of a report as an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rftcore.reporting.files import new_figure, write_whole
from rftcore.reporting.report import Report
from rftdata.reports.results import Point

_COLOURS = ("#1b6ca8", "#c8553d", "#2a9d6f", "#8f5bb5", "#b8860b", "#555555")
_TRAIN_COLOUR = "#9a9a9a"


def write_learning_curve(report: Report, path: Path) -> None:
    """Draw reward over steps: training as sampled, validation with error bars, test before and after.

    Args:
        path: the image, whose suffix is its format (png, svg, pdf…); its folder is created.

    Raises:
        QueryError: the format is unknown, or the file cannot be written; an existing file is then unchanged.
    """
    figure = new_figure(path, width=8, height=4.8)
    axes = figure.add_subplot()
    _draw_training(axes, report.train_curve)
    for number, curve in enumerate(c for c in report.evaluation_curves if c.purpose == "validation"):
        _draw_points(axes, curve.points, f"validation {curve.taskset}, {curve.decoding}", _COLOURS[number % 3], "-o", 4)
    for number, curve in enumerate(c for c in report.evaluation_curves if c.purpose == "test"):
        gain = next(
            (g for g in report.gains if (g.purpose, g.taskset, g.decoding) == ("test", curve.taskset, curve.decoding)),
            None,
        )
        ends = [p for p in curve.points if gain is None or p.step in (gain.before_step, gain.after_step)]
        marker = "D" if curve.decoding == "greedy" else "s"
        _draw_points(
            axes,
            ends,
            f"test {curve.taskset}, {curve.decoding}{_gain_text(gain)}",
            _COLOURS[3 + number % 3],
            marker,
            8,
        )
    axes.set_xlabel("trainer step")
    axes.set_ylabel("mean reward")
    axes.set_title(f"{report.run}: {report.model}, {report.algorithm}, seed {report.seed}", fontsize=10, loc="left")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -0.02) if low > -0.2 else low, min(high, 1.02) if high < 1.3 else high)
    if axes.has_data():
        axes.legend(fontsize=8, frameon=False, loc="best")
    write_whole(path, "image", figure.savefig)


def _draw_training(axes: Any, curve: list[Point]) -> None:
    if not curve:
        return
    # Trainer step s + 1 learns from explorer step s (from 0).
    steps = [point.step + 1 for point in curve]
    means = [point.mean for point in curve]
    axes.plot(steps, means, color=_TRAIN_COLOUR, linewidth=0.8, alpha=0.6, label="training, as sampled")
    width = max(1, len(means) // 10)
    if width > 1:
        smooth = [
            sum(means[max(0, i - width + 1) : i + 1]) / len(means[max(0, i - width + 1) : i + 1])
            for i in range(len(means))
        ]
        axes.plot(steps, smooth, color="#444444", linewidth=1.6, label=f"training, mean of the last {width} steps")


def _draw_points(axes: Any, points: list[Point], label: str, colour: str, style: str, size: int) -> None:
    axes.errorbar(
        [p.step for p in points],
        [p.mean for p in points],
        yerr=[p.standard_error or 0.0 for p in points],
        fmt=style,
        color=colour,
        markersize=size,
        linewidth=1.3,
        capsize=3,
        label=label,
    )


def _gain_text(gain: Any) -> str:
    if gain is None or gain.before_step == gain.after_step:
        return ""
    error = "" if gain.standard_error is None else f" ± {gain.standard_error:.3f}"
    return f" ({gain.difference:+.3f}{error})"
