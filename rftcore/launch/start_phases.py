"""What `rft run` and its roles did before they had a row in the buffer: recorded as their activities once they have one."""

from __future__ import annotations

import time

from rftdata.processes import own_age_s


class StartPhases:
    """The phases of a start, one after another.

    Args:
        phase: the first one.
        of_process: whether it began with this process; otherwise it begins now.
    """

    def __init__(self, phase: str, *, of_process: bool = False) -> None:
        age_s = own_age_s() if of_process else 0.0
        self._begun = [(phase, time.monotonic() - age_s)]

    def begin(self, phase: str) -> None:
        """Begin the next phase."""
        self._begun.append((phase, time.monotonic()))

    def begun(self) -> list[tuple[str, float]]:
        """Return each phase with its begin, in seconds of the monotonic clock."""
        return list(self._begun)
