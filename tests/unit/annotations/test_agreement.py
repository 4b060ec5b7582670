"""Measures of agreement against published and hand-computed numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rftdata.annotations.agreement import (
    cohen_kappa,
    cohen_kappas,
    fleiss_kappa,
    krippendorff_alpha,
    mean_span_f1,
    span_f1,
)

# Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), example C: 4 observers, 12 units, missing values.
OBSERVERS = [
    "1 2 3 3 2 1 4 1 2 . . .",
    "1 2 3 3 2 2 4 1 2 5 . 3",
    ". 3 3 3 2 3 4 2 2 5 1 .",
    "1 2 3 3 2 4 4 1 2 5 1 .",
]
C = {
    unit: {f"observer {i}": int(row.split()[unit]) for i, row in enumerate(OBSERVERS) if row.split()[unit] != "."}
    for unit in range(12)
}


@pytest.mark.parametrize(("level", "expected"), [("nominal", 0.743), ("ordinal", 0.815), ("interval", 0.849)])
def test_alpha_is_that_of_the_published_example(level: Any, expected: float) -> None:
    found = krippendorff_alpha(C, level)
    assert found.value == pytest.approx(expected, abs=0.001)
    assert (found.num_units, found.num_ratings) == (11, 40)
    assert found.low is not None and found.high is not None
    assert found.low < expected < found.high <= 1


def brute_force_alpha(ratings: dict[int, dict[str, int]], level: str) -> float:
    """Alpha by its definition: all pairs within units over all pairs."""
    units = [list(given.values()) for given in ratings.values() if len(given) >= 2]
    flat = sorted(value for unit in units for value in unit)

    def distance(a: int, b: int) -> float:
        if level == "nominal":
            return float(a != b)
        if level == "interval":
            return float((a - b) ** 2)
        a, b = min(a, b), max(a, b)
        between = sum(a <= value <= b for value in flat)
        return (between - (flat.count(a) + flat.count(b)) / 2) ** 2 if a != b else 0.0

    observed = sum(sum(distance(a, b) for a in unit for b in unit) / (len(unit) - 1) for unit in units) / len(flat)
    expected = sum(distance(a, b) for a in flat for b in flat) / (len(flat) * (len(flat) - 1))
    return 1 - observed / expected


@pytest.mark.parametrize("level", ["nominal", "ordinal", "interval"])
def test_alpha_is_that_of_its_definition(level: Any) -> None:
    random = np.random.default_rng(3)
    for _ in range(20):
        ratings = {
            unit: {str(person): int(random.integers(5)) for person in range(4) if random.random() < 0.6}
            for unit in range(12)
        }
        assert krippendorff_alpha(ratings, level, num_samples=1).value == pytest.approx(
            brute_force_alpha(ratings, level)
        )


def test_alpha_is_undefined_without_two_values_and_is_one_if_all_agree() -> None:
    same = {1: {"a": 1, "b": 1}, 2: {"a": 1, "b": 1}}
    assert krippendorff_alpha(same, "nominal").value is None
    assert krippendorff_alpha({}, "interval").value is None
    assert krippendorff_alpha({1: {"a": 1}}, "ordinal").num_units == 0
    agreed = {1: {"a": 1, "b": 1}, 2: {"a": 2, "b": 2}}
    assert {level: krippendorff_alpha(agreed, level).value for level in ("nominal", "ordinal", "interval")} == {  # type: ignore[arg-type]
        "nominal": 1.0,
        "ordinal": 1.0,
        "interval": 1.0,
    }


def test_kappas_are_those_of_published_tables() -> None:
    # Cohen (1960) by hand: both yes 20, both no 15, only the first 5, only the second 10: 0.7 agreed, 0.5 expected.
    first = ["yes"] * 25 + ["no"] * 25
    second = ["yes"] * 20 + ["no"] * 5 + ["yes"] * 10 + ["no"] * 15
    assert cohen_kappa(first, second) == pytest.approx(0.4)
    assert cohen_kappa(["yes"], ["yes"]) is None and cohen_kappa([], []) is None
    ratings = {i: {"a": x, "b": y} for i, (x, y) in enumerate(zip(first, second, strict=True))}
    assert cohen_kappas(ratings) == {("a", "b"): (pytest.approx(0.4), 50)}
    # Fleiss (1971), as in the usual worked example: 10 subjects, 14 raters, 5 categories.
    counts = [
        [0, 0, 0, 0, 14], [0, 2, 6, 4, 2], [0, 0, 3, 5, 6], [0, 3, 9, 2, 0], [2, 2, 8, 1, 1],
        [7, 7, 0, 0, 0], [3, 2, 6, 3, 0], [2, 5, 3, 2, 2], [6, 5, 2, 1, 0], [0, 2, 2, 3, 7],
    ]  # fmt: skip
    spread = [[value for value, n in enumerate(row) for _ in range(n)] for row in counts]
    subjects = {i: {str(j): value for j, value in enumerate(row)} for i, row in enumerate(spread)}
    assert fleiss_kappa(subjects) == pytest.approx(0.210, abs=0.001)


def test_spans_are_compared_by_tokens_and_labels() -> None:
    wrong = {"start": 0, "end": 4, "label": "wrong"}
    assert span_f1([wrong], [{**wrong, "start": 2, "unit": "token"}]) == pytest.approx(2 * 2 / (4 + 2))
    assert span_f1([wrong], [{**wrong, "label": "rude"}]) == 0
    assert span_f1([], []) == 1 and span_f1([wrong], []) == 0
    assert mean_span_f1({1: {"a": [wrong], "b": [wrong], "c": []}, 2: {"a": []}}) == pytest.approx(1 / 3)
    assert mean_span_f1({}) is None
