"""Moments of a run, for both systems alike."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median


def step_seconds(first: float, ends: Sequence[float]) -> dict[str, float]:
    """Return the seconds of the first step, in which programs are compiled, and the median over all; an evaluation between steps counts to the later one.

    Args:
        first: time of the first sampling.
        ends: time at which each step ended.
    """
    lengths = [end - start for start, end in pairwise([first, *ends])]
    return {"first": round(lengths[0], 3), "median": round(median(lengths), 3)}
