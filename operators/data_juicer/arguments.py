"""Check arguments against the annotations of an operator's constructor, before anything runs.

Data-Juicer's operators accept any value and fail on the first batch, or compare a number with a text. The catalogue has the annotations
that values can be checked against. As in Data-Juicer, null is always allowed and means no bound. Infinity is allowed for arguments that
are only compared with.
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
    **{
        name: getattr(typing, name)
        for name in ("Any", "Dict", "List", "Literal", "Optional", "Sequence", "Set", "Tuple", "Union")
    },
    **{
        name: getattr(pydantic, name)
        for name in ("Field", "NonNegativeFloat", "NonNegativeInt", "PositiveFloat", "PositiveInt")
    },
    "Annotated": typing.Annotated,
    "ClosedUnitInterval": typing.Annotated[float, pydantic.Field(ge=0, le=1)],
    "bool": bool,
    "dict": dict,
    "float": float,
    "int": int,
    "list": list,
    "set": set,
    "str": str,
    "tuple": tuple,
}


def check_types(facts: Facts, args: Mapping[str, Any]) -> None:
    """Refuse an argument of the wrong type.

    Raises:
        ConfigError: names it, with its value and the type.
    """
    for key, value in args.items():
        validator = adapter(facts.types[key]) if value is not None and key in facts.types else None
        wrong = mismatch(validator, _finite(value) if key in facts.bounds else value) if validator is not None else ""
        if wrong:
            raise ConfigError(
                f"the argument {key!r} is of the wrong type: {wrong}", value=value, allowed=facts.types[key]
            )


@functools.cache
def adapter(annotation: str) -> pydantic.TypeAdapter[Any] | None:
    """Return a validator for values of a type; None if the annotation has unknown names."""
    try:
        return pydantic.TypeAdapter(eval(annotation, {"__builtins__": {}}, dict(_NAMES)))
    except (NameError, TypeError, AttributeError, pydantic.PydanticUserError):
        return None


def mismatch(validator: pydantic.TypeAdapter[Any], value: Any) -> str:
    """Return what is wrong with a value; empty if it fits or cannot be checked."""
    try:
        # As JSON: strict, but a YAML list may stand for a tuple or set.
        validator.validate_json(json.dumps(_whole(value)), strict=True)
    except pydantic.ValidationError as error:
        return reasons(error.errors())
    except TypeError:
        return ""
    return ""


def _finite(value: Any) -> Any:
    """Replace infinity by the largest integer, so that an infinite bound passes as an integer."""
    return int(math.copysign(sys.maxsize, value)) if isinstance(value, float) and math.isinf(value) else value


def _whole(value: Any) -> Any:
    """Replace floats with integral values by integers, as 10.0 may stand for 10."""
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        return int(value)
    if isinstance(value, list | tuple):
        return [_whole(inner) for inner in value]
    if isinstance(value, Mapping):
        return {key: _whole(inner) for key, inner in value.items()}
    return value
