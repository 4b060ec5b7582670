"""`RankProcess`: rank 0's handle of another rank on its machine. It starts the process, calls methods in it, and reports how it ended.

A rank has a session of its own, so that signals to the process group of rank 0 do not reach it. It ends whenever rank 0 ends
(`rftcore.trainer.processes.rank`).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from rftdata.errors import RftError, RoleFailedError
from rftdata.processes import await_exit, kill_group

_MODULE = "rftcore.trainer.processes.rank"
# Longest wait for the end of a process that has closed its connection.
_END_S = 5.0


class RankProcess:
    """A started rank. The thread that creates it must live as long as this process.

    Args:
        rank: its number, from 1.
        memory_fd: file of the memory of the batches, see `SharedBatchMemory`.

    Attributes:
        connection: readable once the rank has answered or ended.
        busy: whether it has not answered the last call yet.
        death: why it ended; None while it runs, or while its end has not been noticed.
    """

    def __init__(self, rank: int, memory_fd: int) -> None:
        self.rank = rank
        self.busy = False
        self.death: RoleFailedError | None = None
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), memory_fd)
        numbers = (os.getpid(), rank, *fds)
        path = os.pathsep.join(folder for folder in sys.path if folder)
        # -P: a file in the current folder must not replace a module of the same name.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE, *map(str, numbers)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "TQDM_DISABLE": "1"},
        )
        theirs.close()
        self.connection = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Start a method in the rank; return at once.

        Raises:
            RoleFailedError: the rank has ended.
        """
        try:
            self.connection.send((method, arguments))
        except OSError as error:
            raise self._died() from error
        self.busy = True

    def answer(self) -> RftError | None:
        """Receive the answer: the error of the method, or of the process if it ended; None if the method succeeded."""
        try:
            error: RftError | None = self.connection.recv()
        except (EOFError, OSError):
            return self._died()
        self.busy = False
        return None if error is None else error.about(f"rank {self.rank}")

    def kill(self) -> None:
        """Kill the process and those that it started."""
        kill_group(self._process)  # the group outlives the process if that has started others

    def await_end(self) -> None:
        """Wait until the killed process has ended."""
        self._process.wait()
        self.connection.close()

    def _died(self) -> RoleFailedError:
        self.busy = False
        if not await_exit(self._process, _END_S):
            how = "it closed its connection"
        else:
            self.kill()  # the processes that it started
            code = self._process.wait()
            how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
            if code == -signal.SIGKILL:
                how += ", possibly for lack of memory"
        self.death = RoleFailedError(f"rank {self.rank} of the trainer (pid {self.pid}) died: {how}")
        return self.death
