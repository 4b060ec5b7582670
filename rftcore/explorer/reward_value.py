"""The valid results of a reward: a finite number, `TokenRewards`, or a mapping of names to these."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from rftcore.workflows.task import Task, TokenRewards
from rftdata.errors import RftError
from rftdata.limits import LARGEST_REWARD

CheckedPart = float | TokenRewards
CheckedValue = CheckedPart | dict[str, CheckedPart]


def checked_value(name: str, value: object, task: Task) -> CheckedValue:
    """Return the result of a reward as plain numbers.

    Raises:
        RftError: it is neither a finite number nor `TokenRewards` nor a mapping of names to these; nothing is converted silently.
    """
    if isinstance(value, Mapping):
        return {str(key): _part(f"{name}, part {key!r},", part, task) for key, part in value.items()}
    return _part(name, value, task)


def checked_values(name: str, values: object, task: Task, num_rollouts: int) -> list[CheckedValue]:
    """Return the result of a reward over a whole group as plain numbers, one value for each rollout.

    Raises:
        RftError: it is no list of one value for each rollout, or a value is neither a finite number nor a mapping of names to these.
    """
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed and not (hasattr(values, "__array__") and getattr(values, "ndim", 0) == 1):
        raise _refused(
            name, described(values), task, "return one number for each rollout, in the order of the rollouts"
        )
    found = list(values)  # type: ignore[call-overload]  # a list or an array
    if len(found) != num_rollouts:
        what = f"{len(found)} values for {num_rollouts} rollouts"
        raise _refused(
            name, what, task, "return one number for each of the rollouts that it was given; failed ones are left out"
        )
    for place, value in enumerate(found):
        parts = value.values() if isinstance(value, Mapping) else [value]
        if any(isinstance(part, TokenRewards) for part in parts):
            raise _refused(name, f"TokenRewards for rollout {place}", task, "return them from a reward of single turns")
    return [checked_value(f"{name}, rollout {place},", value, task) for place, value in enumerate(found)]


def _refused(name: str, what: str, task: Task, todo: str) -> RftError:
    return RftError(
        f"the reward {name} returned {what} for the group of the task {task.task_key!r} of {task.taskset!r}",
        allowed="a list with a finite number, or a mapping of names to these, for each rollout",
        todo=todo,
    )


def _part(name: str, value: object, task: Task) -> CheckedPart:
    if isinstance(value, TokenRewards):
        return TokenRewards([_number(f"{name}, token {place},", one, task) for place, one in enumerate(value.values)])
    return _number(name, value, task)


def _number(name: str, value: object, task: Task) -> float:
    if is_number(value) and _fits(value):
        return float(value)
    raise RftError(
        # The value as text, because it comes from another process, and some values cannot be sent.
        f"the reward {name} returned {described(value)} for the task {task.task_key!r} of {task.taskset!r}",
        allowed="a finite number, TokenRewards, or a mapping of names to these",
        todo=_advice(value),
    )


def is_number(value: object) -> TypeGuard[numbers.Real]:
    """Return whether a value is a number, which a condition is not."""
    return not isinstance(value, bool) and isinstance(value, numbers.Real)


def _fits(value: numbers.Real) -> bool:
    return value < LARGEST_REWARD and not value <= -LARGEST_REWARD


def described(value: object) -> str:
    """Return what a function returned, as a part of a sentence that ends with a comma unless it is short."""
    if value is None:
        return "nothing"
    if is_number(value) and not _fits(value):
        # Without math.isfinite, which converts to a float.
        is_finite = value == value and value not in (math.inf, -math.inf)
        return f"{reprlib.repr(value)}, which is {'too great for float32' if is_finite else 'not finite'},"
    try:
        text = reprlib.repr(value)
    except Exception:  # noqa: BLE001 - the user's own class
        text = "(without a text form)"
    return f"{text}, a value of type {type(value).__name__},"


def _advice(value: object) -> str:
    if isinstance(value, bool):
        return "return float(…) of the condition"
    if value is None:
        return "return 0.0 if there is nothing to reward; a branch without `return` returns None"
    return "correct the reward function"
