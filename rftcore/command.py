"""The console script.

Importing the command line takes a second or two. Ctrl-C in that time must end it in the same way as later: with a line and exit code 130.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from rftcore.garbage import collect_rarely, large_imports


def main() -> None:
    """Run `rft`."""
    _open_closed_files()
    _refuse_hidden_package()
    # A process inherits its parent's decision to ignore the ends of children, and would then not learn of those of its own.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:  # otherwise, as in a shell's background job, the signal stays ignored
        signal.signal(signal.SIGINT, _end)
    collect_rarely()
    with large_imports():
        from rftcore import cli

    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, handler)
    cli.main()


def _open_closed_files() -> None:
    """Replace closed standard files, so that the process does not print into the next file that it opens."""
    for number, mode in enumerate(("r", "w", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.dup2(opened := os.open(os.devnull, os.O_RDWR), number)
            if opened != number:
                os.close(opened)
            os.set_inheritable(number, True)
            name = ("stdin", "stdout", "stderr")[number]
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - as long as the process


def _refuse_hidden_package() -> None:
    """End with an error if another package of the name `operators`, which is a common one, comes before ours on the path of Python."""
    ours = Path(__file__).resolve().parent.parent / "operators"
    spec = importlib.util.find_spec("operators")
    imported = Path(next(iter(spec.submodule_search_locations or ()), spec.origin or "")).resolve() if spec else None
    if imported != ours:
        hidden = (
            "is missing"
            if imported is None
            else f"is hidden by {imported}, which comes first on the path of Python (PYTHONPATH, or the folder of `python -m`)"
        )
        print(
            f"rft: the package operators of rftdata, in {ours}, {hidden}; allowed: no other package of this name; rename that one, or take the folder "
            "that contains it off the path.",
            file=sys.stderr,
        )
        sys.exit(2)


def _end(number: int, frame: FrameType | None) -> None:
    # No exception, because the code being imported might catch it, or print it as another error.
    os.write(2, b"rft: interrupted.\n")
    os._exit(130)
