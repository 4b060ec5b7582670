"""`rft run` to the person it waits for: how many rows of `human_review` nobody has answered yet."""

from __future__ import annotations

import time

from rftcore.launch.views import View
from rftdata.progress import Snapshot

# A person answers one after the other; the count is told again when a while has passed.
_QUIET_S = 15.0


def waits_for_people(number: int, run: str, option: str = "") -> str:
    """The sentence that says how many rows wait, and where to answer them.

    Args:
        option: what the command needs to find the buffer, see `rftcore.run.commands.buffer_option`.
    """
    rows = "1 experience waits" if number == 1 else f"{number} experiences wait"
    return f"{rows} for a person: `rft label queue --run {run}{option}` lists what is asked"


class People:
    """Tells once that rows wait for a person, and again when their number has changed.

    Args:
        option: see `waits_for_people`.
        quiet_s: a changed number is not told sooner after the last one; that none waits any more is told at once.
    """

    def __init__(self, view: View, option: str = "", quiet_s: float = _QUIET_S) -> None:
        self._view, self._option, self._quiet_s = view, option, quiet_s
        self._told, self._at = 0, -quiet_s

    def update(self, snapshot: Snapshot) -> None:
        """Say what has changed."""
        number: int = snapshot.open_reviews
        if number == self._told or (number and time.monotonic() - self._at < self._quiet_s):
            return
        self._told, self._at = number, time.monotonic()
        text = waits_for_people(number, snapshot.run, self._option)
        self._view.message(text if number else "no experience waits for a person any more")
