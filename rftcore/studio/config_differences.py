"""Configurations of runs side by side, by dotted keys as `--set` takes them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_OWN = ("run.name", "base_dir")  # of every run


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of a configuration, by key; lists are one value, written as JSON."""
    return dict(_settings(config, ""))


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str | None]]]:
    """Return the keys in which configurations differ, each with the values of all; None where a configuration lacks the key."""
    all_settings = [flat(config) for config in configs]
    keys = sorted({key for settings in all_settings for key in settings} - set(_OWN))
    rows = [(key, [settings.get(key) for settings in all_settings]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _settings(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            yield from _settings(inner, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
