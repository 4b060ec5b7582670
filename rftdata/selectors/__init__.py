"""Selectors, which choose the next tasks of a taskset; one file each, listed in this table."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np

from rftdata.config_errors import did_you_mean
from rftdata.errors import ConfigError
from rftdata.plugins import Registry
from rftdata.selectors.base import Observation, Screening, Selector, TaskIds

SELECTORS = Registry[type[Selector]](
    "selector",
    {
        "sequential": "rftdata.selectors.sequential:Sequential",
        "shuffle": "rftdata.selectors.shuffle:Shuffle",
        "random": "rftdata.selectors.random:Random",
        "easy_to_hard": "rftdata.selectors.easy_to_hard:EasyToHard",
        "difficulty": "rftdata.selectors.difficulty:Difficulty",
        "speed": "rftdata.selectors.speed:Speed",
        "greso": "rftdata.selectors.greso:Greso",
        "plr": "rftdata.selectors.plr:PrioritizedLevelReplay",
    },
)

__all__ = ["SELECTORS", "Observation", "Screening", "Selector", "build_selector", "check_selector"]


def build_selector(
    name: str, args: dict[str, Any], task_ids: TaskIds, seed: int, base_dir: Path | None = None
) -> Selector:
    """Build the selector `name` for the active tasks of a taskset, ascending.

    Raises:
        PluginError: unknown name. ConfigError: unknown arguments, or wrong values.
    """
    cls = SELECTORS.load(name, base_dir)
    _check_names(name, cls, args)
    if name not in SELECTORS.builtins and isinstance(task_ids, np.ndarray):
        task_ids = task_ids.tolist()  # Python integers, because users put ids into states, which are JSON
    try:
        return cls(task_ids=task_ids, seed=seed, **args)
    except TypeError as error:
        raise ConfigError(
            f"the selector {name!r} does not accept these arguments: {error}",
            value=args,
            todo="correct the section selector",
        ) from error


def check_selector(name: str, args: dict[str, Any], base_dir: Path | None = None) -> Selector:
    """Build a selector for one fictitious task, to check its name and arguments and to read its attributes."""
    return build_selector(name, args, [0], 0, base_dir)


def _check_names(name: str, cls: type[Selector], args: dict[str, Any]) -> None:
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # written in C, for example; the call itself will show
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [key for key in parameters if key not in ("task_ids", "seed")]
    unknown = [key for key in args if key not in known]
    if unknown:
        raise ConfigError(
            f"the selector {name!r} has no argument {unknown[0]!r}",
            allowed=", ".join(known) or "none",
            todo=did_you_mean(unknown[0], known, "correct the section selector"),
        )
    missing = [key for key in known if parameters[key].default is inspect.Parameter.empty and key not in args]
    if missing:
        raise ConfigError(f"the selector {name!r} needs {missing[0]!r}", todo="add it to the section selector")
