"""The JSON Schema of configuration files, by which editors complete keys, show their meaning and mark mistakes.

It accepts every valid configuration. What only a validator knows (that two keys exclude each other, say) it does not refuse, nor names and keys of plug-ins
that are a user's own.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from operators import OPERATORS
from operators.base import Operator
from operators.chain.stage import RunOptions
from rftcore.algorithms.config import AlgorithmConfig
from rftcore.config.run import STAGES, RunConfig
from rftcore.config_reference import keys
from rftcore.engines.base import EngineConfig

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def config_schema() -> dict[str, Any]:
    """Return the schema, with the keys of built-in plug-ins."""
    stages = {
        name: operator.Config
        for name in OPERATORS.builtins
        if isinstance(operator := OPERATORS.load(name), type) and issubclass(operator, Operator)
    }
    asked: list[type[BaseModel]] = [RunConfig, AlgorithmConfig, EngineConfig, RunOptions, *stages.values()]
    models = list(dict.fromkeys(model for one in asked for model in _models_within(one)))
    places, whole = models_json_schema([(model, "validation") for model in models], ref_template="#/$defs/{model}")
    definitions: dict[str, Any] = whole["$defs"]
    refs = {model: places[model, "validation"] for model in models}

    def definition(model: type[BaseModel]) -> dict[str, Any]:
        return definitions[refs[model]["$ref"].rpartition("/")[2]]  # type: ignore[no-any-return]

    for model in models:
        _accept_short_forms(model, definition(model))
    for model in _models_within(AlgorithmConfig):  # a file has the keys that differ from the preset's
        definition(model).pop("required", None)
    root = definition(RunConfig)
    sections: dict[str, Any] = root["properties"]
    # The settings of plug-ins are validated by the plug-in, so sections with them accept any key.
    algorithm = _section(definitions, sections["algorithm"])
    algorithm["properties"] = {**definition(AlgorithmConfig)["properties"], **algorithm["properties"]}
    _section(definitions, sections["selector"])["properties"].update(_plugin_keys("selector."))
    explorer = _section(definitions, sections["explorer"])["properties"]
    explorer["engine_args"] = {**explorer["engine_args"], "properties": definition(EngineConfig)["properties"]}
    explorer["workflow_args"] = {**explorer["workflow_args"], "properties": _plugin_keys("explorer.workflow_args.")}
    pipelines = _section(definitions, sections["pipelines"])["properties"]
    for chain in ("task", "experience"):
        pipelines[chain]["items"] = {"$ref": "#/$defs/Stage"}
    for model in models:
        if any(one.info.mode != "after" for one in model.__pydantic_decorators__.model_validators.values()):
            about = definition(model)
            definitions[refs[model]["$ref"].rpartition("/")[2]] = {"anyOf": [about, {"not": {"type": "object"}}]}
    definitions["Stage"] = _stage(
        {name: refs[config] for name, config in stages.items()}, definitions, refs[RunOptions]
    )
    required = root.pop("required")
    # A file with stages has in each what the others lack.
    names = {"name": {"type": "string", "description": "Name of the stage; its run is called RUN-NAME."}}
    stage = {"type": "object", "properties": {**names, **sections}, "required": ["name"], "additionalProperties": False}
    sections_of_stages = {
        key: {k: v for k, v in _resolved(definitions, value).items() if k != "required"}
        for key, value in sections.items()
    }
    stage["properties"] = {**names, **sections_of_stages}
    description = "Runs one after the other, each from the checkpoint of the one before, with what differs from the rest of the file."
    return {
        "$schema": DIALECT,
        **root,
        "title": "rftdata configuration",
        "properties": {
            **sections_of_stages,
            STAGES: {"type": "array", "items": stage, "description": description},
        },
        "anyOf": [{"required": required}, {"required": [STAGES]}],
        "$defs": definitions,
    }


def _models_within(section: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield a section and all sections within it."""
    waiting, seen = [section], {section}
    while waiting:
        model = waiting.pop()
        yield model
        kinds: list[Any] = [field.annotation for field in model.model_fields.values()]
        while kinds:
            kind = kinds.pop()
            kinds += typing.get_args(kind)
            if isinstance(kind, type) and issubclass(kind, BaseModel) and kind not in seen:
                seen.add(kind)
                waiting.append(kind)


def _accept_short_forms(model: type[BaseModel], definition: dict[str, Any]) -> None:
    """Accept any value where a validator converts it to the field's type, such as one value to a list."""
    for validator in model.__pydantic_decorators__.field_validators.values():
        for name in validator.info.fields if validator.info.mode == "before" else ():
            properties = definition["properties"]
            for one in properties if name == "*" else [name]:
                about = {key: properties[one].pop(key) for key in ("description", "default") if key in properties[one]}
                properties[one] = {**about, "anyOf": [properties[one], {}]}


def _section(definitions: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """Return the definition to which the property of a section refers."""
    definition: dict[str, Any] = definitions[place["$ref"].rpartition("/")[2]]
    return definition


def _resolved(definitions: Mapping[str, Any], place: Mapping[str, Any]) -> dict[str, Any]:
    """Return a property with the definition that it refers to, keeping its own description."""
    if "$ref" not in place:
        return dict(place)
    own = {key: value for key, value in place.items() if key != "$ref"}
    return {**_section(definitions, place), **own}


def _plugin_keys(prefix: str) -> dict[str, Any]:
    """Return the keys of built-in plug-ins as properties with a description, since their types differ between plug-ins."""
    texts_of: dict[str, list[str]] = {}
    for key in keys():
        if key.plugin is not None and key.name.startswith(prefix):
            texts_of.setdefault(key.name.removeprefix(prefix), []).append(f"{key.plugin}: {key.meaning} ({key.type})")
    return {name: {"description": " ".join(texts)} for name, texts in texts_of.items()}


def _stage(
    configs: Mapping[str, Any], definitions: Mapping[str, Any], run_options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the schema of one stage of a pipeline: its name, or its name with its arguments. Other stages are Data-Juicer's, or a user's."""
    named = {}
    for name, ref in configs.items():
        arguments = _resolved(definitions, ref)
        with_run = {**arguments, "properties": {**arguments.get("properties", {}), "run": run_options}}
        # Some take one value in place of a mapping.
        named[name] = {
            "anyOf": [with_run, {"type": ["null", "string", "number", "array"]}],
            "description": arguments.get("description", ""),
        }
    return {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "minProperties": 1, "maxProperties": 1, "properties": named},
        ]
    }
