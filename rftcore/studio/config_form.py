"""The form of a configuration: one field for each key, made from the JSON Schema of configuration files (`rftcore.config_schema`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from rftcore.config.run import STAGES
from rftcore.config_schema import config_schema

_DEEPEST = 4
_BOUNDS = {"minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}", "exclusiveMaximum": "< {}"}


@dataclass(frozen=True)
class FormField:
    """One field of the form.

    Attributes:
        key: with dots.
        kind: `text` is a string as it is typed, `number` and `yaml` are read as YAML, `choice` is one of `choices`.
        value: what the file has, as it is typed; None if the file lacks the key.
        default: in the same form; None if there is none.
        description: what the key means.
        bounds: of a number, such as "> 0".
        choices: values to choose from.
    """

    key: str
    kind: Literal["text", "number", "choice", "yaml"]
    value: str | None
    default: str | None
    description: str
    bounds: str
    choices: tuple[str, ...]


@cache
def section_names() -> tuple[str, ...]:
    """Return the sections of the form; keys at the top of a file are sections, too."""
    return tuple(name for name in config_schema()["properties"] if name != STAGES)


def section_fields(section: str, config: Mapping[str, Any]) -> list[FormField]:
    """Return the fields of a section.

    Args:
        config: the mapping that the file has, valid or not.
    """
    about = _schema()["properties"][section]
    return list(_fields(section, about, config.get(section)))


def is_text(key: str) -> bool:
    """Return whether a field takes what is typed as a string."""
    section = key.partition(".")[0]
    return any(field.key == key and field.kind == "text" for field in section_fields(section, {}))


@cache
def _schema() -> dict[str, Any]:
    return config_schema()


def _resolved(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a property with the definition that it refers to; of a property with a short form, the long one."""
    found = dict(about)
    while True:
        reference = found.pop("$ref", None)
        if reference is not None:
            found = {**_schema()["$defs"][str(reference).rpartition("/")[2]], **found}
            continue
        long_form = next((one for one in found.get("anyOf", ()) if "$ref" in one or "properties" in one), None)
        if long_form is None or len(_types(found)) > 1:
            return found
        found = {**long_form, **{key: value for key, value in found.items() if key != "anyOf"}}


def _types(about: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the types that a value may have, without null and without short forms."""
    return [one for one in about.get("anyOf", [about]) if one.get("type") != "null" and one and "not" not in one]


def _fields(key: str, about: Mapping[str, Any], value: Any, depth: int = 0) -> Iterator[FormField]:
    resolved = _resolved(about)
    properties = resolved.get("properties")
    # A short form in the file, such as one name for a section, is one value.
    if properties and depth < _DEEPEST and (value is None or isinstance(value, Mapping)):
        for name, inner in properties.items():
            of_file = value.get(name) if value else None
            yield from _fields(f"{key}.{name}", inner, of_file, depth + 1)
        return
    kind, choices = _kind(resolved)
    if kind == "choice" and value is not None and _typed(value) not in choices:
        choices = (*choices, _typed(value))
    yield FormField(
        key,
        kind,
        None if value is None else _typed(value),
        _default(resolved),
        str(resolved.get("description", "")),
        _bounds(resolved),
        choices,
    )


def _kind(about: Mapping[str, Any]) -> tuple[Literal["text", "number", "choice", "yaml"], tuple[str, ...]]:
    types = _types(about)
    if len(types) != 1 or {} in about.get("anyOf", ()):
        return "yaml", ()
    one = _resolved(types[0])
    empty = ("null",) if len(about.get("anyOf", ())) > 1 else ()
    if "enum" in one and all(isinstance(each, str) for each in one["enum"]):
        return "choice", (*one["enum"], *empty)
    if one.get("type") == "boolean":
        return "choice", ("true", "false", *empty)
    if one.get("type") == "string" and not empty:
        return "text", ()
    return ("number", ()) if one.get("type") in ("integer", "number") else ("yaml", ())


def _typed(value: Any) -> str:
    """Return a value as a person types it."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool | int | float):
        return json.dumps(value)
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6).strip()


def _default(about: Mapping[str, Any]) -> str | None:
    return _typed(about["default"]) if "default" in about else None


def _bounds(about: Mapping[str, Any]) -> str:
    found: Sequence[Mapping[str, Any]] = _types(about)
    if len(found) != 1:
        return ""
    return ", ".join(text.format(found[0][name]) for name, text in _BOUNDS.items() if name in found[0])
