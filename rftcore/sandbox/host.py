"""The host: a process with one thread that forks a supervisor for each program. It holds nothing of the run, and ends with its caller."""

from __future__ import annotations

import os
import signal
import socket
import sys

from rftcore.sandbox.cgroups import remove_left_groups
from rftcore.sandbox.supervisor import supervise

_MOST_FILES = 16


def serve(connection: socket.socket) -> None:
    """Fork a supervisor for each message until the connection ends. A message carries the supervisor's channel and the program's files."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when programs end
    while True:
        data, files, _, _ = socket.recv_fds(connection, 16, _MOST_FILES)
        if not data:
            return
        for file in files:  # Python 3.11 ignores the flag that does so
            os.set_inheritable(file, False)
        try:
            child = os.fork()
        except OSError:  # the caller sees the end of the channel
            child = -1
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                connection.close()
                supervise(files[0], files[1:])
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        for file in files:
            os.close(file)


if __name__ == "__main__":
    remove_left_groups()
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given)
