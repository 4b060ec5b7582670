"""Selectors decide which task of a taskset is tried next; one file each, named in this table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rftdata import plugins
from rftdata.errors import ConfigError
from rftdata.selectors.base import Observation, Selector

SELECTORS = {
    "sequential": "rftdata.selectors.sequential:Sequential",
    "shuffle": "rftdata.selectors.shuffle:Shuffle",
}

__all__ = ["SELECTORS", "Observation", "Selector", "build_selector"]


def build_selector(
    name: str, args: dict[str, Any], task_ids: Sequence[int], seed: int, base_dir: Path | None = None
) -> Selector:
    """The selector called `name` over the active tasks of a taskset, ascending.

    Raises:
        PluginError: unknown name. ConfigError: arguments it does not take.
    """
    cls = plugins.load("selector", name, SELECTORS, base_dir)
    try:
        selector: Selector = cls(task_ids=task_ids, seed=seed, **args)
    except TypeError as error:
        raise ConfigError(
            f"the selector {name!r} does not take these arguments: {error}",
            value=args,
            todo="correct the section selector",
        ) from error
    return selector
