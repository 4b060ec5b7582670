"""Rank 0's view of the other ranks of its machine: it starts their processes, asks them, and learns how they ended.

A rank has a session of its own, so that signals to the process group of rank 0 do not reach it. It ends with rank 0, however that ends
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
# A closed connection precedes the end of its process.
_END_S = 5.0


class RankProcess:
    """A started rank. The thread that creates it must live as long as this process.

    Args:
        rank: its number, from 1.
        memory_fd: the memory of the batches, see `SharedBatchMemory`.

    Attributes:
        connection: readable once the rank has answered or ended.
        busy: whether an answer is still to come.
        death: why it ended; None if that was not noticed, or has not happened.
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

    def ask(self, method: str, arguments: tuple[Any, ...]) -> None:
        """Let it call a method; returns at once.

        Raises:
            RoleFailedError: it has ended.
        """
        try:
            self.connection.send((method, arguments))
        except OSError as error:
            raise self._died() from error
        self.busy = True

    def answer(self) -> RftError | None:
        """Take the answer that has come: the error of the method, or why the process ended; None if the method succeeded."""
        try:
            error: RftError | None = self.connection.recv()
        except (EOFError, OSError):
            return self._died()
        self.busy = False
        return None if error is None else error.about(f"rank {self.rank}")

    def kill(self) -> None:
        """Kill the process and those that it started."""
        kill_group(self._process)  # it outlives the process if that has started others

    def await_end(self) -> None:
        """Wait until the killed process has ended."""
        self._process.wait()
        self.connection.close()

    def _died(self) -> RoleFailedError:
        self.busy = False
        if not await_exit(self._process, _END_S):
            how = "it closed its connection"
        else:
            self.kill()  # what it started
            code = self._process.wait()
            how = f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.strsignal(-code)})"
            if code == -signal.SIGKILL:
                how += ", possibly for lack of memory"
        self.death = RoleFailedError(f"rank {self.rank} of the trainer (pid {self.pid}) died: {how}")
        return self.death
