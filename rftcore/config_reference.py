"""Every key of a configuration: its type, default and meaning, from the classes that validate it and those of built-in plug-ins.

`rft config`, `rft schema` and the page docs/reference/configuration.md show what this module returns. Stages of pipelines and parts of algorithms have
pages of their own.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml
from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from rftcore.config.run import RunConfig
from rftdata.config_errors import did_you_mean
from rftdata.errors import ConfigError

_WORDS = {
    "int": "whole number",
    "float": "number",
    "str": "text",
    "bool": "true or false",
    "Any": "anything",
    "object": "anything",
}
_BOUNDS = {Ge: ("ge", "at least"), Gt: ("gt", "above"), Le: ("le", "at most"), Lt: ("lt", "below")}
_ELSEWHERE = {
    "algorithms": "the keys of an algorithm's parts",
    "stages": "stages and their arguments",
    "config": "the stages of a file",
}
# Keys that other keys set, as their descriptions explain.
_SET_ELSEWHERE = ("explorer.engine_args.adapter_rank", "explorer.reward[].column")


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        name: with the sections that lead to it: `trainer.learning_rate`; `tasks[].name` in an item of a list, `a.NAME.b` where the file chooses the name.
        type: in words, with its bounds.
        default: as YAML; `needed` if there is none, empty for no value and for a section.
        meaning: a sentence or two.
        plugin: the built-in plug-in that has the key, as `selector.type: speed`; None for a key that is always there.
    """

    name: str
    type: str
    default: str
    meaning: str
    plugin: str | None = None


def keys() -> list[Key]:
    """Return all keys, in the order of a file; those of plug-ins after their section."""
    listed = list(_of_section(RunConfig, ""))
    for place, further in _further().items():
        last = max(index for index, key in enumerate(listed) if key.name == place or key.name.startswith(f"{place}."))
        names = {key.name for key in listed}
        listed[last + 1 : last + 1] = [
            key for key in further if key.name not in names and key.name not in _SET_ELSEWHERE
        ]
    return listed


def find_keys(name: str) -> list[Key]:
    """Return a key, and those below it.

    Raises:
        ConfigError: there is no such key; the nearest are named.
    """
    every = keys()
    plain = re.sub(r"\[\d*\]", "", name.strip("."))
    for place, page in (("algorithm.", "algorithms"), ("pipelines.", "stages"), ("stages", "config")):
        if plain.startswith(place) and not any(_plain(key.name).startswith(plain) for key in every):
            todo = f"`rft docs {page}` shows {_ELSEWHERE[page]}"
            if place.endswith("."):  # the section has keys of its own, too
                todo += f"; `rft config {place.strip('.')}` the others"
            raise ConfigError(f"there is no key {name!r} of a section itself", todo=todo)
    matches = [key for key in every if _plain(key.name) == plain or _plain(key.name).startswith(f"{plain}.")]
    if matches:
        return matches
    ends = [key.name for key in every if _plain(key.name).rpartition(".")[2] == plain.rpartition(".")[2]]
    todo = (
        f"did you mean {' or '.join(map(repr, ends[:3]))}?"
        if ends
        else did_you_mean(plain, [_plain(key.name) for key in every], "`rft config` lists the sections", most=3)
    )
    raise ConfigError(f"there is no key {name!r}", todo=todo)


def sections() -> list[Key]:
    """Return the keys at the top of a file."""
    return [key for key in keys() if "." not in key.name]


def _plain(name: str) -> str:
    return name.replace("[]", "").replace(".NAME", "")


def _of_section(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, type_, default, meaning in arguments(section, prefix):
        yield Key(name.strip("`"), type_, default.strip("`"), meaning)


def _further() -> dict[str, list[Key]]:
    """Return the keys of built-in plug-ins by the section in which they are written."""
    from rftcore.algorithms.config import AlgorithmConfig
    from rftcore.engines.base import EngineConfig
    from rftcore.rewards import REWARDS
    from rftcore.workflows import WORKFLOWS
    from rftdata.selectors import SELECTORS

    selectors, workflows, rewards = [], [], []
    for name in SELECTORS.builtins:
        parameters = _parameters(SELECTORS.load(name), ("task_ids", "seed"))
        selectors += [
            Key(f"selector.{key.name}", key.type, key.default, key.meaning, f"selector.type: {name}")
            for key in parameters
        ]
    for name in WORKFLOWS.builtins:
        workflow: Callable[..., object] = WORKFLOWS.load(name)
        parameters = _parameters(workflow, tuple(inspect.signature(workflow).parameters)[:3])
        workflows += [
            Key(f"explorer.workflow_args.{key.name}", key.type, key.default, key.meaning, f"explorer.workflow: {name}")
            for key in parameters
        ]
    for name in REWARDS.builtins:
        reward: Callable[..., object] = REWARDS.load(name)
        section = getattr(reward, "Config", None)
        if section is not None:
            # Without the keys of endpoints and budgets, which the pages of stages explain.
            of_section = [key for key in _of_section(section, "explorer.reward[].") if key.name.count(".") == 2]
            rewards += [replace(key, plugin=f"explorer.reward: {name}") for key in of_section]
            continue
        passed = () if isinstance(reward, type) else tuple(inspect.signature(reward).parameters)[:2]
        rewards += [
            Key(f"explorer.reward[].{key.name}", key.type, key.default, key.meaning, f"explorer.reward: {name}")
            for key in _parameters(reward, passed)
        ]
    return {
        "selector": selectors,
        "algorithm": list(_of_section(AlgorithmConfig, "algorithm.")),
        "explorer.engine_args": list(_of_section(EngineConfig, "explorer.engine_args.")),
        "explorer.workflow_args": workflows,
        "explorer.reward[]": rewards,
    }


def _parameters(function: Callable[..., object], passed: tuple[str, ...]) -> Iterator[Key]:
    """Return the arguments of a plug-in that is a function or a class, as its signature and its docstring have them.

    Args:
        passed: those that the caller passes.
    """
    told = _told_arguments(inspect.getdoc(function) or "")
    hints = typing.get_type_hints(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    for name, parameter in inspect.signature(function).parameters.items():
        if name in passed or parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        default = "needed" if parameter.default is parameter.empty else _default_text(parameter.default).strip("`")
        yield Key(name, _name(hints.get(name, Any)), default, told.get(name, ""))


def _told_arguments(docstring: str) -> dict[str, str]:
    """Return the section `Args` of a docstring, by name."""
    _, _, section = docstring.partition("Args:\n")
    section = re.split(r"\n\S", section)[0]
    texts: dict[str, str] = {}
    for names, meaning in re.findall(r"^    ([\w, ]+): (.*(?:\n {5,}.*)*)", section, re.MULTILINE):
        text = " ".join(meaning.split())
        texts |= {name.strip(): f"{text[:1].upper()}{text[1:]}" for name in names.split(",")}
    return texts


def arguments(config: type[BaseModel], prefix: str = "", values: BaseModel | None = None) -> list[list[str]]:
    """Return a row for each key of a section: its name as code, type, default as code, meaning; those of a nested section follow it.

    Args:
        values: whose values are the defaults, where they are not those of the class.
    """
    rows = []
    for name, field in config.model_fields.items():
        default = _default(field) if values is None else _default_text(getattr(values, name))
        key = field.alias or name  # an alias is a key that Python reserves
        rows.append([f"`{prefix}{key}`", _type(field), default, field.description or _told(config, name)])
        nested = _nested(field.annotation)
        if nested is not None:
            values_of_nested = field.default if isinstance(field.default, nested) else None
            rows += arguments(nested, f"{prefix}{name}{_items(field.annotation)}.", values_of_nested)
    return rows


def _told(config: type[BaseModel], name: str) -> str:
    """Return the meaning of an argument in the class's docstring: "`name`: meaning" up to the next one."""
    for one in config.__mro__:
        text = " ".join((one.__dict__.get("__doc__") or "").split())
        for names, meaning in re.findall(r"((?:`\w+`(?:, )?)+): (.*?)(?=[;,.]? (?:`\w+`(?:, )?)+: |$)", text):
            if f"`{name}`" in names:
                meaning = meaning.strip().rstrip(" ;,.")
                return f"{meaning[:1].upper()}{meaning[1:]}."
    nested = _nested(config.model_fields[name].annotation)
    about = (nested.__dict__.get("__doc__") or "") if nested else ""
    return " ".join(about.strip().split("\n\n")[0].split())


def _type(field: FieldInfo) -> str:
    bounds = []
    for bound in field.metadata:
        for kind, (attribute, words) in _BOUNDS.items():
            if isinstance(bound, kind):
                bounds.append(f"{words} {getattr(bound, attribute):g}")
        if isinstance(bound, MinLen) and bound.min_length == 1:
            bounds.append("not empty")
        elif isinstance(bound, MinLen | MaxLen):
            words = f"at least {bound.min_length}" if isinstance(bound, MinLen) else f"at most {bound.max_length}"
            bounds.append(f"{words} of them")
    return ", ".join([_name(field.annotation), *bounds])


def _name(annotation: Any) -> str:
    """Return a type in words."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _name(inner[0])
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_name(one) for one in inner if one is not type(None)))
    if origin is tuple and Ellipsis not in inner:
        return f"[{', '.join(_name(one) for one in inner)}]"
    if origin in (tuple, list, Sequence):
        return f"list of {_name(inner[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"mapping of {_name(inner[0])} to {_name(inner[1])}"
    if _nested(annotation):
        return "mapping"
    return _WORDS.get(getattr(annotation, "__name__", str(annotation)), str(annotation))


def _nested(annotation: Any) -> type[BaseModel] | None:
    for one in (annotation, *typing.get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _items(annotation: Any) -> str:
    """Return what stands for an item of a list, or for a key of a mapping, in a key's name."""
    origin = typing.get_origin(annotation)
    return "[]" if origin in (list, tuple) else ".NAME" if origin is dict else ""


def _default(field: FieldInfo) -> str:
    return "needed" if field.is_required() else _default_text(field.get_default(call_default_factory=True))


def _default_text(value: Any) -> str:
    """Format a default."""
    if value is None or isinstance(value, BaseModel) or value in ({}, (), []):
        return ""
    if isinstance(value, str) and "\n" in value:
        return "see below"
    text = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True, width=10_000)
    return f"`{text.removesuffix(chr(10)).removesuffix('...').strip()}`"
