"""The console script.

Importing the command line takes a second or two. Ctrl-C in that time must end it in the same way as later: with a line and exit code 130.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

from rftcore.garbage import collect_rarely, large_imports


def main() -> None:
    """Run `rft`."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise, as in a shell's background job, the signal stays ignored
        signal.signal(signal.SIGINT, _end)
    collect_rarely()
    with large_imports():
        from rftcore import cli

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    cli.main()


def _end(number: int, frame: FrameType | None) -> None:
    # No exception, because the code being imported might catch it, or print it as another error.
    os.write(2, b"rft: interrupted.\n")
    os._exit(130)
