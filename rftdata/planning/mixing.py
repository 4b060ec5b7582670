"""The choice of the taskset for each planned group.

The weight of a taskset at an explorer step is its `weight` there (a number, or a schedule), times the number of its active tasks to the
power 1 / `mixing.temperature` if that is set. For each place every taskset first gains its share as credit, then the taskset with the
largest credit gets the place and pays 1. The proportions therefore hold at every step without randomness, also while weights change:
a taskset does not make up later for what it was due under earlier weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from rftdata.config import MixingConfig, TasksetConfig, WeightSchedule
from rftdata.errors import ConfigError


def weight_at(weight: float | WeightSchedule, step: int) -> float:
    """Return a taskset's weight at an explorer step."""
    if isinstance(weight, int | float):
        return float(weight)
    if step <= weight[0][0]:
        return weight[0][1]
    for (begin, before), (end, after) in pairwise(weight):
        if step <= end:
            return before + (after - before) * (step - begin) / (end - begin)
    return weight[-1][1]


def check_weights(tasksets: Sequence[TasksetConfig]) -> None:
    """Refuse schedules in which all weights are 0 at some step.

    Raises:
        ConfigError: names the step.
    """
    # Between two points of all schedules the sum is linear, so it is 0 inside only if it is 0 at both ends.
    points = {step for t in tasksets if isinstance(t.weight, tuple) for step, _ in t.weight}
    for step in sorted(points):
        if not sum(weight_at(t.weight, step) for t in tasksets) > 0:
            raise ConfigError(
                f"at explorer step {step} every taskset has the weight 0, so no task could be selected",
                todo="let one of the schedules stay above 0",
            )


def mix(
    steps: Sequence[int],
    tasksets: Sequence[TasksetConfig],
    mixing: MixingConfig,
    sizes: Mapping[str, int],
    room: Mapping[str, int | None],
    credit: dict[str, float],
) -> list[str]:
    """Return the taskset of each place, given its explorer step; fewer than requested if nothing is left to try.

    Args:
        sizes: number of active tasks of each taskset.
        room: number of groups that may still be planned for it; None for any number.
        credit: credit of each taskset; modified.
    """
    left = dict(room)
    chosen: list[str] = []
    for step in steps:
        still = [t for t in tasksets if left[t.name] is None or left[t.name]]
        largest = max((sizes[t.name] for t in still), default=1)
        weights = {t.name: _weight(t, step, mixing, sizes[t.name] / largest) for t in still}
        total = sum(weights.values())
        if total <= 0:
            break
        for name, weight in weights.items():
            credit[name] = credit.get(name, 0.0) + weight / total
        # A weight of 0 is never chosen, even with credit left from earlier steps.
        name = max((n for n in weights if weights[n] > 0), key=lambda n: credit[n])
        credit[name] -= 1
        remaining = left[name]
        if remaining is not None:
            left[name] = remaining - 1
        chosen.append(name)
    return chosen


def _weight(taskset: TasksetConfig, step: int, mixing: MixingConfig, size: float) -> float:
    """Return a weight; `size` is relative to the largest set, so that powers cannot overflow."""
    by_size = 1.0 if mixing.temperature is None else size ** (1 / mixing.temperature)
    return weight_at(taskset.weight, step) * by_size
