"""`rft bench pipeline_data_juicer` compares equal results and has a ratio for every operator."""

from __future__ import annotations

import pytest

from benchmarks.pipeline import data_juicer as pipeline_data_juicer


@pytest.mark.long
def test_every_operator_has_equal_results_both_ways_and_a_ratio() -> None:
    # Other rows or texts by hand than through the chain would be an error here.
    measured = pipeline_data_juicer.measure(rounds=1)
    assert set(measured["operators"]) == set(pipeline_data_juicer.OPERATORS)
    ratios = [found["ratio"] for found in measured["operators"].values()]
    assert measured["worst_ratio"] == max(ratios) and min(ratios) > 0
