"""The presets: algorithms by name, as data.

Each YAML file of this folder holds one family. A preset's `parts` are the keys that a user may write in the `algorithm` section. The
other keys are shown on the reference page (`scripts/algorithm_reference.py`), and a test compares what they claim.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from rftdata.config import Section
from rftdata.config_errors import did_you_mean, parse_section
from rftdata.errors import ConfigError, PluginError
from rftdata.yaml_text import read_yaml


class Preset(Section):
    """A published algorithm.

    `parts` are merged with a user's keys by `rftdata.config.merged`.
    """

    title: str = Field(description="The algorithm's name in full.")
    source: str = Field(description="Paper with its number and equation, or the implementation that defines it.")
    formula: str = Field(description="What is computed, in terms of the parts.")
    compared_with: str = Field(description="The implementation, or the numbers by hand, that a test compares it with.")
    differs: str = Field("", description="How it differs in definition from that implementation.")
    parts: dict[str, Any] = Field(description="Keys of the `algorithm` section.")


@cache
def presets() -> dict[str, Preset]:
    """The built-in presets by name."""
    by_name: dict[str, Preset] = {}
    for file in sorted(resources.files(__name__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".yaml"):
            for name, values in yaml.safe_load(file.read_text(encoding="utf-8")).items():
                by_name[name] = parse_section(Preset, values, f"{file.name}: {name}")
    return by_name


def load_preset(name: str, base_dir: Path | None = None) -> dict[str, Any]:
    """Return the parts of a preset.

    Args:
        name: of a built-in preset, or `./file.yaml`: the same keys as in an `algorithm` section, which may name another preset
            by `name`.
        base_dir: folder that `./` is relative to; the current folder when None.

    Raises:
        PluginError: an unknown name, or a file that does not exist.
        ConfigError: a file that holds no mapping.
    """
    if not name.endswith((".yaml", ".yml")):
        built_in = presets()
        if name not in built_in:
            raise PluginError(
                "unknown algorithm",
                value=name,
                allowed=", ".join(built_in),
                todo=did_you_mean(name, list(built_in), "for parts of your own write './preset.yaml'"),
            )
        return built_in[name].parts
    path = (base_dir or Path.cwd()) / name
    if not path.is_file():
        raise PluginError(
            "the algorithm's file does not exist",
            value=str(path),
            todo="correct the path; it is relative to the configuration file",
        )
    try:
        values = read_yaml(path.read_text(encoding="utf-8"), str(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}", todo="correct the file") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path} holds no mapping", allowed="the keys of an `algorithm` section", todo="correct the file"
        )
    return values
