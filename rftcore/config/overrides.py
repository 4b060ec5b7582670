"""Overrides of a configuration file, as `--set` gives them: `a.b=VALUE`, and `stages.NAME.a.b=VALUE` for one stage of a file with stages."""

from __future__ import annotations

from typing import Any

import yaml

from rftdata.errors import ConfigError
from rftdata.yaml_text import read_yaml

_ONE_STAGE = "stages."


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `a.b=value` in a mapping of sections; the value is read as YAML.

    Raises:
        ConfigError: it has another form, or its path leads through something that is not a section.
    """
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError("an override must look like a.b=value", value=override)
    node = raw
    *parents, last = key.split(".")
    for parent in parents:
        section = node.get(parent, {})
        if not isinstance(section, dict):
            raise ConfigError(f"the override {override!r} goes through {parent!r}, which is not a section")
        # A copy, because an alias of YAML, or another stage, may hold the same mapping.
        node[parent] = dict(section)
        node = node[parent]
    try:
        node[last] = read_yaml(value, f"the override {override!r}")
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the value of the override {override!r} is not valid YAML: {reason}") from error


def overrides_by_stage(overrides: list[str], names: list[str]) -> dict[str, list[str]]:
    """Return the overrides of each stage, those of all stages first."""
    for_all = [override for override in overrides if not override.startswith(_ONE_STAGE)]
    found = {name: list(for_all) for name in names}
    for override in overrides:
        if override.startswith(_ONE_STAGE):
            rest = override.removeprefix(_ONE_STAGE)
            # The longest name, because a stage `a.b` may stand beside a stage `a`.
            name = max((each for each in names if rest.startswith(f"{each}.")), key=len, default=None)
            if name is None:
                raise ConfigError(
                    f"the override {override!r} names no stage of the file",
                    allowed=", ".join(f"{_ONE_STAGE}{each}.KEY=VALUE" for each in names),
                )
            found[name].append(rest.removeprefix(f"{name}."))
    return found
