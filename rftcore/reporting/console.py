"""The console that tables are printed on."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from rftcore.reporting.visible_text import visible


class OutputConsole(Console):
    """Rich's console on the standard output, without highlighting. Control characters of texts are printed as escapes.

    Args:
        pipe_width: width in columns where the output is not a terminal; None for Rich's default.
    """

    def __init__(self, pipe_width: int | None = None) -> None:
        super().__init__(highlight=False)
        if pipe_width is not None and not self.is_terminal:
            self.width = pipe_width

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield what is printed of an object."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)

    def on_broken_pipe(self) -> None:
        """Raise, as `print` does. Rich's own method ends the process with 1."""
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
