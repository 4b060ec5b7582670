"""The arguments of a plug-in that is a function or a class, validated against its signature before the first call."""

from __future__ import annotations

import inspect
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from rftdata.config_errors import parse_section


def checked_arguments(
    function: Callable[..., object], num_preceding: int, arguments: Mapping[str, Any], origin: str, *, within: str
) -> dict[str, Any]:
    """Return the arguments as values of the types that the signature names.

    Args:
        function: the function or class.
        num_preceding: number of positional arguments that precede them.
        origin: what the function is, with which errors begin.
        within: the key of the arguments in the file.

    Raises:
        ConfigError: an argument is unknown, is missing, or has another type.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # written in C without a signature; the call will report wrong arguments
        return dict(arguments)
    parsed = parse_section(_section(function, signature, num_preceding), arguments, origin, within=within)
    extra = parsed.model_extra or {}
    return {name: getattr(parsed, name) for name in parsed.model_fields_set - extra.keys()} | extra


def _section(function: Callable[..., object], signature: inspect.Signature, num_preceding: int) -> type[BaseModel]:
    """Return the arguments after the preceding ones as a section."""
    parameters = list(signature.parameters.values())
    named = [
        parameter
        for parameter in parameters[num_preceding:]
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and not parameter.name.startswith("_")
    ]
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    config = ConfigDict(
        extra="allow" if takes_any else "forbid",
        arbitrary_types_allowed=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    def section(types: Mapping[str, Any]) -> type[BaseModel]:
        fields: dict[str, Any] = {
            one.name: (types.get(one.name, Any), ... if one.default is one.empty else one.default) for one in named
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an argument may be called like a method of pydantic's
            return create_model("Arguments", __config__=config, **fields)

    try:
        init = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
        return section(typing.get_type_hints(init, include_extras=True))
    except (NameError, TypeError, AttributeError, PydanticUserError):
        return section({})  # types that exist for a type checker only
