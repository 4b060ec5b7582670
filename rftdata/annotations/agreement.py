"""Measures of agreement between people: Krippendorff's alpha, Cohen's and Fleiss' kappa, and F1 of spans.

A rating is a value of a unit by one person; a unit with fewer than two ratings counts for nothing. Values of the levels ordinal and interval are numbers
(for ordinal, only their order counts); nominal values are any hashable ones.

Krippendorff, Content Analysis (2004), chapter 11. Ordinal distances are those of midranks, so ordinal alpha is interval alpha of the midranks. The interval
of alpha is a bootstrap over units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Level = Literal["nominal", "ordinal", "interval"]
Ratings = Mapping[Hashable, Mapping[str, Any]]
"""By unit, then by person."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Alpha:
    """Krippendorff's alpha.

    Attributes:
        value: 1: all agree; 0: as by chance; None: undefined, since fewer than two different values were given.
        low, high: bounds of the 95 % bootstrap interval; None where fewer than 2 units count.
        num_units: units with at least two ratings.
        num_ratings: their ratings.
    """

    value: float | None
    low: float | None
    high: float | None
    num_units: int
    num_ratings: int


@dataclass(frozen=True)
class _Table:
    """Ratings as arrays: for each rating its unit and the index of its value among the sorted ones; for each unit its number of ratings."""

    unit: NDArray[np.int64]
    index: NDArray[np.int64]
    values: list[Any]
    size: NDArray[np.int64]


def krippendorff_alpha(ratings: Ratings, level: Level, *, num_samples: int = 1000, seed: int = 0) -> Alpha:
    """Return alpha with its interval."""
    table = _table(ratings, level)
    num_units = len(table.size)
    value = _alpha(table, level, np.ones(num_units, np.int64))
    low = high = None
    if value is not None and num_units >= 2:
        random = np.random.default_rng(seed)
        draws = (random.multinomial(num_units, np.full(num_units, 1 / num_units)) for _ in range(num_samples))
        # A sample of one single value has no alpha; it is a sample without disagreement.
        sampled = [1.0 if found is None else found for found in (_alpha(table, level, each) for each in draws)]
        low, high = (float(bound) for bound in np.percentile(sampled, [2.5, 97.5]))
    return Alpha(value, low, high, num_units, len(table.unit))


def _table(ratings: Ratings, level: Level) -> _Table:
    units = [list(given.values()) for given in ratings.values() if len(given) >= 2]
    flat = [value for unit in units for value in unit]
    values = sorted(set(flat), key=None if level != "nominal" else repr)
    place = {value: i for i, value in enumerate(values)}
    size = np.array([len(unit) for unit in units], np.int64)
    return _Table(
        np.repeat(np.arange(len(units)), size), np.array([place[value] for value in flat], np.int64), values, size
    )


def _alpha(table: _Table, level: Level, weights: NDArray[np.int64]) -> float | None:
    """Return alpha of units that count `weights` times."""
    size, num_values = table.size, len(table.values)
    num = float(weights @ size)
    marginals = np.bincount(table.index, weights[table.unit], num_values) if len(table.unit) else np.zeros(0)
    if np.count_nonzero(marginals) < 2:
        return None
    if level == "nominal":
        pairs, counts = np.unique(table.unit * num_values + table.index, return_counts=True)
        same = np.bincount(pairs // num_values, counts.astype(float) ** 2, len(size))
        observed = float(weights @ ((size**2 - same) / (size - 1)))
        expected = num**2 - float(marginals @ marginals)
    else:
        scale = np.cumsum(marginals) - marginals / 2 if level == "ordinal" else np.array(table.values, float)
        x = scale[table.index] - scale.mean()
        total, squares = (np.bincount(table.unit, x**power, len(size)) for power in (1, 2))
        observed = float(weights @ ((size * squares - total**2) / (size - 1)))
        expected = num * float(weights @ squares) - float(weights @ total) ** 2
    return 1.0 - (num - 1) * observed / expected


def cohen_kappa(first: Sequence[Hashable], second: Sequence[Hashable]) -> float | None:
    """Return Cohen's kappa of two people who rated the same units; None if it is undefined."""
    num = len(first)
    if not num:
        return None
    one, two = Counter(first), Counter(second)
    expected = sum(one[value] * two[value] for value in one) / num**2
    agreed = sum(a == b for a, b in zip(first, second, strict=True)) / num
    return None if expected == 1 else (agreed - expected) / (1 - expected)


def cohen_kappas(ratings: Ratings) -> dict[tuple[str, str], tuple[float | None, int]]:
    """Return Cohen's kappa, and the number of common units, of every two people with common units."""
    common: dict[tuple[str, str], list[tuple[Any, Any]]] = {}
    for given in ratings.values():
        people = sorted(given)
        for i, one in enumerate(people):
            for two in people[i + 1 :]:
                common.setdefault((one, two), []).append((given[one], given[two]))
    return {pair: (cohen_kappa(*zip(*found, strict=True)), len(found)) for pair, found in sorted(common.items())}


def fleiss_kappa(ratings: Ratings) -> float | None:
    """Return Fleiss' kappa over units with at least two ratings; None if it is undefined. Units may have different numbers of ratings."""
    units = [Counter(given.values()) for given in ratings.values() if len(given) >= 2]
    if not units:
        return None
    sizes = [sum(unit.values()) for unit in units]
    agreed = float(
        np.mean([(sum(n * n for n in u.values()) - m) / (m * (m - 1)) for u, m in zip(units, sizes, strict=True)])
    )
    totals = sum(units, Counter[Any]())
    expected = sum((n / sum(sizes)) ** 2 for n in totals.values())
    return None if expected == 1 else (agreed - expected) / (1 - expected)


def span_f1(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> float:
    """Return the F1 of two people's spans: of the places (tokens or characters) with their labels; 1 if neither marked any."""
    one, two = _places(first), _places(second)
    return 2 * len(one & two) / (len(one) + len(two)) if one or two else 1.0


def _places(spans: Sequence[Mapping[str, Any]]) -> set[tuple[str, str, int]]:
    return {
        (span.get("unit", "token"), span["label"], place)
        for span in spans
        for place in range(span["start"], span["end"])
    }


def mean_span_f1(ratings: Ratings) -> float | None:
    """Return the mean F1 over all units and pairs of people; None without a pair."""
    found = [
        span_f1(values[i], values[j])
        for given in ratings.values()
        for values in [list(given.values())]
        for i in range(len(values))
        for j in range(i + 1, len(values))
    ]
    return float(np.mean(found)) if found else None
