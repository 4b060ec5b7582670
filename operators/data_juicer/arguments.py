"""Whether arguments are of the types that an operator's constructor is annotated with: found before anything runs.

Data-Juicer's operators take what they are given and fail on the first batch, or compare a number with a text. The catalogue has the
annotations that values can be checked against. Null is always allowed, as in Data-Juicer: it stands for no bound; so does infinity
where an argument is only compared with.
"""

from __future__ import annotations

import functools
import json
import math
import sys
import typing
from collections.abc import Mapping
from typing import Any

import pydantic

from operators.data_juicer.catalogue import Facts
from rftdata.config_errors import reasons
from rftdata.errors import ConfigError

_NAMES: Mapping[str, Any] = {
    **{name: getattr(typing, name) for name in ("Any", "Dict", "List", "Literal", "Optional", "Sequence", "Set", "Tuple", "Union")},
    **{name: getattr(pydantic, name) for name in ("Field", "NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt")},
    "Annotated": typing.Annotated,
    "ClosedUnitInterval": typing.Annotated[float, pydantic.Field(ge=0, le=1)],
    "bool": bool, "dict": dict, "float": float, "int": int, "list": list, "set": set, "str": str, "tuple": tuple,
}  # fmt: skip


def check_types(facts: Facts, args: Mapping[str, Any]) -> None:
    """Refuse an argument of the wrong type.

    Raises:
        ConfigError: names it, with its value and the type.
    """
    for key, value in args.items():
        known = adapter(facts.types[key]) if value is not None and key in facts.types else None
        wrong = mismatch(known, _finite(value) if key in facts.bounds else value) if known is not None else ""
        if wrong:
            raise ConfigError(
                f"the argument {key!r} is of the wrong type: {wrong}", value=value, allowed=facts.types[key]
            )


@functools.cache
def adapter(annotation: str) -> pydantic.TypeAdapter[Any] | None:
    """What checks values of a type; None where the annotation is not of known names."""
    try:
        return pydantic.TypeAdapter(eval(annotation, {"__builtins__": {}}, dict(_NAMES)))
    except (NameError, TypeError, AttributeError, pydantic.PydanticUserError):
        return None


def mismatch(known: pydantic.TypeAdapter[Any], value: Any) -> str:
    """What is wrong with a value; empty where it fits, or cannot be told."""
    try:
        # As JSON: strict, but a list of YAML may stand for a tuple or set.
        known.validate_json(json.dumps(_whole(value)), strict=True)
    except pydantic.ValidationError as error:
        return reasons(error.errors())
    except TypeError:
        return ""
    return ""


def _finite(value: Any) -> Any:
    """Infinity as the largest whole number: what a bound is only compared with may be infinite where it is a whole number."""
    return int(math.copysign(sys.maxsize, value)) if isinstance(value, float) and math.isinf(value) else value


def _whole(value: Any) -> Any:
    """Whole numbers as such: 10.0 is as good as 10 where an operator counts."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    if isinstance(value, Mapping):
        return {key: _whole(inner) for key, inner in value.items()}
    return value
