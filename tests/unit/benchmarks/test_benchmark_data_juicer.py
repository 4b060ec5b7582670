"""The benchmark of Data-Juicer's operators compares like with like and gives the figures that it promises."""

from __future__ import annotations

import pytest

from benchmarks import pipeline_data_juicer


@pytest.mark.long
def test_every_operator_comes_to_the_same_both_ways_and_has_its_ratio() -> None:
    # Other rows or texts by hand than through the chain would be an error here.
    measured = pipeline_data_juicer.measure(rounds=1)
    assert set(measured["operators"]) == set(pipeline_data_juicer.OPERATORS)
    ratios = [found["ratio"] for found in measured["operators"].values()]
    assert measured["worst_ratio"] == max(ratios) and min(ratios) > 0
