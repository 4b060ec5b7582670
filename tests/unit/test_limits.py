"""Values that PostgreSQL cannot hold are found in the text of JSON."""

from __future__ import annotations

import json
import math

import pytest

from rftdata.limits import may_be_unstorable


@pytest.mark.parametrize(
    "number", ["NaN", "-Infinity", "1e309", "1E+0309", "1" * 310 + ".0", "9" * 210 + "e99", "1" * 250 + ".5e+99"]
)
def test_a_number_that_is_not_finite_is_looked_for(number: str) -> None:
    assert not math.isfinite(json.loads(number)) and may_be_unstorable(f'{{"a": [{number}]}}')


@pytest.mark.parametrize("number", ["1e99", "1" * 209, "1" * 209 + "e99"])
def test_other_numbers_need_no_look(number: str) -> None:
    assert math.isfinite(json.loads(number)) and not may_be_unstorable(f'{{"a": [{number}]}}')
