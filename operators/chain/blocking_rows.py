"""The rows at which a stage blocks its process for ever: they are set aside before the process ends."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

from rftdata.errors import TimeLimitError
from rftdata.user_code.time_limits import when_blocked

_ROWS = re.compile(r" on \d+ rows? \((\d+)(?: to (\d+))?\)")


@contextlib.contextmanager
def setting_aside_blocking_rows(
    set_aside: Callable[[TimeLimitError], object], end_process: Callable[[TimeLimitError], object]
) -> Iterator[None]:
    """If a stage blocks the process in this block, set rows aside and end the process.

    Args:
        set_aside: called with the stage's error, in another thread.
        end_process: called with the error after that, even if `set_aside` fails.
    """

    def end(error: TimeLimitError) -> None:
        try:
            set_aside(error)
        finally:
            end_process(error)

    with when_blocked(end):
        yield


def named_rows(sentence: str) -> tuple[int, int] | None:
    """Return the first and the last row that an error of a stage names (see `Stage.on_rows`); None if it names none."""
    rows = _ROWS.search(sentence)
    return None if rows is None else (int(rows[1]), int(rows[2] or rows[1]))
