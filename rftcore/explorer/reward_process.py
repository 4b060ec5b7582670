"""A separate process for reward functions: one call at a time, ended when a call takes too long.

A plain (not async) function may compute, wait or hang. Here it delays neither the explorer's event loops nor the engine,
and even a call inside C code that never returns can be ended. The functions run in the process's main thread, because some libraries
(such as math-verify with its signal alarms) work in no other.

The child starts a timer of faulthandler before each call. The timer does not need the interpreter; it writes the
stack and ends the process. The parent reads the stack, reports it, and starts another process for the next call.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Awaitable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

from rftcore.explorer.failures import FunctionFailedError, as_traceback, describe, user_frames, user_line, user_stack
from rftcore.explorer.reward_value import CheckedValue, checked_value
from rftcore.parent_process import end_with_parent
from rftcore.rewards import Reward, load_rewards
from rftcore.workflows.task import Task, Turn
from rftdata.errors import RftError
from rftdata.processes import await_exit, kill_group
from rftdata.user_code import held_lock_timer

_START_S = 120.0
_GRACE_S = 5.0
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')


class RewardProcess:
    """The parent's side, for one thread at a time. The thread that creates it must live as long as the process.

    Attributes:
        usable: whether it can be called; false after a call that exceeded its limit or ended the process.
    """

    usable = True

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._stacks = tempfile.TemporaryFile("w+b")  # noqa: SIM115 - lives as long as the process
        fds = (theirs.fileno(), self._stacks.fileno())
        path = os.pathsep.join(folder for folder in sys.path if folder)
        # -P: a file in the current folder must not replace a module of the same name. A separate session, so that processes started by
        # a function end with it.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        theirs.close()

    def load(self, names: list[str], base_dir: Path) -> None:
        """Load the functions; called once, before the first call.

        Args:
            names: rewards as named in the configuration.
            base_dir: folder of the configuration file.

        Raises:
            PluginError: a reward cannot be loaded.
            FunctionFailedError: the process does not start.
        """
        self._ask((os.getpid(), names, base_dir), _START_S, "loading the reward functions", f"{_START_S:g} s")

    def is_alive(self) -> bool:
        """Return whether the process has not ended since the last call."""
        return not await_exit(self._process, 0.0)

    def call(self, name: str, turn: Turn, task: Task, timeout_s: float, limit: str) -> CheckedValue:
        """Return the result of a reward.

        Args:
            limit: the setting with the value `timeout_s`, for messages.

        Raises:
            FunctionFailedError: the function raised, took too long or ended the process. In the last two cases this object is unusable.
            RftError: the function raised it.
        """
        what = f"the reward {name!r} on task {task.task_key!r}"
        value: CheckedValue = self._ask((name, turn, task, timeout_s), timeout_s + _GRACE_S, what, limit)
        return value

    def kill(self) -> None:
        """End the process; a call in flight fails in the thread that waits for it."""
        self.usable = False
        kill_group(self._process)  # it outlives the process if a function started others

    def close(self) -> None:
        """End the process and everything it started, and release its resources."""
        self._connection.close()
        self.kill()
        self._process.wait()
        self._stacks.close()

    def _ask(self, question: object, patience_s: float, what: str, limit: str) -> Any:
        try:
            self._connection.send(question)
            answered = self._connection.poll(patience_s)
            answer: tuple[str, Any] = self._connection.recv() if answered else ("silent", None)
        except (EOFError, OSError):
            answer = ("ended", None)
        outcome, value = answer
        if outcome == "value":
            return value
        if outcome == "raised":
            raise value
        if self.is_alive() and outcome == "ended":
            await_exit(self._process, _GRACE_S)  # its exit code is more informative than our signal
        self.kill()
        raise self._failure(what, limit, self._process.wait(), outcome)

    def _failure(self, what: str, limit: str, code: int, outcome: str) -> FunctionFailedError:
        """Describe why the process ended: its timer ended it and wrote the stack, or a signal ended it."""
        self._stacks.seek(0)
        dumped = self._stacks.read().decode(errors="replace")
        frames = user_frames(_frames_of(dumped))
        if dumped.startswith("Timeout") or outcome == "silent":
            text = f"{what} took longer than {limit}{user_line(frames)}"
            return FunctionFailedError(text, as_traceback(frames, text), timed_out=True)
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        text = f"{what} ended its process with {how}{user_line(frames)}"
        return FunctionFailedError(text, as_traceback(frames, text))


def _frames_of(dumped: str) -> traceback.StackSummary:
    """Return the main thread's frames from faulthandler's output, outermost first."""
    threads = dumped.split("\n\n")
    # The user's own threads have no frame of this module.
    lines = next((thread for thread in threads if Path(__file__).name in thread), threads[-1]).splitlines()
    matches = [match for line in lines if (match := _FRAME.match(line))]
    return traceback.StackSummary.from_list([(m["file"], int(m["line"]), m["name"], None) for m in reversed(matches)])


def main(socket_fd: int, stacks_fd: int) -> None:
    """Run the child: answer calls until the parent closes the connection."""
    connection = Connection(socket_fd)
    with open(stacks_fd, "wb", buffering=0) as stacks:
        faulthandler.enable(stacks)
        parent, names, base_dir = connection.recv()
        end_with_parent(parent)
        functions = _load(connection, names, base_dir)
        held_lock_timer.hand_over()  # from here on the timer is that of the calls
        while True:
            try:
                name, turn, task, timeout_s = connection.recv()
            except (EOFError, ConnectionResetError):
                return
            connection.send(_answer(functions[name], name, turn, task, timeout_s, stacks))


def _load(connection: Connection, names: list[str], base_dir: Path) -> dict[str, Reward]:
    try:
        functions = load_rewards(names, base_dir)
    except RftError as error:
        connection.send(("raised", error))
        raise SystemExit(1) from error
    connection.send(("value", None))
    return functions


def _answer(
    function: Reward, name: str, turn: Turn, task: Task, timeout_s: float, stacks: IO[bytes]
) -> tuple[str, Any]:
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    try:
        value = function(turn, task)
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        return "value", checked_value(name, value, task)
    except RftError as error:
        return "raised", error if error.can_be_sent() else FunctionFailedError(describe(error), user_stack(error))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - the boundary: errors of a user's code are data
        return "raised", FunctionFailedError(describe(error), user_stack(error))
    finally:
        faulthandler.cancel_dump_traceback_later()


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
