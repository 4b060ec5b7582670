"""Values that do not validate: one error per place, each named once, with the keys that there are."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import Field, ValidationError, model_validator

from rftdata.config import Section
from rftdata.config_errors import did_you_mean, parse_section, section_errors
from rftdata.errors import ConfigError


class Inner(Section):
    depth: int
    names: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _is_deep(self) -> Inner:
        if self.depth < 0:
            raise ValueError("depth must not be negative")
        return self


class Outer(Section):
    width: float = Field(1.0, gt=0)
    inner: Inner | None = None
    either: str | list[str] = ""
    several: tuple[Inner, ...] = ()
    named: dict[str, Inner] | None = None
    mixed: Inner | list[Inner] | None = None


def errors_of(values: dict[str, Any]) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(values)
    return [str(error) for error in section_errors(caught.value, Outer, "a file")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"widths": 2},
            "a file: there is no key 'widths'; allowed: width, inner, either, several, named, mixed; did you mean 'width'?",
        ),
        (
            {4: 2},
            "a file: there is no key '4'; allowed: width, inner, either, several, named, mixed; remove the key or correct it.",
        ),
        ({"width": 0}, "a file: the key 'width' is wrong: Input should be greater than 0 (got 0); correct it."),
        ({"inner": {}}, "a file: the key 'inner.depth' is missing; allowed: depth, names; add it."),
        ({"inner": {"depth": -1}}, "a file: inner: depth must not be negative; correct it."),
        (
            {"several": [{"depth": 1}, {"deph": 1, "depth": 1}]},
            "a file: there is no key 'several.1.deph'; allowed: depth, names; did you mean 'depth'?",
        ),
        (
            {"named": {"a": {"depth": []}}},
            "a file: the key 'named.a.depth' is wrong: Input should be a valid integer (got []); correct it.",
        ),
        (
            {"either": 3},
            "a file: the key 'either' is wrong: Input should be a valid string or input should be a valid list (got 3); correct it.",
        ),
    ],
)
def test_one_place_that_is_wrong(values: dict[str, Any], message: str) -> None:
    assert errors_of(values) == [message]


def test_every_place_has_its_error_and_unknown_keys_come_first() -> None:
    found = errors_of({"width": 0, "inner": {"dept": 1}, "either": {}})
    assert [message.split("; ")[0] for message in found] == [
        "a file: there is no key 'inner.dept'",
        "a file: the key 'width' is wrong: Input should be greater than 0 (got 0)",
        "a file: the key 'inner.depth' is missing",
        "a file: the key 'either' is wrong: Input should be a valid string or input should be a valid list",
    ]


def test_the_type_that_was_tried_of_several_is_no_part_of_a_key() -> None:
    assert any("'mixed.0.depth' is missing" in message for message in errors_of({"mixed": [{}]}))


def test_all_errors_are_raised_as_one() -> None:
    message = (
        r"^here: 3 settings are wrong: there is no key 'a\.b\.x' \(allowed: width, .*\); the key 'a\.b\.width' is wrong: .* \(got 0\);"
        r" the key 'a\.b\.either' is wrong: .* \(got 3\); correct them\.$"
    )
    with pytest.raises(ConfigError, match=message):
        parse_section(Outer, {"width": 0, "x": 1, "either": 3}, "here", within="a.b")


def test_nothing_is_an_empty_mapping_and_a_list_is_none() -> None:
    assert parse_section(Outer, None) == Outer()
    with pytest.raises(ConfigError, match=r"the arguments are not a mapping \(got \[1\]\); allowed: width, inner"):
        parse_section(Outer, [1])


def test_names_that_may_be_meant() -> None:
    assert did_you_mean("shufle", ["shuffle", "random"], "name one") == "did you mean 'shuffle'?"
    assert (
        did_you_mean("chain_su", ["chain_sum", "chain_sub"], "-", most=2) == "did you mean 'chain_sum' or 'chain_sub'?"
    )
    assert did_you_mean("zzz", ["shuffle"], "name one") == "name one"
