"""The console that tables are printed on."""

from __future__ import annotations

import errno
import os

from rich.console import Console


class OutputConsole(Console):
    """Rich's console on the standard output, without highlighting.

    Args:
        pipe_width: width in columns where the output is not a terminal; None for Rich's default.
    """

    def __init__(self, pipe_width: int | None = None) -> None:
        super().__init__(highlight=False)
        if pipe_width is not None and not self.is_terminal:
            self.width = pipe_width

    def on_broken_pipe(self) -> None:
        """Raise, as `print` does. Rich's own method ends the process with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
