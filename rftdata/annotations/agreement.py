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
    """Ratings as arrays. Units with the same ratings are one kind of unit.

    For each rating of a kind: the kind, and the index of its value among the sorted ones; for each kind its number of ratings and of units.
    """

    kind: NDArray[np.int64]
    index: NDArray[np.int64]
    values: list[Any]
    size: NDArray[np.int64]
    count: NDArray[np.int64]


def krippendorff_alpha(ratings: Ratings, level: Level, *, num_samples: int = 1000, seed: int = 0) -> Alpha:
    """Return alpha with its interval."""
    table = _table(ratings, level)
    num_units = int(table.count.sum())
    # The distances of ordinal values follow from how often each was given, which differs between samples.
    known = None if level == "ordinal" else _disagreement(table, _scale(table, level, table.count))
    value = _alpha(table, level, table.count, known)
    low = high = None
    if value is not None and num_units >= 2:
        random = np.random.default_rng(seed)
        draws = (random.multinomial(num_units, table.count / num_units) for _ in range(num_samples))
        # A sample of one single value has no alpha; it is a sample without disagreement.
        sampled = [1.0 if found is None else found for found in (_alpha(table, level, each, known) for each in draws)]
        low, high = (float(bound) for bound in np.percentile(sampled, [2.5, 97.5]))
    return Alpha(value, low, high, num_units, int(table.count @ table.size))


def _table(ratings: Ratings, level: Level) -> _Table:
    units = [list(given.values()) for given in ratings.values() if len(given) >= 2]
    values = sorted({value for unit in units for value in unit}, key=None if level != "nominal" else repr)
    place = {value: i for i, value in enumerate(values)}
    kinds = Counter(tuple(sorted(place[value] for value in unit)) for unit in units)
    size = np.array([len(kind) for kind in kinds], np.int64)
    return _Table(
        np.repeat(np.arange(len(kinds)), size),
        np.array([index for kind in kinds for index in kind], np.int64),
        values,
        size,
        np.array(list(kinds.values()), np.int64),
    )


def _alpha(table: _Table, level: Level, count: NDArray[np.int64], known: Floats | None) -> float | None:
    """Return alpha of a sample with `count` units of each kind; `known`: the disagreement within a unit of each kind."""
    marginals = _marginals(table, count)
    if np.count_nonzero(marginals) < 2:
        return None
    scale = _scale(table, level, count)
    num, observed = float(count @ table.size), float(count @ (_disagreement(table, scale) if known is None else known))
    if scale is None:
        expected = num**2 - float(marginals @ marginals)
    else:
        expected = num * float(marginals @ scale**2) - float(marginals @ scale) ** 2
    return 1.0 - (num - 1) * observed / expected


def _marginals(table: _Table, count: NDArray[np.int64]) -> Floats:
    """Return how often each value was given."""
    return np.bincount(table.index, count[table.kind], len(table.values)).astype(np.float64)


def _scale(table: _Table, level: Level, count: NDArray[np.int64]) -> Floats | None:
    """Return a number for each value, whose squared distances count; None if all differences count the same."""
    if level == "nominal":
        return None
    marginals = _marginals(table, count)
    scale = np.cumsum(marginals) - marginals / 2 if level == "ordinal" else np.array(table.values, float)
    return scale - scale.mean() if len(scale) else scale


def _disagreement(table: _Table, scale: Floats | None) -> Floats:
    """Return the disagreement within a unit of each kind, by its definition over pairs of ratings."""
    if scale is None:
        return (table.size**2 - _same(table)) / (table.size - 1)
    total, squares = (np.bincount(table.kind, scale[table.index] ** power, len(table.size)) for power in (1, 2))
    return (table.size * squares - total**2) / (table.size - 1)


def _same(table: _Table) -> Floats:
    """Return, for a unit of each kind, the number of pairs of equal ratings, each rating with itself, too."""
    pairs, num = np.unique(table.kind * len(table.values) + table.index, return_counts=True)
    return np.bincount(pairs // max(len(table.values), 1), num.astype(float) ** 2, len(table.size)).astype(np.float64)


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
    table = _table(ratings, "nominal")
    if not len(table.count):
        return None
    agreed = float(table.count @ ((_same(table) - table.size) / (table.size * (table.size - 1))) / table.count.sum())
    marginals = _marginals(table, table.count)
    expected = float(np.sum((marginals / marginals.sum()) ** 2))
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
