"""SPEED: a few rollouts first, the others only where these neither all failed nor all succeeded (arXiv 2506.09016).

Tasks come as `shuffle` has them. Of each group `screen_rollouts` rollouts run first; the group goes on only where low < pass rate < high
of these (the paper's screening and continuation phase, on one group instead of on two batches). Otherwise it is dropped by
the stage `screening`, and its place is refilled up to `explorer.max_refill`: a screened group costs `screen_rollouts` rollouts
instead of `group_size`.
"""

from __future__ import annotations

from rftdata.errors import ConfigError
from rftdata.selectors.base import Screening, TaskIds
from rftdata.selectors.checks import number, whole
from rftdata.selectors.shuffle import Shuffle


class Speed(Shuffle):
    """Shuffled tasks with a screening rule.

    Args:
        screen_rollouts: rollouts of a group that run first; fewer than the group has.
        low, high: bounds of the pass rate of these between which a group goes on, both excluded.
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
