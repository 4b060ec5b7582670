"""Print the blocked call of a command even if C code holds the interpreter's lock for good, so that no Python code can run.

`rftdata.user_code.held_lock_timer` keeps a sentence about the running call in a file, appends the stacks, and ends the process.
A shell waits for the end of the command and prints the file if it contains stacks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rftdata.user_code import held_lock_timer

# Standard input ends when the process does, however it ends. The file is a sentence of known length followed by stacks. A process that could
# still print (`rftdata.user_code.blocked_process`) replaces the file by a report of another form, which is not printed again.
_PRINT = """
cat >/dev/null
if [ -f "$1" ] && [ "$(wc -c <"$1")" -gt "$2" ] && [ "$(head -c "$2" "$1" | wc -l)" -eq 1 ]; then printf 'rft: ' >&2; sed '1s/ *$/./' "$1" >&2; fi
"""


@contextlib.contextmanager
def printed() -> Iterator[None]:
    """Print, within the block, a call that holds the interpreter's lock for good."""
    descriptor, name = tempfile.mkstemp(prefix="rft-stacks-")
    os.close(descriptor)
    path = Path(name)
    try:
        with written_to(path, is_printed=True, is_kept=False):
            yield
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def written_to(path: Path, *, is_printed: bool, is_kept: bool = True) -> Iterator[None]:
    """Write, within the block, a call that holds the interpreter's lock for good to a file; with `is_printed`, print it, too.

    Args:
        is_kept: whether the file is kept if the process ends this way.
    """
    held_lock_timer.report_stacks_to(path)
    script = _PRINT if is_kept else f'{_PRINT}\nrm -f "$1"\n'
    command = ["/bin/sh", "-c", script, "rft", str(path), str(held_lock_timer.HEADER_BYTES)]
    printer = _start(command) if is_printed else None
    try:
        yield
    finally:
        held_lock_timer.report_stacks_to(None)
        path.unlink(missing_ok=True)
        if printer is not None:
            _stop(printer)


_printers: list[subprocess.Popen[bytes]] = []


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    # In its own session, so that it can be ended together with its children.
    printer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
    _printers.append(printer)
    return printer


def _stop(printer: subprocess.Popen[bytes]) -> None:
    """End a printer that has nothing to print, even if a child forked by C code holds its input open."""
    _printers.remove(printer)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(printer.pid, signal.SIGKILL)
    assert printer.stdin is not None
    printer.stdin.close()
    printer.wait()


def _close_in_child() -> None:
    """Close the pipes in a forked child, which may outlive this process and would hide its end from the printers."""
    for printer in _printers:
        assert printer.stdin is not None
        printer.stdin.close()
    _printers.clear()


os.register_at_fork(after_in_child=_close_in_child)
