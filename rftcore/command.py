"""The entry point of the console script.

Importing the command line takes a second or two, and Ctrl-C in that time must end it as it does later: with a line and exit code 130.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run `rft`."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # a shell's background job ignores it, and goes on doing so
        signal.signal(signal.SIGINT, _end)
    from rftcore import cli

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    cli.main()


def _end(number: int, frame: FrameType | None) -> None:
    # No exception: what is being imported may catch it, or print it as an error of its own.
    os.write(2, b"rft: interrupted.\n")
    os._exit(130)
