"""The host: a process with one thread that forks a supervisor for each program. It holds nothing of the run, and ends with its caller."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys

from rftcore.sandbox import kernel
from rftcore.sandbox.cgroups import remove_left_groups
from rftcore.sandbox.process_tree import children
from rftcore.sandbox.supervisor import supervise

_MOST_FILES = 16


def serve(connection: socket.socket) -> None:
    """Fork a supervisor for each message until the connection ends. A message carries the supervisor's channel and the program's files."""
    supervisors: set[int] = set()
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    ended, signalled = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(signalled, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides when programs end
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if ended in ready:
            os.read(ended, 4096)
            _end_orphans(supervisors)
        if connection.fileno() not in ready:
            continue
        data, files, _, _ = socket.recv_fds(connection, 16, _MOST_FILES)
        if not data:
            return
        for file in files:  # Python 3.11 ignores the flag that does so
            os.set_inheritable(file, False)
        try:
            child = os.fork()
            supervisors.add(child)
        except OSError:  # the caller sees the end of the channel
            child = -1
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
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


def _end_orphans(supervisors: set[int]) -> None:
    """Reap what has ended, and kill what a killed supervisor has left: this process is now its parent."""
    with contextlib.suppress(ChildProcessError):
        while process := os.waitpid(-1, os.WNOHANG)[0]:
            supervisors.discard(process)
    for child in children(os.getpid()):
        if child not in supervisors:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    remove_left_groups()
    with socket.socket(fileno=int(sys.argv[1])) as given:
        serve(given)
