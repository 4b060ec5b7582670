"""The environments by name, and the check of their arguments."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from rftcore.environments.base import Environment
from rftdata.errors import ConfigError, PluginError
from rftdata.plugins import Registry
from rftdata.user_code.time_limits import LOADING_S

EnvironmentClass = type[Environment]

ENVIRONMENTS = Registry[EnvironmentClass](
    "environment",
    {
        "frozen_lake": "rftcore.environments.toy_text:FrozenLake",
        "cliff_walking": "rftcore.environments.toy_text:CliffWalking",
        "taxi": "rftcore.environments.toy_text:Taxi",
        "blackjack": "rftcore.environments.toy_text:Blackjack",
        "reasoning_gym": "rftcore.environments.reasoning_gym:ReasoningGym",
        "sandbox": "rftcore.environments.sandbox:SandboxTask",
        "sql": "rftcore.environments.sql:Sql",
        "textarena": "rftcore.environments.textarena:TextArena",
        "openenv": "rftcore.environments.openenv:OpenEnv",
    },
)
_PACKAGES = {"gymnasium": "agents", "textarena": "agents", "websockets": "agents", "reasoning_gym": "train"}
"""Packages of built-in environments that this one does not install, with the extra that does."""

_METHODS = ("reset", "step", "close")


def load_environment(
    name: str, base_dir: Path | None = None, *, loading_s: float | None = LOADING_S
) -> EnvironmentClass:
    """Return the class of an environment.

    Args:
        loading_s: limit for importing it; None if the caller keeps one of its own.

    Raises:
        PluginError: the name is unknown or does not load, or the object has no reset and step.
    """
    try:
        found: object = replace(ENVIRONMENTS, loading_s=loading_s).load(name, base_dir)
    except PluginError as error:
        missing_package = getattr(error.__cause__, "name", None)
        if name not in ENVIRONMENTS.builtins or missing_package not in _PACKAGES:
            raise
        extra = _PACKAGES[missing_package]
        raise PluginError(
            f"the environment {name!r} needs the package {missing_package}, which is not installed",
            todo=f"pip install 'rftdata[{extra}]'",
        ) from error
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        what = f"has no {missing[0]}" if isinstance(found, type) else f"is a {type(found).__name__} and not a class"
        raise PluginError(
            f"the environment {name!r} {what}",
            allowed="a class with reset(task, seed), step(action, role) and close()",
            todo="derive it from rftcore.environments.Environment",
        )
    return cast(EnvironmentClass, found)


def check_environment(name: str, args: Mapping[str, Any], base_dir: Path | None = None) -> EnvironmentClass:
    """Return the class of an environment whose constructor accepts these arguments.

    Raises:
        PluginError: see `load_environment`.
        ConfigError: the constructor does not accept them, or requires another.
    """
    found = load_environment(name, base_dir)
    signature = inspect.signature(found)
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"the environment {name!r} does not accept its environment_args: {error}",
            value=dict(args),
            allowed=", ".join(signature.parameters) or "none",
            todo="correct environment_args",
        ) from error
    return found


def imported_environment(name: str) -> EnvironmentClass | None:
    """Return the class of an environment whose module this process has imported; None for another."""
    module, _, attribute = ENVIRONMENTS.builtins.get(name, name).partition(":")
    found = getattr(sys.modules.get(module), attribute, None)
    return found if isinstance(found, type) else None


def runs_in_event_loop(environment: EnvironmentClass) -> bool:
    """Return whether an environment runs in the event loop: all methods that it defines are coroutine functions."""
    methods = [getattr(environment, method) for method in _METHODS]
    return all(inspect.iscoroutinefunction(method) for method in methods if method is not Environment.close)
