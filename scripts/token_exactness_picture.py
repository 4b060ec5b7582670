"""Draws docs/diagrams/token-exactness.png: how the turns of a chat become experiences, token for token.

python scripts/token_exactness_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.patches import FancyBboxPatch

TARGET = Path(__file__).resolve().parents[1] / "docs" / "diagrams" / "token-exactness.png"
COLORS = {"template": "#d9dee3", "message": "#fff3d6", "sampled": "#bfe3bf"}
EDGES = {"template": "#8a959e", "message": "#b07c10", "sampled": "#2f7d32"}

# Text, kind, and width of each stretch of tokens.
Stretch = tuple[str, str, float]
TURN_0: list[Stretch] = [
    ("<user>", "template", 0.8),
    ("3 times 17?", "message", 1.3),
    ("<end><assistant>", "template", 1.65),
    ("<think> use the tool </think>\ncall <end>", "sampled", 3.2),
]
TURN_1: list[Stretch] = [
    ("<tool>", "template", 0.8),
    ("51", "message", 0.6),
    ("<end><assistant>", "template", 1.65),
    ("<think> fine </think>\nIt is 51. <end>", "sampled", 2.9),
]
TURN_2: list[Stretch] = [
    ("<user>", "template", 0.8),
    ("3 times 17?", "message", 1.3),
    ("<end><assistant>", "template", 1.65),
    ("call", "message", 0.6),
    ("<end><tool>", "template", 1.1),
    ("51", "message", 0.6),
    ("<end><assistant>", "template", 1.65),
    ("It is 51.", "message", 1.1),
    ("<end><user>", "template", 1.1),
    ("and 4 times?", "message", 1.35),
    ("<end><assistant>", "template", 1.65),
    ("<think> …", "sampled", 1.0),
]


def draw() -> None:
    """Draw the picture."""
    figure, axes = pyplot.subplots(figsize=(14, 5.6), dpi=110)
    axes.set_xlim(-0.1, 14)
    axes.set_ylim(-2.6, 4.9)
    axes.axis("off")
    axes.text(0, 4.55, "Turns 0 and 1: one experience", fontsize=12, weight="bold")
    axes.text(
        0,
        4.15,
        "A tool answers. Turn 1 begins with all tokens of turn 0, as they were sampled: nothing is rendered again.",
        fontsize=10,
    )
    end = _row(axes, TURN_0, 0.0, 3.1)
    last = _row(axes, TURN_1, end, 3.1)
    _brace(axes, 0.0, end, 2.55, "received and sampled in turn 0")
    _brace(axes, end, last, 2.55, "added in turn 1")
    axes.text(0, 1.35, "Turn 2: an experience of its own (fork: template)", fontsize=12, weight="bold")
    axes.text(
        0,
        0.95,
        "A user writes. This template takes the thoughts out of earlier answers, so the chat is rendered and encoded again.",
        fontsize=10,
    )
    _row(axes, TURN_2, 0.0, -0.1)
    for number, (kind, text) in enumerate(
        (
            ("sampled", "sampled by the policy: loss mask 1, log-probability and policy version of each token"),
            ("message", "text of users, tools and earlier answers: loss mask 0, forges no special token"),
            ("template", "written by the chat template: loss mask 0"),
        )
    ):
        height = -1.15 - 0.5 * number
        _box(axes, 0.0, height, 0.5, 0.34, kind)
        axes.text(0.65, height + 0.17, text, fontsize=10, va="center")
    figure.savefig(TARGET, bbox_inches="tight", facecolor="white")
    print(f"wrote {TARGET.relative_to(TARGET.parents[2])}")


def _row(axes: pyplot.Axes, stretches: list[Stretch], left: float, bottom: float) -> float:
    """Draw stretches side by side; return where the last ends."""
    for text, kind, width in stretches:
        _box(axes, left, bottom, width - 0.05, 0.75, kind)
        axes.text(
            left + width / 2 - 0.025, bottom + 0.375, text, fontsize=8.2, ha="center", va="center", family="monospace"
        )
        left += width
    return left


def _box(axes: pyplot.Axes, left: float, bottom: float, width: float, height: float, kind: str) -> None:
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(
        FancyBboxPatch((left, bottom), width, height, boxstyle=style, facecolor=COLORS[kind], edgecolor=EDGES[kind])
    )


def _brace(axes: pyplot.Axes, left: float, right: float, height: float, text: str) -> None:
    axes.annotate(
        "",
        (left + 0.03, height + 0.25),
        (right - 0.08, height + 0.25),
        arrowprops={"arrowstyle": "|-|", "color": "#5b6770"},
    )
    axes.text((left + right) / 2, height, text, fontsize=9, ha="center", va="center", color="#2b343b")


if __name__ == "__main__":
    draw()
