"""Values that PostgreSQL cannot hold are found in the text of JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from rftdata.errors import QueryError
from rftdata.limits import check_json, is_too_deep, may_be_unstorable


@pytest.mark.parametrize(
    "number", ["NaN", "-Infinity", "1e309", "1E+0309", "1" * 310 + ".0", "9" * 210 + "e99", "1" * 250 + ".5e+99"]
)
def test_a_number_that_is_not_finite_is_looked_for(number: str) -> None:
    assert not math.isfinite(json.loads(number)) and may_be_unstorable(f'{{"a": [{number}]}}')


@pytest.mark.parametrize("number", ["1e99", "1" * 209, "1" * 209 + "e99"])
def test_other_numbers_need_no_check(number: str) -> None:
    assert math.isfinite(json.loads(number)) and not may_be_unstorable(f'{{"a": [{number}]}}')


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [0, value] if level % 2 else {"a": value}
    return value


def test_json_is_as_deep_as_its_deepest_list_or_object() -> None:
    assert not is_too_deep(nested(300)) and is_too_deep(nested(301))
    assert not is_too_deep([[0] * 1000] * 1000) and not is_too_deep("text")
    check_json("a value", nested(300))
    with pytest.raises(QueryError, match="a value is nested too deeply; allowed: up to 300 levels"):
        check_json("a value", nested(301))


def test_a_value_that_contains_itself_is_too_deep() -> None:
    value: list[Any] = []
    value += [value, value]
    assert is_too_deep(value)
