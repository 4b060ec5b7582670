"""Messages of `rft run` about rows of `human_review` that wait for an answer."""

from __future__ import annotations

import time

from rftcore.launch.terminal.views import View
from rftdata.reports.progress import Snapshot

# A person answers one row after the other, so a new count is shown only after a while.
_QUIET_S = 15.0


def waits_for_people(number: int, run: str, option: str = "") -> str:
    """Return the sentence with the number of waiting rows and the command to answer them.

    Args:
        option: the option with which commands find the buffer, see `rftcore.run.commands.buffer_option`.
    """
    rows = "1 experience waits" if number == 1 else f"{number} experiences wait"
    return f"{rows} for a person: `rft label queue --run {run}{option}` lists the questions"


class OpenReviews:
    """Reports once that rows wait for a person, and again when their number has changed.

    Args:
        option: see `waits_for_people`.
        quiet_s: shortest time between two reports of a changed number; that no row waits is reported at once.
    """

    def __init__(self, view: View, option: str = "", quiet_s: float = _QUIET_S) -> None:
        self._view, self._option, self._quiet_s = view, option, quiet_s
        self._reported, self._at = 0, -quiet_s

    def update(self, snapshot: Snapshot) -> None:
        """Report what has changed."""
        number: int = snapshot.open_reviews
        if number == self._reported or (number and time.monotonic() - self._at < self._quiet_s):
            return
        self._reported, self._at = number, time.monotonic()
        text = waits_for_people(number, snapshot.run, self._option)
        self._view.message(text if number else "no experience waits for a person any more")
