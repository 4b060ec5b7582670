"""SPEED: a few rollouts first, the others only if these neither all failed nor all succeeded (arXiv 2506.09016).

Tasks come in the order of `shuffle`. In each group `screen_rollouts` rollouts run first. The group continues only if low < pass rate < high
of these (the paper's screening and continuation phase, in one group instead of in two batches). Otherwise the stage `screening`
drops it, and its place is refilled up to `explorer.max_refill`. A screened group costs `screen_rollouts` rollouts instead of `group_size`.
"""

from __future__ import annotations

from rftdata.errors import ConfigError
from rftdata.selectors.arguments import number, whole
from rftdata.selectors.base import Screening, TaskIds
from rftdata.selectors.shuffle import Shuffle


class Speed(Shuffle):
    """Shuffled tasks with a screening rule.

    Args:
        screen_rollouts: number of rollouts of a group that run first; fewer than the group has.
        low, high: a group continues if their pass rate lies strictly between these bounds.
    """

    def __init__(
        self, task_ids: TaskIds, seed: int, *, screen_rollouts: int = 4, low: float = 0.0, high: float = 1.0
    ) -> None:
        super().__init__(task_ids, seed)
        whole("speed", "screen_rollouts", screen_rollouts, 1)
        number("speed", "low", low, 0, 1)
        number("speed", "high", high, 0, 1)
        if low >= high:
            raise ConfigError(
                f"the selector 'speed' needs low below high, not {low:g} and {high:g}",
                todo="correct the section selector",
            )
        self.screening = Screening(screen_rollouts, low, high)
