"""Turn validation errors and unknown names into errors that name what is allowed.

Every configuration section, stage argument and rule is validated with `parse_section`, and every name that a user may mistype is compared with
`did_you_mean`, so that the same mistake gets the same message everywhere. All mistakes are reported at once, one error per place.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rftdata.errors import ConfigError

ModelT = TypeVar("ModelT", bound=BaseModel)

_UNKNOWN = ("extra_forbidden", "invalid_key")


def parse_section(section: type[ModelT], values: object, origin: str = "", *, within: str = "") -> ModelT:
    """Validate values as a section; None is an empty mapping.

    Args:
        origin: source of the values (a file, a plug-in's name), with which errors begin.
        within: key of the section in the file; empty for the whole file.

    Raises:
        ConfigError: lists all mistakes.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        refused = ConfigError("the arguments are not a mapping", value=values, allowed=_listed(section.model_fields))
        raise refused.about(origin) if origin else refused
    try:
        return section.model_validate(dict(values))
    except ValidationError as error:
        errors = section_errors(error, section, within=within)
        wrong = errors[0] if len(errors) == 1 else _together(errors)
        raise (wrong.about(origin) if origin else wrong) from error


def section_errors(
    error: ValidationError, section: type[BaseModel], origin: str = "", *, within: str = ""
) -> list[ConfigError]:
    """Return one error per invalid place of `section`. Unknown keys come first, since they often explain missing ones."""
    wrong = [each for _, each in _placed_errors(error, section, within)]
    return [each.about(origin) for each in wrong] if origin else wrong


def mistakes(section: type[BaseModel], values: Mapping[str, Any]) -> list[tuple[str, ConfigError]]:
    """Return the key of each invalid place of a section with its error, in the words of `parse_section`; none if the values are valid."""
    try:
        section.model_validate(dict(values))
    except ValidationError as error:
        return _placed_errors(error, section, "")
    return []


def _placed_errors(error: ValidationError, section: type[BaseModel], within: str) -> list[tuple[str, ConfigError]]:
    places: dict[tuple[int | str, ...], list[Any]] = {}
    for one in sorted(error.errors(include_url=False), key=lambda one: one["type"] not in _UNKNOWN):
        places.setdefault(_locate(section, one["loc"])[0], []).append(one)
    return [
        (".".join(map(str, place)), _section_error(section, place, errors, within)) for place, errors in places.items()
    ]


def _together(errors: Sequence[ConfigError]) -> ConfigError:
    """Join several errors into one paragraph."""
    return ConfigError(f"{len(errors)} settings are wrong: {'; '.join(map(_shortly, errors))}", todo="correct them")


def _shortly(error: ConfigError) -> str:
    """Return what is wrong, the value, and the nearest or the allowed keys."""
    is_hint = bool(error.todo and error.todo.endswith("?"))
    hint = error.todo if is_hint else f"allowed: {error.allowed}" if error.allowed else None
    notes = [note for note in (None if error.value is None else f"got {error.value!r}", hint) if note]
    return error.what.rstrip(".") + (f" ({', '.join(notes)})" if notes else "")


def _section_error(
    section: type[BaseModel], place: tuple[int | str, ...], errors: list[Any], within: str
) -> ConfigError:
    first = errors[0]
    key = ".".join(str(part) for part in (*filter(None, [within]), *place))
    beside = _keys(_locate(section, place[:-1])[1])
    if first["type"] in _UNKNOWN:
        return unknown_key(key, beside, _elsewhere(section, str(place[-1]), within))
    if first["type"] == "missing":
        return ConfigError(f"the key {key!r} is missing", allowed=", ".join(beside) or None, todo="add it")
    value = first["input"] if not isinstance(first["input"], Mapping) else None
    if not key:
        allowed = f"the keys {_listed(section.model_fields)}"
        return ConfigError(reasons(errors), value=value, allowed=allowed, todo="correct it")
    if _keys(_locate(section, place)[1]):  # a rule about several keys of a section, which names them
        return ConfigError(f"{key}: {reasons(errors)}", value=value, todo="correct it")
    return ConfigError(f"the key {key!r} is wrong: {reasons(errors)}", value=value, todo="correct it")


def reasons(errors: Iterable[Any]) -> str:
    """Return pydantic's message for one value; several messages if it may have several types."""
    first, *others = dict.fromkeys(str(one["msg"]).removeprefix("Value error, ") for one in errors)
    return " or ".join([first, *(other[:1].lower() + other[1:] for other in others[:2])])


def unknown_key(key: str, known: Collection[str], elsewhere: Sequence[str] = ()) -> ConfigError:
    """Return the error for an unknown key; a key within a section may be written with dots.

    Args:
        known: the keys that the section has.
        elsewhere: keys of other sections with this name.
    """
    if elsewhere:
        hint = f"did you mean {' or '.join(map(repr, elsewhere))}?"
    else:
        hint = did_you_mean(key.rpartition(".")[2], known, "remove the key or correct it")
    return ConfigError(f"there is no key {key!r}", allowed=_listed(known), todo=hint)


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name that is most similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, most: int = 1) -> str:
    """Return a hint at the name that was probably meant.

    Args:
        otherwise: the hint if no known name is similar.
        most: maximum number of suggestions.
    """
    near = difflib.get_close_matches(name, list(known), n=most)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(keys) or "no keys"


def _keys(annotation: Any) -> list[str]:
    """Return the keys of a section; none for other types."""
    return list(getattr(annotation, "model_fields", ()))


def _locate(section: Any, location: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], Any]:
    """Return the keys and indexes of a pydantic location, and the type at it; None for a type without keys."""
    place: list[int | str] = []
    types = _types(section)
    for part in location:
        if len(types) > 1:  # the location names which of several types was tried, which a user need not know
            types = [one for one in types if getattr(one, "__name__", None) == part] or [None]
            continue
        place.append(part)
        types = _types(_type_within(types[0], part))
    return tuple(place), types[0] if len(types) == 1 else None


def _elsewhere(section: Any, name: str, within: str, most: int = 3) -> list[str]:
    """Return the keys of this name in the sections below one, those of few dots first."""
    keys: list[str] = []
    level = [(within, section)]
    while level and not keys:
        beneath = []
        for key, one in level:
            for field, about in one.model_fields.items():
                place = f"{key}.{field}" if key else field
                keys += [place] if field == name else []
                beneath += [(place, kind) for kind in _types(about.annotation) if hasattr(kind, "model_fields")]
        level = beneath
    return keys[:most]


def _types(annotation: Any) -> list[Any]:
    """Return the types that a value may have, except None."""
    if get_origin(annotation) is Annotated:
        return _types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [one for member in get_args(annotation) if member is not type(None) for one in _types(member)]
    return [annotation]


def _type_within(annotation: Any, part: int | str) -> Any:
    """Return the type of a field of a section, or of an element of a list or mapping."""
    if hasattr(annotation, "model_fields"):
        field = annotation.model_fields.get(part)
        return None if field is None else field.annotation
    elements = [one for one in get_args(annotation) if one is not Ellipsis]
    return elements[-1] if elements else None
