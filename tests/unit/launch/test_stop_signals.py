"""Signal handlers are restored when a run ends."""

from __future__ import annotations

import subprocess
import sys

# A handler that a library in C sets before Python looks at it: Python knows that there is one, and not which.
FROM_C = """
import ctypes, signal, sys
from rftcore.launch.signals import StopSignals

libc = ctypes.CDLL(None)
libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
libc.signal(signal.SIGTERM, ctypes.cast(libc.getpid, ctypes.c_void_p))
del sys.modules["_signal"]
import _signal

assert signal.getsignal(signal.SIGTERM) is None
with StopSignals() as signals:
    signals.defer()
    signal.raise_signal(signal.SIGTERM)
    assert signals.first is signal.SIGTERM
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


def test_a_handler_that_was_set_from_c_becomes_the_default() -> None:
    done = subprocess.run([sys.executable, "-c", FROM_C], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
