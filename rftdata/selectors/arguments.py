"""Checks of selectors' arguments, with errors in terms of the configuration."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rftdata.errors import ConfigError


def number(selector: str, name: str, value: Any, low: float, high: float) -> None:
    """Refuse a value that is not a finite number from `low` to `high`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not low <= value <= high:
        allowed = f"{low:g} to {high:g}" if math.isfinite(high) else f"{low:g} or more"
        raise _error(selector, name, value, f"a number, {allowed}")


def whole(selector: str, name: str, value: Any, low: int) -> None:
    """Refuse a value that is not a whole number of at least `low`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise _error(selector, name, value, f"a whole number, {low} or more")


def flag(selector: str, name: str, value: Any) -> None:
    """Refuse a value that is neither true nor false."""
    if not isinstance(value, bool):
        raise _error(selector, name, value, "true or false")


def feature_list(selector: str, value: Any, counts: Sequence[int] = ()) -> list[str]:
    """Return names of features; a single one needs no list.

    Args:
        counts: allowed numbers of names; any number from 1 when empty.
    """
    names = [value] if isinstance(value, str) else value
    good = isinstance(names, list | tuple) and all(isinstance(name, str) and name for name in names)
    if not good or (len(names) not in counts if counts else not names):
        how_many = " or ".join(map(str, counts)) if counts else "one or more"
        raise _error(selector, "features", value, f"a list of {how_many} keys of rft.task.features")
    return list(names)


def _error(selector: str, name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(
        f"the selector {selector!r} cannot use this {name}",
        value=value,
        allowed=allowed,
        todo="correct the section selector",
    )
